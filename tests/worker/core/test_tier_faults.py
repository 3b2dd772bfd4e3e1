"""Tiers that hang, are full, read only or gone, evict, or hold what is not to be believed.

Tokens stay right, no prompt waits longer than its LoadBudget, and there is one line in the log and a metric.
"""

import os
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import cast

import pytest

from engine.messages import StepOutput
from kv_transfer.chunks.block_record import VERSION
from kv_transfer.tiers.remote_store import open_remote_store
from tests.engine.driving import drain, greedy, request, tokens_of
from tests.full_disk import small_disk
from tests.kv_transfer.tiers.redis_cluster import RedisNode, redis_node
from tests.waiting import until
from tests.worker.core.tier_rig import (
    PROMPTS,
    Clock,
    answer,
    cached_tokens,
    disk,
    fill,
    host,
    join,
    log_lines,
    settled,
    small_engine,
    waits_for_its_slack,
)

pytestmark = pytest.mark.slow


def test_a_store_that_hangs_delays_each_prompt_by_its_slack_and_soon_none(
    folder: Path, tmp_path: Path, expected: list, caplog: pytest.LogCaptureFixture
):
    with redis_node(tmp_path) as node:
        engine, clock = small_engine(folder), Clock()
        tiers = join(engine, open_remote_store(f"redis://127.0.0.1:{node.port}"), clock=clock)
        fill(engine, tiers)
        os.kill(node.process.pid, signal.SIGSTOP)
        try:
            assert waits_for_its_slack(engine, clock, PROMPTS[0], "a") == expected[0]
            assert tiers.counters()["kv_store_given_up_loads"] == tiers.counters()["kv_loads_given_up"] == 1
            until(lambda: not tiers.gauges()["kv_store_on"])
            engine.submit(request("b", PROMPTS[1], greedy()))
            first = engine.step()
            assert first != StepOutput(), "it waits for a store that is off"
            assert tokens_of([first, *drain(engine)], "b") == expected[1]
        finally:
            os.kill(node.process.pid, signal.SIGCONT)
        until(lambda: tiers.gauges()["kv_store_on"])  # it is asked again though no request does
        assert cached_tokens(engine, PROMPTS[2], "c") == (112, expected[2])
        assert log_lines(caplog, "comes slower than computing") == log_lines(caplog, "(kv_store) is off") == 1
        tiers.close()


def hang_reads(tmp_path: Path) -> Callable[[], None]:
    """Make a FIFO of each file: reading it blocks, as on a mount whose server is gone. Return what lets go."""
    files = list(tmp_path.glob(f"v{VERSION}/*/*/*.kv"))
    for file in files:
        file.unlink()
        os.mkfifo(file)

    def let_go() -> None:
        for file in files:
            if file.exists():  # what was read of it is nothing, which is refused and forgotten
                os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))

    return let_go


def test_a_disk_that_hangs_keeps_nobody_waiting_but_the_first_and_no_other_tier(
    folder: Path, tmp_path: Path, expected: list, caplog: pytest.LogCaptureFixture
):
    engine, clock = small_engine(folder), Clock()
    in_memory = host(engine)
    tiers = join(engine, in_memory, disk(engine, tmp_path), clock=clock)
    fill(engine, tiers)
    let_go = hang_reads(tmp_path)
    in_memory.evict(list(in_memory._slots))
    loader = tiers._loaders["disk"]
    assert waits_for_its_slack(engine, clock, PROMPTS[0], "a", lambda: len(loader._current) == 1) == expected[0]
    settled(tiers)
    assert waits_for_its_slack(engine, clock, PROMPTS[1], "b", lambda: len(loader._current) == 2) == expected[1]
    settled(tiers)
    engine.submit(request("c", PROMPTS[2], greedy()))
    first = engine.step()
    assert first != StepOutput(), "it waits for a tier all of whose threads hang"
    assert tokens_of([first, *drain(engine)], "c") == expected[2]
    settled(tiers)
    assert cached_tokens(engine, PROMPTS[0], "d") == (96, expected[0])  # from memory
    assert tiers.counters()["kv_disk_given_up_loads"] == 2
    assert log_lines(caplog, "comes slower than computing") == 1
    until(lambda: let_go() or not loader._current)
    tiers.close()


@contextmanager
def full(folder: Path) -> Iterator[None]:
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    yield


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    files = str(folder / f"v{VERSION}")
    subprocess.run(["mount", "--bind", files, files], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", files], check=True)
    yield
    subprocess.run(["umount", files], check=True)


@contextmanager
def vanished(folder: Path) -> Iterator[None]:
    folder.rename(folder.with_name("elsewhere"))
    yield


@pytest.mark.parametrize("kind", ["disk", "folder"])
@pytest.mark.parametrize(
    ("fault", "words", "metric"),
    [
        (full, "keeps nothing new", "refused_full"),
        (read_only, "keeps nothing new", "refused_"),
        (vanished, "is off", "refused_"),
    ],
)
def test_a_folder_gets_bad(
    folder: Path,
    tmp_path: Path,
    expected: list,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    fault: Callable[[Path], AbstractContextManager[None]],
    words: str,
    metric: str,
):
    """What was kept before is found as long as it can be read; nothing waits, for no answer comes late."""
    with small_disk(tmp_path / "kv") as room:
        engine, clock = small_engine(folder), Clock()
        below = room.folder / "kv"
        below.mkdir()
        tier = disk(engine, below) if kind == "disk" else open_remote_store(f"file://{below}")
        tiers = join(engine, tier, clock=clock)
        assert answer(engine, PROMPTS[0], "first") == expected[0]
        settled(tiers)
        with fault(below):
            for turn in range(2):
                for index, prompt in enumerate(PROMPTS):
                    num_cached, tokens = cached_tokens(engine, prompt, f"{turn} {index}")
                    assert tokens == expected[index]
                    if (turn, index) == (1, 0):
                        assert num_cached == (0 if fault is vanished else 96)
                    settled(tiers)
            counts = tiers.counters()
            assert sum(value for name, value in counts.items() if f"_{metric}" in name) > 0
            assert counts["kv_loads_given_up"] == 0
            assert log_lines(caplog, words) == 1
        tiers.close()


def of_another_version(record: bytes) -> bytes:
    return record[:4] + struct.pack("<H", VERSION + 1) + record[6:]


def with_a_flipped_bit(record: bytes) -> bytes:
    return record[:-5] + bytes([record[-5] ^ 8]) + record[-4:]


def of_another_key(record: bytes) -> bytes:
    return record.replace(record[record.index(b"key") + 5 :][:16], bytes(16))


@pytest.mark.parametrize("kind", ["disk", "folder", "redis"])
@pytest.mark.parametrize(
    ("damage", "field"), [(of_another_version, "version"), (with_a_flipped_bit, "checksum"), (of_another_key, "key")]
)
def test_what_is_not_to_be_believed_is_computed(
    folder: Path,
    tmp_path: Path,
    expected: list,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    damage: Callable[[bytes], bytes],
    field: str,
):
    with redis_node(tmp_path) if kind == "redis" else nullcontext() as node:
        engine = small_engine(folder)
        url = f"redis://127.0.0.1:{node.port}" if node else f"file://{tmp_path}"
        tier = disk(engine, tmp_path) if kind == "disk" else open_remote_store(url)
        tiers = join(engine, tier)
        fill(engine, tiers)
        damage_all(damage, node, tmp_path)
        for index, prompt in enumerate(PROMPTS[:3]):
            assert cached_tokens(engine, prompt, str(index)) == (0, expected[index])
            settled(tiers)
        assert tiers.counters()[f"kv_{tier.name}_refused_blocks"] == 3
        assert log_lines(caplog, f"is refused and forgotten: {field}") == 1
        assert log_lines(caplog, "is refused and forgotten") == 1
        assert cached_tokens(engine, PROMPTS[0], "again")[0] == 16, "the first block was not kept anew"
        tiers.close()


def damage_all(damage: Callable[[bytes], bytes], node: RedisNode | None, folder: Path) -> None:
    if node is None:
        for file in folder.rglob("*.kv"):
            file.write_bytes(damage(file.read_bytes()))
        return
    for name in list(node.client.scan_iter()):
        node.client.set(name, damage(cast(bytes, node.client.get(name))))


def test_a_store_that_evicts_gives_what_it_has_left(folder: Path, tmp_path: Path, expected: list):
    with redis_node(tmp_path, "--maxmemory-policy", "allkeys-random", "--maxmemory", "1300kb") as node:
        engine = small_engine(folder)
        tiers = join(engine, open_remote_store(f"redis://127.0.0.1:{node.port}"))
        for turn in range(4):
            for index, prompt in enumerate(PROMPTS):
                assert answer(engine, prompt, f"{turn} {index}") == expected[index]
                settled(tiers)
        assert node.client.info()["evicted_keys"] > 0 and tiers.counters()["kv_store_hit_blocks"] > 0
        assert engine.stats().free_tokens == engine.capacity_tokens
        tiers.close()
