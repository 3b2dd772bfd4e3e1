"""A peer process is killed or stopped in mid-transfer: the survivor learns of it, and no page changes afterwards."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from contracts.handoff import Abort, Commit, Grant
from contracts.ids import Epoch, Incarnation, RequestId, WorkerId
from contracts.request import WorkerRef
from kv_transfer.events import ChunkLanded, Drained, MessageReceived, PeerDisconnected, TransferEvent
from tests.kv_transfer.conftest import TRANSPORTS
from tests.kv_transfer.kv_worker import NUM_GUARDED, Worker, answer_as_decode, make_pool, offer, send_all

pytestmark = pytest.mark.slow

Spawn = Callable[..., subprocess.Popen]


@pytest.fixture(params=[name for name in TRANSPORTS if name != "loopback"])
def transport(request: pytest.FixtureRequest) -> str:
    """Loopback reaches no other process."""
    return request.param


@pytest.fixture
def spawn(leftovers: None) -> Iterator[Spawn]:
    processes: list[subprocess.Popen] = []

    def start(*args: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "tests.kv_transfer.kv_worker", *args]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


@pytest.fixture
def survivor(request: pytest.FixtureRequest, leftovers: None, transport: str) -> Iterator[Worker]:
    worker = Worker(request.param, transport)
    yield worker
    worker.close()


def _line(process: subprocess.Popen) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def _until_lost(
    worker: Worker, struck: threading.Event, on_event: Callable[[TransferEvent], object]
) -> PeerDisconnected:
    """The loss has 10 s from the strike on; before it, a busy host may take long to start a process and load UCX."""
    deadline = time.monotonic() + 50
    while time.monotonic() < deadline:
        if struck.is_set():
            struck.clear()
            deadline = time.monotonic() + 10
        worker.woken.wait(0.1)
        worker.woken.clear()
        for event in worker.node.poll():
            if isinstance(event, PeerDisconnected):
                return event
            on_event(event)
    raise AssertionError("the loss of the peer was not noticed")


def _strike(process: subprocess.Popen, signum: int) -> threading.Event:
    """Once chunks flow, and from beside, so that it comes in the middle of one. The event says that it is done."""
    struck = threading.Event()

    def run() -> None:
        assert _line(process) == "moving"
        time.sleep(0.02)
        process.send_signal(signum)
        struck.set()

    threading.Thread(target=run).start()
    return struck


def _until(worker: Worker, kind: type) -> None:
    """Answers as decode does."""
    deadline = time.monotonic() + 50
    while time.monotonic() < deadline:
        worker.woken.wait(0.1)
        worker.woken.clear()
        for event in worker.node.poll():
            answer_as_decode(worker, event)
            if isinstance(event, kind):
                return
    raise AssertionError(f"no {kind.__name__}")


def _send_without_end(worker: Worker, peer: WorkerRef) -> Callable[[TransferEvent], None]:
    numbers = iter(range(1, 1_000_000))

    def on_event(event: TransferEvent) -> None:
        match event:
            case MessageReceived(message=Grant() as grant):
                send_all(worker, peer.worker_id, grant)
            case MessageReceived(message=Commit()):
                offer(worker, peer, next(numbers))

    return on_event


SIGNALS = [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped")]


@pytest.mark.parametrize("survivor", ["decode"], indirect=True)
@pytest.mark.parametrize("signum", SIGNALS)
def test_prefill_goes_while_its_pages_land(survivor: Worker, spawn: Spawn, transport: str, signum: int) -> None:
    prefill = spawn("prefill", transport, survivor.node.address, survivor.incarnation)
    _line(prefill)
    struck = _strike(prefill, signum)
    lost = _until_lost(survivor, struck, lambda event: answer_as_decode(survivor, event))
    assert (lost.peer_id, lost.fenced) == ("prefill", True)
    after = survivor.pool.copy()
    prefill.send_signal(signal.SIGCONT)  # the stopped one may try to go on
    time.sleep(0.2)
    assert (survivor.pool == after).all()
    assert (survivor.pool[:, :NUM_GUARDED] == make_pool()[:, :NUM_GUARDED]).all()


@pytest.mark.parametrize("transport", ["nvlink"], indirect=True)
@pytest.mark.parametrize("survivor", ["decode"], indirect=True)
@pytest.mark.parametrize("signum", SIGNALS)
def test_prefill_goes_while_decodes_device_waits_for_it(survivor: Worker, spawn: Spawn, signum: int) -> None:
    """And another's chunks land afterwards."""
    prefill = spawn("promising", "nvlink", survivor.node.address, survivor.incarnation)
    _line(prefill)
    struck = _strike(prefill, signum)
    lost = _until_lost(survivor, struck, lambda event: answer_as_decode(survivor, event))
    assert (lost.peer_id, lost.fenced) == ("promising", True)
    after = survivor.pool.copy()
    prefill.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    assert (survivor.pool == after).all()
    assert (survivor.pool[:, :NUM_GUARDED] == make_pool()[:, :NUM_GUARDED]).all()
    another = spawn("prefill", "nvlink", survivor.node.address, survivor.incarnation)
    _line(another)
    _until(survivor, ChunkLanded)
    assert np.array_equal(survivor.pool, make_pool())


@pytest.mark.parametrize("transport", ["nvlink"], indirect=True)
@pytest.mark.parametrize("survivor", ["decode"], indirect=True)
def test_a_promise_that_is_never_kept_is_drained(survivor: Worker, spawn: Spawn) -> None:
    """The prefill worker that made it lives on."""
    prefill = spawn("promising", "nvlink", survivor.node.address, survivor.incarnation)
    _line(prefill)
    moving = threading.Thread(target=_line, args=(prefill,))
    moving.start()
    _until(survivor, MessageReceived)
    moving.join()
    time.sleep(0.1)
    survivor.node.abort(WorkerId("promising"), Abort(RequestId("r0"), Epoch(1), "cancelled", "a test says so"))
    _until(survivor, Drained)
    assert (survivor.pool[:, :NUM_GUARDED] == make_pool()[:, :NUM_GUARDED]).all()


@pytest.mark.parametrize("survivor", ["prefill"], indirect=True)
@pytest.mark.parametrize("signum", SIGNALS)
def test_decode_goes_while_pages_are_sent(survivor: Worker, spawn: Spawn, transport: str, signum: int) -> None:
    decode = spawn("decode", transport)
    address, incarnation = _line(decode).split()
    peer = WorkerRef(WorkerId("decode"), Incarnation(incarnation), "", address)
    offer(survivor, peer, 0)
    struck = _strike(decode, signum)
    lost = _until_lost(survivor, struck, _send_without_end(survivor, peer))
    assert (lost.peer_id, lost.fenced) == ("decode", True)
    assert not survivor.node.stats()
    assert np.array_equal(survivor.pool, make_pool())
