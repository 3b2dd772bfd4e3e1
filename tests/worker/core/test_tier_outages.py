"""A disk that breaks, goes, hangs and comes back, and a store that the network does not reach: tokens stay right.

Nobody waits longer than computing takes and its slack; there is one line in the log and a metric; then it is used
again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from bench.system import faulty_disk, network
from bench.system.faulty_disk import BROKEN, FULL, READ_ONLY, DiskState, FaultyDisk
from bench.system.network import Network
from coordinator.store.local_server import RedisServer
from engine.messages import StepOutput
from kv_transfer.tiers.disk import RETRY_S, DiskTier
from kv_transfer.tiers.remote_store import open_remote_store
from tests.engine.driving import drain, greedy, request, tokens_of
from tests.waiting import until
from tests.worker.core.tier_rig import (
    PROMPTS,
    Clock,
    answer,
    cached_tokens,
    fill,
    join,
    log_lines,
    settled,
    small_engine,
    waits_for_its_slack,
)

pytestmark = pytest.mark.slow
needs_fuse = pytest.mark.skipif(bool(faulty_disk.missing()), reason=faulty_disk.missing() or "-")
needs_network = pytest.mark.skipif(bool(network.missing()), reason=network.missing() or "-")


@pytest.fixture
def below(tmp_path: Path) -> Iterator[FaultyDisk]:
    with FaultyDisk(tmp_path / "files", tmp_path / "mount") as below:
        yield below


@contextmanager
def gone(below: FaultyDisk) -> Iterator[None]:
    below.pull_out()
    yield
    below.plug_in()


Fault = Callable[[FaultyDisk], AbstractContextManager[None]]
FAULTS: dict[str, tuple[Fault, bool]] = {
    "broken": (lambda below: below.during(DiskState(error=BROKEN)), False),
    "gone": (gone, False),
    "read only": (lambda below: below.during(DiskState(write_error=READ_ONLY)), True),
    "full": (lambda below: below.during(DiskState(write_error=FULL)), True),
}
"""What happens to the disk, and whether it can be read meanwhile."""


@needs_fuse
@pytest.mark.parametrize("name", FAULTS)
def test_a_disk_fails_and_comes_back(
    folder: Path, below: FaultyDisk, expected: list, caplog: pytest.LogCaptureFixture, name: str
):
    fault, can_read = FAULTS[name]
    engine, disk_clock = small_engine(folder), Clock()
    tier = DiskTier(below.mount / "kv", engine.layout.shared_id.hex(), 1 << 30, disk_clock)
    assert tier.wait_until_indexed(30)
    tiers = join(engine, tier, clock=Clock())
    assert answer(engine, PROMPTS[0], "first") == expected[0]
    settled(tiers)
    with fault(below):
        for index, prompt in enumerate(PROMPTS):
            assert cached_tokens(engine, prompt, f"during {index}")[1] == expected[index]
            settled(tiers)
        num_cached, tokens = cached_tokens(engine, PROMPTS[0], "again")
        assert (num_cached, tokens) == (96 if can_read else 0, expected[0])
        settled(tiers)
        assert tier.stats()["on"] == can_read and not tier.stats()["writable"]
    disk_clock.now += RETRY_S + 1
    until(lambda: is_used_again(engine, tiers, disk_clock, expected))
    counts = tiers.counters()
    assert counts["kv_loads_given_up"] == 0
    assert sum(count for key, count in counts.items() if key.startswith("kv_disk_refused_un") or "_full" in key) > 0
    assert log_lines(caplog, "keeps nothing new" if can_read else "can't be read") == 1
    tiers.close()


def is_used_again(engine, tiers, disk_clock: Clock, expected: list) -> bool:
    """Return whether a prompt that was not kept during the fault is kept now, and read."""
    disk_clock.now += RETRY_S + 1
    for index in (1, 2, 1):
        num_cached, tokens = cached_tokens(engine, PROMPTS[index], f"after {disk_clock.now} {index}")
        assert tokens == expected[index]
        settled(tiers)
    return num_cached == 112


@needs_fuse
def test_a_disk_that_hangs_delays_by_the_slack_and_a_worker_ends_all_the_same(
    folder: Path, below: FaultyDisk, expected: list, caplog: pytest.LogCaptureFixture, monkeypatch
):
    engine, clock = small_engine(folder), Clock()
    tier = DiskTier(below.mount / "kv", engine.layout.shared_id.hex(), 1 << 30)
    assert tier.wait_until_indexed(30)
    tiers = join(engine, tier, clock=clock)
    fill(engine, tiers)
    loader = tiers._loaders["disk"]
    with below.during(DiskState(hangs=True)):
        assert waits_for_its_slack(engine, clock, PROMPTS[0], "a", lambda: len(loader._current) == 1) == expected[0]
        assert waits_for_its_slack(engine, clock, PROMPTS[1], "b", lambda: len(loader._current) == 2) == expected[1]
        engine.submit(request("c", PROMPTS[2], greedy()))
        first = engine.step()
        assert first != StepOutput(), "it waits for a tier all of whose threads hang"
        assert tokens_of([first, *drain(engine)], "c") == expected[2]
        restarted = DiskTier(below.mount / "kv", engine.layout.shared_id.hex(), 1 << 30)
        monkeypatch.setattr("kv_transfer.tiers.disk.CLOSE_TIMEOUT_S", 0.2)
        restarted.close()
        assert log_lines(caplog, "does not answer; its index is given up") == 1
    until(lambda: not loader._current)
    settled(tiers)
    assert cached_tokens(engine, PROMPTS[0], "d") == (96, expected[0])
    assert tiers.counters()["kv_disk_given_up_loads"] == 2
    assert log_lines(caplog, "comes slower than computing") == 1
    tiers.close()


@needs_fuse
def test_a_shared_folder_breaks_and_comes_back(
    folder: Path, below: FaultyDisk, expected: list, caplog: pytest.LogCaptureFixture
):
    """No look at it is answered meanwhile, as where the server of a mount is gone."""
    engine = small_engine(folder)
    (below.mount / "kv").mkdir()
    tiers = join(engine, open_remote_store(f"file://{below.mount}/kv"), clock=Clock())
    fill(engine, tiers)
    with below.during(DiskState(error=BROKEN)):
        for index, prompt in enumerate(PROMPTS):
            assert answer(engine, prompt, f"during {index}") == expected[index]
            settled(tiers)
        assert not tiers.gauges()["kv_store_on"]
        assert tiers.counters()["kv_store_refused_unavailable"] >= 3
    until(lambda: tiers.gauges()["kv_store_on"])
    assert cached_tokens(engine, PROMPTS[0], "after") == (96, expected[0])
    assert log_lines(caplog, "(kv_store) is off") == 1
    tiers.close()


STORE_FAULTS: dict[str, Callable[[Network], AbstractContextManager[None]]] = {
    "cut off": lambda hosts: hosts.cut_off("store"),
    "answers lost": lambda hosts: hosts.dropped("store", ""),
    "link down": lambda hosts: hosts.down("store"),
}


@needs_network
@pytest.mark.parametrize("name", STORE_FAULTS)
def test_the_network_does_not_reach_a_store(folder: Path, expected: list, caplog: pytest.LogCaptureFixture, name: str):
    with (
        Network(["store"]) as hosts,
        RedisServer(host=hosts.address("store"), launcher=hosts.command("store")) as store,
    ):
        engine, clock = small_engine(folder), Clock()
        tiers = join(engine, open_remote_store(store.url), clock=clock)
        fill(engine, tiers)
        with STORE_FAULTS[name](hosts):
            assert waits_for_its_slack(engine, clock, PROMPTS[0], "a") == expected[0]
            until(lambda: not tiers.gauges()["kv_store_on"])
            engine.submit(request("b", PROMPTS[1], greedy()))
            first = engine.step()
            assert first != StepOutput(), "it waits for a store that is off"
            assert tokens_of([first, *drain(engine)], "b") == expected[1]
            assert tiers.counters()["kv_store_refused_unavailable"] >= 3
        until(lambda: tiers.gauges()["kv_store_on"])  # it is asked again though no request does
        settled(tiers)
        assert cached_tokens(engine, PROMPTS[2], "c") == (112, expected[2])
        assert log_lines(caplog, "(kv_store) is off") == 1
        tiers.close()


@needs_network
def test_a_store_behind_a_slow_network_delays_by_the_slack(
    folder: Path, expected: list, caplog: pytest.LogCaptureFixture
):
    with (
        Network(["store"]) as hosts,
        RedisServer(host=hosts.address("store"), launcher=hosts.command("store")) as store,
    ):
        engine, clock = small_engine(folder), Clock()
        tiers = join(engine, open_remote_store(store.url), clock=clock)
        fill(engine, tiers)
        with hosts.slow("store", 0.008):  # a packet of 1500 bytes takes 1.5 s
            assert waits_for_its_slack(engine, clock, PROMPTS[0], "a") == expected[0]
            assert tiers.counters()["kv_store_given_up_loads"] == 1
            assert log_lines(caplog, "comes slower than computing") == 1
        settled(tiers)
        until(lambda: not tiers._loaders["store"]._current)
        assert answer(engine, PROMPTS[1], "b") == expected[1]
        tiers.close()
