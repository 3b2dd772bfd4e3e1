"""The tiers joined to a real engine: equal tokens, whatever happens to what they hold."""

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import LayoutMismatch
from contracts.kv_store import BlockKey, BlockWorth, KVStore
from engine.cache.load_plan import NewBlock
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import StepOutput
from kv_transfer.chunks.block_record import VERSION, max_record_nbytes, verify
from kv_transfer.tiers.host_memory import HostMemoryTier
from kv_transfer.tiers.remote_store import open_remote_store
from tests.engine.driving import drain, greedy, request, settings, tokens_of
from tests.worker.core.tier_rig import (
    PROMPTS,
    Clock,
    answer,
    cached_tokens,
    disk,
    host,
    join,
    settled,
    slack_s,
    small_engine,
)  # fmt: skip
from worker.core.kv_tiers import KVTiers

pytestmark = pytest.mark.slow


@pytest.fixture(params=["host", "disk", "store"])
def joined(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[tuple[Engine, KVTiers]]:
    engine = small_engine(folder)
    make: dict[str, Callable[[], KVStore]] = {
        "host": lambda: host(engine),
        "disk": lambda: disk(engine, tmp_path / "disk"),
        "store": lambda: open_remote_store(f"file://{tmp_path}"),
    }
    tiers = join(engine, make[request.param]())
    yield engine, tiers
    tiers.close()


def test_prompts_that_the_pool_evicted_come_back_with_equal_tokens(joined: tuple[Engine, KVTiers], expected: list):
    engine, tiers = joined
    for turn in range(3):
        for index, prompt in enumerate(PROMPTS):
            num_cached, tokens = cached_tokens(engine, prompt, f"{turn} {index}")
            assert tokens == expected[index]
            assert num_cached == (0 if turn == 0 else (len(prompt) - 1) // 16 * 16)
            settled(tiers)
    assert tiers.counters()["kv_loaded_prompts"] == 2 * len(PROMPTS)


def test_the_next_turn_finds_prompt_and_answer(joined: tuple[Engine, KVTiers], folder: Path):
    engine, tiers = joined
    first = answer(engine, PROMPTS[0], "one", greedy(32))
    settled(tiers)
    answer(engine, PROMPTS[1], "between")
    settled(tiers)
    conversation = [*PROMPTS[0], *first, *PROMPTS[2][:20]]
    num_cached, tokens = cached_tokens(engine, conversation, "two")
    assert num_cached == (len(PROMPTS[0]) + 31) // 16 * 16
    alone = load_engine(settings(model=str(folder), prefix_cache=False))
    assert tokens == answer(alone, conversation, "two")


def test_a_disk_outlives_the_worker(folder: Path, tmp_path: Path, expected: list):
    for restart in range(2):
        engine = small_engine(folder)
        tiers = join(engine, disk(engine, tmp_path))
        num_cached, tokens = cached_tokens(engine, PROMPTS[0], "a")
        assert (num_cached, tokens) == (96 if restart else 0, expected[0])
        settled(tiers)
        tiers.close()


def test_bits_that_flip_on_a_disk_are_computed_again(folder: Path, tmp_path: Path, expected: list):
    """Each file in turn: what is before it is loaded, it and what is behind it is computed."""
    engine = small_engine(folder)
    tiers = join(engine, disk(engine, tmp_path))
    drawn = np.random.default_rng(1)
    answer(engine, PROMPTS[0], "first")
    settled(tiers)
    for index in range(len(list(tmp_path.glob(f"v{VERSION}/*/*/*.kv")))):
        answer(engine, PROMPTS[1], f"between {index}")
        settled(tiers)
        files = sorted(tmp_path.glob(f"v{VERSION}/*/*/*.kv"))
        file = files[index % len(files)]
        data = bytearray(file.read_bytes())
        data[drawn.integers(len(data))] ^= 1 << int(drawn.integers(8))
        file.write_bytes(data)
        assert answer(engine, PROMPTS[0], f"again {index}") == expected[0]
        settled(tiers)
    assert tiers.counters()["kv_disk_refused_blocks"] > 0
    tiers.close()


class FaultyTier(HostMemoryTier):
    """It flips a bit of what it gives, or gives what it has under another key, or nothing, or late."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(200 * nbytes, nbytes)
        self.drawn = np.random.default_rng(3)
        self.kept: list[bytes] = []
        self.num_faults = 0

    def store(self, key: BlockKey, record: memoryview, worth: BlockWorth) -> bool:
        self.kept.append(bytes(record))
        return super().store(key, record, worth)

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[int]:
        sizes = super().load(keys, into)
        for index, nbytes in enumerate(sizes):
            fault = self.drawn.integers(6)
            self.num_faults += fault < 3
            if fault == 0:
                into[index][self.drawn.integers(nbytes)] ^= 1 << int(self.drawn.integers(8))
            elif fault == 1:
                other = self.kept[self.drawn.integers(len(self.kept))]
                into[index][: len(other)] = other
            elif fault == 2:
                return sizes[:index]
        return sizes


def test_no_fault_of_a_tier_is_a_wrong_token(folder: Path, expected: list):
    engine = small_engine(folder)
    tier = FaultyTier(max_record_nbytes(engine.layout))
    tiers = join(engine, tier)
    for turn in range(12):
        for index, prompt in enumerate(PROMPTS):
            assert answer(engine, prompt, f"{turn} {index}") == expected[index]
            settled(tiers)
    assert tier.num_faults > 20
    assert engine.stats().free_tokens == engine.capacity_tokens
    tiers.close()


def engine_and_record(folder: Path, disk_folder: Path) -> tuple[Engine, Path]:
    """Return an engine, and a record that it left on the disk."""
    engine = small_engine(folder)
    tiers = join(engine, disk(engine, disk_folder))
    answer(engine, PROMPTS[0], "a")
    settled(tiers)
    tiers.close()
    return engine, next(disk_folder.glob(f"v{VERSION}/*/*/*.kv"))


def test_another_rounding_on_the_same_folder_is_not_used(folder: Path, tmp_path: Path):
    """Both keep KV in float32, of weights in float32 and in float16."""
    engine, record = engine_and_record(folder, tmp_path)
    key = BlockKey(bytes.fromhex(record.name.split(".")[0]))
    other = load_engine(settings(model=str(folder), dtype="float16"))
    assert other.layout.only_group == engine.layout.only_group
    foreign = disk(other, tmp_path)
    tiers = join(other, foreign)
    assert cached_tokens(other, PROMPTS[0], "b")[0] == 0
    assert foreign.stats()["foreign_blocks"] > 0 and foreign.stats()["hit_blocks"] == 0
    settled(tiers)
    tiers.close()
    with pytest.raises(LayoutMismatch, match="rounding"):
        verify(memoryview(record.read_bytes()), key, other.layout)


def test_another_dtype_on_the_same_folder_is_not_used(folder: Path, tmp_path: Path):
    engine, record = engine_and_record(folder, tmp_path)
    # What no key would lead to: a foreign block under the very name that this layout looks for.
    other = load_engine(settings(model=str(folder), block_size=32))
    assert other.layout.shared_id != engine.layout.shared_id
    mine = tmp_path / f"v{VERSION}" / other.layout.shared_id.hex() / record.parent.name
    mine.mkdir(parents=True)
    shutil.copy(record, mine)
    foreign = disk(other, tmp_path)
    tiers = join(other, foreign)
    assert answer(other, PROMPTS[0], "b") == answer(engine, PROMPTS[0], "c")
    assert foreign.stats()["foreign_blocks"] > 0
    tiers.close()


class HungTier(HostMemoryTier):
    """It finds everything and gives nothing until it is let go."""

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        return len(keys)

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[int]:
        self.was_asked.set()
        self.may_go.wait()
        return []

    def __init__(self, nbytes: int) -> None:
        super().__init__(200 * nbytes, nbytes)
        self.was_asked, self.may_go = threading.Event(), threading.Event()


def test_a_tier_that_hangs_costs_no_more_than_computing_and_can_be_cancelled(folder: Path, expected: list):
    engine = small_engine(folder)
    tier = HungTier(max_record_nbytes(engine.layout))
    tiers = join(engine, tier, tokens_per_s=1000.0)
    assert answer(engine, PROMPTS[0], "a") == expected[0]
    assert tiers.counters()["kv_loads_given_up"] == 1
    engine.submit(request("b", PROMPTS[1], greedy()))
    assert engine.step() == StepOutput() and engine.has_work()
    engine.release(request("b", PROMPTS[1], greedy()).request_id)
    assert not engine.has_work() and engine.stats().free_tokens == engine.capacity_tokens
    engine.check()
    tier.may_go.set()
    tiers.close()


def test_a_prompt_that_has_waited_its_tenth_for_a_peer_waits_for_no_tier(folder: Path, expected: list):
    engine = small_engine(folder)
    tier, clock = HungTier(max_record_nbytes(engine.layout)), Clock()
    tiers = join(engine, tier, clock=clock)
    engine.submit(replace(request("late", PROMPTS[0], greedy()), late_s=slack_s(PROMPTS[0])))
    assert tokens_of(drain(engine), "late") == expected[0]
    assert not tier.was_asked.is_set() and tiers.counters()["kv_missed_prompts"] == 1
    tier.may_go.set()
    tiers.close()


def test_others_run_while_one_loads(folder: Path, expected: list):
    engine = load_engine(settings(model=str(folder)))
    tier = HungTier(max_record_nbytes(engine.layout))
    tiers = join(engine, tier, tokens_per_s=0.5)
    engine.submit(request("waits", PROMPTS[0], greedy()))
    assert engine.step() == StepOutput()
    engine.submit(request("short", PROMPTS[1][:16], greedy(40)))
    outputs = [engine.step() for _ in range(41)]
    assert len(tokens_of(outputs, "short")) == 40
    tier.may_go.set()
    assert tokens_of(drain(engine), "waits") == expected[0]
    tiers.close()


def test_a_block_that_is_overwritten_is_not_stored(folder: Path):
    engine = small_engine(folder)
    tiers = join(engine, host(engine))
    engine.pool.generations[:] = [generation + 1 for generation in engine.pool.generations]
    before = list(engine.pool.generations)
    answer(engine, PROMPTS[0], "a")
    settled(tiers)
    stored = tiers.counters()["kv_host_stored_blocks"]
    assert stored > 0 and before != [0] * len(before)
    tiers.offer(NewBlock(0, engine.pool.generations[0] - 1, b"stale", None, 0))
    settled(tiers)
    assert tiers.counters()["kv_overwritten_blocks"] == 1
    assert tiers.counters()["kv_host_stored_blocks"] == stored
    tiers.close()
