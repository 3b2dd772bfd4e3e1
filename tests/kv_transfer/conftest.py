"""Fixtures of the transfer tests: pairs of nodes over each transport, and the count of what they leave behind."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kv_transfer.kv_pair import Peer
from tests.waiting import PATIENCE_S

# UCX runs the same tests in a process of its own (test_kv_ucx.py), so that a crash in C does not end the test run.
TRANSPORTS = os.environ.get("KV_TEST_TRANSPORTS", "loopback tcp shm nvlink").split()
STAGED = [name for name in TRANSPORTS if name != "nvlink"]
# When a peer is killed or stopped in mid-message, ucxx 0.52 sometimes keeps the closed worker's descriptors.
SPARE = {"descriptors": 32} if "ucx" in TRANSPORTS else {}
if "KV_TEST_DEVICE" in os.environ:  # CUDA's own
    SPARE = {"descriptors": 1 << 10}


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_peer(leftovers: None) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def make(name: str, **options: object) -> Peer:
        peers.append(Peer(name, **options))  # type: ignore[arg-type]
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def leftovers() -> Iterator[None]:
    with nothing_left():
        yield


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if there are more descriptors, transfer threads or shared files afterwards than before."""
    before = _held()
    yield
    deadline = time.monotonic() + PATIENCE_S
    while (left := _more(before, _held())) and time.monotonic() < deadline:
        gc.collect()  # an exception that a test kept holds the frames, and so the memory, that it came through
        time.sleep(0.02)
    assert not left, f"left behind: {left}"


def _held() -> dict[str, int]:
    return {
        "threads": sum(thread.name.startswith("kv-") for thread in threading.enumerate()),
        "shm files": len(_abandoned()),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def _abandoned() -> set[str]:
    """Files that nobody listens at. Where one does it may be another test's, which runs beside this one; our own
    would be a descriptor too many.
    """
    found = {str(path) for path in Path("/dev/shm").glob("tandem-kv-*")}
    return found - {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}


def _more(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - count for name, count in before.items() if after[name] > count + SPARE.get(name, 0)}
