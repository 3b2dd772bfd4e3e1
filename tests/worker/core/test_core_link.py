"""The core's end of the socket pair: frames, the bell, and a front that is gone."""

import socket
import threading

import pytest

from contracts.codec import FrameReader, decoder, frame
from contracts.ids import GatewayId
from worker.core.front_link import FrontDisconnected, FrontLink
from worker.messages import GatewayGone, Loading, Stop, ToFront


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    link = FrontLink(theirs)
    yield ours, link
    link.close()
    ours.close()


def test_messages_arrive_whole_however_they_are_cut(ends):
    front, link = ends
    data = frame(GatewayGone(GatewayId("g"))) + frame(Stop())
    front.sendall(data[:7])
    assert link.receive(0.5) == []
    front.sendall(data[7:])
    assert link.receive(0.5) == [GatewayGone(GatewayId("g")), Stop()]


def test_nothing_to_read_is_nothing_after_the_wait(ends):
    assert ends[1].receive(0.01) == []


def test_the_bell_ends_a_wait_from_another_thread(ends):
    _, link = ends
    timer = threading.Timer(0.05, link.wake)
    timer.start()
    assert link.receive(3600.0) == []  # far longer than a test may take
    timer.join()
    assert link.receive(0.0) == []


def test_what_the_core_sends_reaches_the_front(ends):
    front, link = ends
    link.send(Loading("load", 1, 2))
    (payload,) = FrameReader().feed(front.recv(1000))
    assert decoder(ToFront).decode(payload) == Loading("load", 1, 2)


def test_a_front_that_closes_ends_the_core(ends):
    front, link = ends
    front.close()
    with pytest.raises(FrontDisconnected):
        link.receive(0.5)
    with pytest.raises(FrontDisconnected):
        link.send(Loading("load", 1, 2))
