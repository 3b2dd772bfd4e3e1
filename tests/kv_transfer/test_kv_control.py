"""When a control connection takes its peer for gone, and when not."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kv_transfer.connection.control_connection import HEARTBEAT, ControlConnection

SILENCE_S = 1.0


class Held:
    """A connection in a thread that can be stopped where it sleeps, as SIGSTOP does. `peer`: the other end's socket."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.peer = socket.create_connection(server.getsockname())
            ours, _ = server.accept()
        self.control = ControlConnection(ours, 0.1, SILENCE_S, 1 << 10)
        self._sleep, self.control._wait = self.control._wait, self._wait
        self._may_go_on, self._is_held = threading.Event(), threading.Event()
        self._may_go_on.set()
        self.ended: list[str] = []
        self.thread = threading.Thread(target=lambda: self.ended.append(self.control.run(lambda message: None)))
        self.thread.start()

    def pause(self, seconds: float) -> None:
        self._may_go_on.clear()
        assert self._is_held.wait(5)
        time.sleep(seconds)
        self._is_held.clear()
        self._may_go_on.set()

    def _wait(self, timeout_s: float) -> None:
        self._sleep(timeout_s)
        if not self._may_go_on.is_set():
            self._is_held.set()
            self._may_go_on.wait()


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.control.stop("the test is over")
    held.thread.join()
    held.peer.close()


def test_two_ends_that_were_paused_together_hear_each_other_again(held: Held) -> None:
    """The virtual machine of both was stopped, say: who goes on first finds nothing of the other in its socket."""
    held.pause(1.5 * SILENCE_S)
    time.sleep(0.2)
    assert not held.ended
    held.peer.sendall(HEARTBEAT)
    time.sleep(0.2)
    assert not held.ended


def test_a_peer_that_does_not_go_on_is_silent_all_the_same(held: Held) -> None:
    held.pause(1.5 * SILENCE_S)
    held.thread.join(10 * SILENCE_S)
    assert held.ended == ["silent for 1 s"]


def test_a_peer_that_has_closed_its_end_is_known_to_have_before_all_that_it_said_is_read() -> None:
    """Whatever is done about what it said before comes too late."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    control = ControlConnection(ours, 0.1, SILENCE_S, 1 << 10)
    peer.sendall(HEARTBEAT)
    assert not control.is_closed_there
    peer.close()
    assert control.is_closed_there
    control.stop("the test is over")
    control.run(lambda message: None)
