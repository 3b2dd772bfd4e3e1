"""What nobody foresaw in a load or a write ends that one alone: the threads go on, and nobody waits for its end."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from contracts.kv_store import BlockKey, BlockWorth
from engine.engine import Engine
from kv_transfer.chunks.block_record import max_record_nbytes
from kv_transfer.tiers.host_memory import HostMemoryTier
from kv_transfer.tiers.record_codec import RecordCodec
from tests.kv_transfer.tiers.block_samples import LAYOUT, key_of, record_of, worth_of
from tests.kv_transfer.tiers.test_disk import open_tier
from tests.waiting import until
from tests.worker.core.tier_rig import (
    PROMPTS,
    Clock,
    answer,
    cached_tokens,
    fill,
    host,
    join,
    log_lines,
    settled,
    small_engine,
)
from worker.core.block_load import BlockLoad
from worker.core.host_pages import HostPages
from worker.core.kv_tiers import KVTiers
from worker.core.tier_loader import NUM_THREADS
from worker.core.tier_writer import QueuedRecord, TierWriter

pytestmark = pytest.mark.slow


class RaisingTier(HostMemoryTier):
    """It raises what no tier should while `fails`."""

    def __init__(self, engine: Engine) -> None:
        nbytes = max_record_nbytes(engine.layout)
        super().__init__(200 * nbytes, nbytes)
        self.fails = False

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[int]:
        self.require_health()
        return super().load(keys, into)

    def store(self, key: BlockKey, record: memoryview, worth: BlockWorth) -> bool:
        self.require_health()
        return super().store(key, record, worth)

    def require_health(self) -> None:
        if self.fails:
            raise ZeroDivisionError("of a tier")


class RaisingStore(RaisingTier):
    """It has to be asked what it holds, from the start."""

    name = "store"
    is_local = False

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        self.require_health()
        return super().lookup(keys)


@pytest.mark.parametrize("kind", [RaisingTier, RaisingStore])
def test_a_tier_that_raises_what_nobody_foresaw_keeps_its_threads(
    folder: Path, expected: list, caplog: pytest.LogCaptureFixture, kind: type[RaisingTier]
):
    """The clock stands: a prompt whose load never ended would wait for good."""
    engine = small_engine(folder)
    tier = kind(engine)
    tier.fails = True
    tiers = join(engine, tier, clock=Clock())
    tier.fails = False
    fill(engine, tiers)
    tier.fails = True
    for index, prompt in enumerate(PROMPTS):
        assert answer(engine, prompt, f"failing {index}") == expected[index]
        settled(tiers)
    answer(engine, PROMPTS[0][::-1], "new")
    settled(tiers)
    assert tiers.counters()[f"kv_{tier.name}_failed_loads"] >= len(PROMPTS) > NUM_THREADS
    assert tiers.counters()[f"kv_{tier.name}_dropped_blocks"] > 0
    assert log_lines(caplog, f"loading KV from the {tier.name} tier failed") == 1
    assert log_lines(caplog, f"writing KV to the {tier.name} tier failed") == 1
    assert "of a tier" in caplog.text, "there is no traceback"
    tier.fails = False
    assert cached_tokens(engine, PROMPTS[0], "well") == (96, expected[0])
    tiers.close()


def test_pages_that_could_not_be_written_are_free(folder: Path, expected: list, monkeypatch: pytest.MonkeyPatch):
    """A load that is given up waits for those that write to its pages."""
    engine, loads = small_engine(folder), list[BlockLoad]()
    tiers = join(engine, host(engine), clock=Clock())
    fill(engine, tiers)
    end = KVTiers._end
    monkeypatch.setattr(KVTiers, "_end", lambda self, load, now: loads.append(load) or end(self, load, now))
    monkeypatch.setattr("worker.core.block_load.STOP_TIMEOUT_S", 0.1)

    def fail(self: HostPages, block: int, payload: np.ndarray) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(HostPages, "write", fail)
    assert answer(engine, PROMPTS[0], "failing") == expected[0]
    (load,) = loads
    load.stop()
    tiers.close()


def test_a_bit_that_flips_while_a_record_waits_to_be_compressed_costs_that_record_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    codec, tier = RecordCodec(LAYOUT, ["lossless"]), open_tier(tmp_path)
    monkeypatch.setattr(codec, "choose", lambda *_: "lossless")
    writer, flipped = TierWriter(tier, codec), bytearray(record_of(1))
    flipped[-1] ^= 1
    for number, record in ((1, bytes(flipped)), (2, bytes(record_of(2)))):
        writer.put(QueuedRecord(key_of(number), record, worth_of(number), None))
    until(lambda: writer.is_idle)
    assert (tier.lookup([key_of(1)]), tier.lookup([key_of(2)])) == (0, 1)
    assert writer.counters()["dropped_blocks"] == 1
    assert "writing KV to the disk tier failed" in caplog.text and "checksum differs" in caplog.text
    writer.close()
    tier.close()
