"""Two and more nodes in one process, over each transport: pages arrive where they were granted, and nowhere else."""

import errno
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from contracts import errors
from contracts.errors import ConfigError
from contracts.handoff import Abort, AbortAck, Commit, Fin, Grant, Offer, Refuse, Wait
from contracts.ids import BlockId, Epoch, Incarnation, RequestId, WorkerId
from contracts.kv_loss import UNCHECKED
from contracts.request import WorkerRef
from kv_transfer.connection import handshake
from kv_transfer.connection.control_connection import ControlConnection
from kv_transfer.data_path.staging import HostStaging
from kv_transfer.events import ChunkBad, ChunkLanded, Drained, MessageReceived, PeerDisconnected, TransferEvent
from kv_transfer.links.incoming_link import IncomingLink
from kv_transfer.links.link import Link
from kv_transfer.links.outgoing_link import OutgoingLink
from kv_transfer.node import TransferNode
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.base import Slot
from testing.loopback_transport import LoopbackTransport
from tests.kv_transfer.kv_pair import DEADLINE_S, Peer, fin, offer_and_grant, pages_equal, send
from tests.kv_transfer.kv_worker import LAYOUT, SECRET, make_pool
from tests.waiting import until

pytestmark = pytest.mark.slow

Make = Callable[..., Peer]


@pytest.fixture
def pair(make_peer: Make, transport: str) -> tuple[Peer, Peer]:
    return make_peer("prefill", transport=transport), make_peer("decode-1", transport=transport)


def _abort(request_id: str) -> Abort:
    return Abort(RequestId(request_id), Epoch(1), "cancelled", "a test says so")


def test_a_request_from_offer_to_commit(pair: tuple[Peer, Peer], transport: str) -> None:
    prefill, decode = pair
    offer_and_grant(prefill, decode, "r", 30, [5, 9, 1, 2, 60, 61, 7, 8])
    send(prefill, decode, "r", 0, 0, 16, [3, 4, 5, 9])
    send(prefill, decode, "r", 1, 16, 14, [10, 11, 0, 63])
    prefill.node.finish(decode.name, fin("r", 2))
    landed = [decode.wait(ChunkLanded).header for _ in range(2)]
    assert [header.index for header in landed] == [0, 1]
    assert decode.message(Fin, "r") == fin("r", 2)
    decode.node.commit(prefill.name, Commit(RequestId("r"), Epoch(1), 2, sum(header.nbytes for header in landed)))
    assert prefill.message(Commit, "r").num_chunks == 2
    until(lambda: not prefill.node.knows(decode.name, RequestId("r"), Epoch(1)))  # what is over is not kept for ever
    assert pages_equal(prefill, [3, 4, 5, 9, 10, 11, 0, 63], decode, [5, 9, 1, 2, 60, 61, 7, 8])
    (sent,), (received,) = prefill.node.stats(), decode.node.stats()
    assert (sent.transport, sent.state, sent.outgoing, received.outgoing) == (prefill.transport, "up", True, False)
    assert sent.nbytes == received.nbytes == 8 * prefill.layout.block_nbytes
    assert sent.detail and received.detail


def test_pages_that_were_not_granted_keep_their_bytes(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    before = decode.pool.copy()
    offer_and_grant(prefill, decode, "r", 12, [8, 3, 20])
    send(prefill, decode, "r", 0, 0, 12, [1, 2, 3])
    decode.wait(ChunkLanded)
    others = [page for page in range(64) if page not in (8, 3, 20)]
    assert (decode.pool[:, others] == before[:, others]).all()


def test_a_prefix_that_decode_holds_is_not_sent(pair: tuple[Peer, Peer], transport: str) -> None:
    prefill, decode = pair
    offer_and_grant(prefill, decode, "r", 14, [40, 41], skip=8)
    send(prefill, decode, "r", 0, 8, 6, [7, 30])
    assert decode.wait(ChunkLanded).header.first_token == 8
    assert pages_equal(prefill, [7, 30], decode, [40, 41])


@pytest.mark.parametrize("seed", range(3))
def test_many_requests_share_a_link_in_any_order(pair: tuple[Peer, Peer], seed: int) -> None:
    prefill, decode = pair
    dice = random.Random(seed)
    free, chunks, wanted = dice.sample(range(64), 64), [], {}
    for number in range(6):
        request_id, num_blocks = f"r{number}", dice.randint(1, 9)
        src, dst = dice.sample(range(64), num_blocks), [free.pop() for _ in range(num_blocks)]
        num_tokens = num_blocks * 4 - dice.randint(0, 3)
        offer_and_grant(prefill, decode, request_id, num_tokens, dst)
        wanted[request_id] = (src, dst)
        chunks += _cut(dice, request_id, num_tokens, src)
    dice.shuffle(chunks)
    for chunk in chunks:
        send(prefill, decode, *chunk)
    for _ in chunks:
        decode.wait(ChunkLanded)
    assert all(pages_equal(prefill, src, decode, dst) for src, dst in wanted.values())


def _cut(dice: random.Random, request_id: str, num_tokens: int, src: list[int]) -> list[tuple]:
    """Chunks of one to three blocks; the last one may end inside its block."""
    chunks, first, index = [], 0, 0
    while first < len(src):
        last = min(first + dice.randint(1, 3), len(src))
        chunks.append((request_id, index, first * 4, min(last * 4, num_tokens) - first * 4, src[first:last]))
        first, index = last, index + 1
    return chunks


def test_both_ways_between_two_nodes(pair: tuple[Peer, Peer]) -> None:
    one, two = pair
    offer_and_grant(one, two, "a", 8, [10, 11])
    offer_and_grant(two, one, "b", 8, [20, 21])
    send(one, two, "a", 0, 0, 8, [1, 2])
    send(two, one, "b", 0, 0, 8, [3, 4])
    two.wait(ChunkLanded)
    one.wait(ChunkLanded)
    assert pages_equal(one, [1, 2], two, [10, 11]) and pages_equal(two, [3, 4], one, [20, 21])
    two.node.close()
    assert one.wait(PeerDisconnected).fenced
    assert not any(isinstance(event, PeerDisconnected) for event in one.node.poll())


def _before(decode: Peer, address: str = "") -> WorkerRef:
    return WorkerRef(decode.name, Incarnation("before"), "", address or decode.node.address)


def test_who_looks_for_a_former_incarnation_is_no_loss_to_this_one(pair: tuple[Peer, Peer]) -> None:
    """It would take the link to this one with it, if that is made just then."""
    prefill, decode = pair
    for number in range(5):
        offer = Offer(RequestId(f"r{number}"), Epoch(1), 8, prefill.layout.layout_id)
        prefill.node.offer(_before(decode), offer)
        assert "now served by" in prefill.wait(PeerDisconnected).error
    offer_and_grant(prefill, decode, "s", 8, [1, 2])
    send(prefill, decode, "s", 0, 0, 8, [3, 4])
    decode.wait(ChunkLanded)
    assert not any(isinstance(event, PeerDisconnected) for event in decode.seen)


def test_an_offer_to_a_former_incarnation_is_lost_alone(pair: tuple[Peer, Peer]) -> None:
    """It may be of a job that outlived its cancel.

    The link to the incarnation that lives goes on beside it.
    """
    prefill, decode = pair
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    prefill.node.offer(_before(decode), Offer(RequestId("late"), Epoch(1), 8, prefill.layout.layout_id))
    lost = prefill.wait(PeerDisconnected)
    assert lost.incarnation == "before" and "now served by" in lost.error and lost.fenced
    assert not prefill.node.knows(decode.name, RequestId("late"), Epoch(1))
    send(prefill, decode, "r", 0, 0, 8, [3, 4])
    decode.wait(ChunkLanded)
    assert pages_equal(prefill, [3, 4], decode, [1, 2])
    assert not any(isinstance(event, PeerDisconnected) for event in [*prefill.seen, *prefill.poll(), *decode.seen])


def test_offers_to_a_former_incarnation_whose_address_is_silent_wait_together(make_peer: Make) -> None:
    """All share one connection, and end with the node."""
    prefill, decode = make_peer("prefill", handshake_timeout_s=600.0), make_peer("decode")
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        before = _before(decode, f"127.0.0.1:{silent.getsockname()[1]}")
        for number in range(3):
            key = RequestId(f"late-{number}"), Epoch(1)
            prefill.node.offer(before, Offer(*key, 8, prefill.layout.layout_id))
            assert prefill.node.knows(decode.name, *key)
        assert len(prefill.node._table.all()) == 2
        prefill.node.abort(decode.name, _abort("late-0"))
        assert prefill.wait(Drained).request_id == "late-0"
        send(prefill, decode, "r", 0, 0, 8, [3, 4])
        decode.wait(ChunkLanded)
        prefill.node.close()
    assert pages_equal(prefill, [3, 4], decode, [1, 2])


def test_a_link_to_a_former_incarnation_goes_when_the_next_has_proved_itself(make_peer: Make, monkeypatch) -> None:
    prefill, old, new = make_peer("prefill"), make_peer("decode"), make_peer("decode")
    may_greet, greet = threading.Event(), handshake.greet_listener

    def late(*of: Any) -> Any:
        assert may_greet.wait(30)
        return greet(*of)

    offer_and_grant(prefill, old, "r", 8, [1, 2])
    monkeypatch.setattr(handshake, "greet_listener", late)
    prefill.node.offer(new.ref, Offer(RequestId("s"), Epoch(1), 8, prefill.layout.layout_id))
    send(prefill, old, "r", 0, 0, 8, [3, 4])
    old.wait(ChunkLanded)
    may_greet.set()
    lost = prefill.wait(PeerDisconnected)
    assert (lost.incarnation, lost.error) == (old.incarnation, "replaced by a new connection")
    new.message(Offer, "s")
    new.node.grant(prefill.name, Grant(RequestId("s"), Epoch(1), [[BlockId(1), BlockId(2)]], 0))
    prefill.message(Grant, "s")
    send(prefill, new, "s", 0, 0, 8, [5, 6])
    new.wait(ChunkLanded)
    assert pages_equal(prefill, [5, 6], new, [1, 2])
    assert [link.incarnation for link in prefill.node.stats()] == [new.incarnation]


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_peer_that_stops_in_order_is_no_warning(pair: tuple[Peer, Peer], caplog, is_idle: bool) -> None:
    """It finishes its handoffs before it stops; one that leaves in the middle is a loss."""
    prefill, decode = pair
    offer_and_grant(prefill, decode, "r", 8, [5, 6])
    if is_idle:
        send(prefill, decode, "r", 0, 0, 8, [3, 4])
        prefill.node.finish(decode.name, fin("r", 1))
        decode.wait(ChunkLanded)
        decode.message(Fin, "r")
        decode.node.commit(prefill.name, Commit(RequestId("r"), Epoch(1), 1, 0))
        prefill.message(Commit, "r")
    caplog.set_level(logging.INFO, "kv_transfer.links.link")
    decode.node.close()
    prefill.wait(PeerDisconnected)
    (line,) = [record for record in caplog.records if "to decode-1 is lost" in record.message]
    assert line.levelname == ("INFO" if is_idle else "WARNING")


def test_a_message_that_trips_us_up_ends_its_link_fenced(pair: tuple[Peer, Peer], monkeypatch, caplog) -> None:
    """A fault of ours; without the fence its pages would stay out of use, and its threads."""
    prefill, decode = pair
    offer_and_grant(prefill, decode, "r", 8, [1, 2])

    def trip(*_: object) -> None:
        raise LookupError("a fault of ours")

    monkeypatch.setattr(Link, "on_message", trip)
    prefill.node.finish(decode.name, fin("r", 0))
    lost = decode.wait(PeerDisconnected)
    assert (lost.fenced, lost.error) == (True, "LookupError: a fault of ours")
    assert prefill.wait(PeerDisconnected).fenced
    caplog.clear()  # its record of the exception holds the frames, and the memory in them


def test_a_loss_is_fenced_only_if_both_ways_are(pair: tuple[Peer, Peer]) -> None:
    """Whichever of them ends last."""
    one, two = pair
    offer_and_grant(one, two, "a", 8, [10, 11])
    offer_and_grant(two, one, "b", 8, [20, 21])
    heard, on_lost = [], one.node._on_lost

    def first_unfenced(link: Link, event: PeerDisconnected) -> None:
        heard.append(event)
        on_lost(link, replace(event, fenced=len(heard) > 1))

    for link in one.node._table.placed.values():
        link.parts = replace(link.parts, on_lost=first_unfenced)
    two.node.close()
    assert not one.wait(PeerDisconnected).fenced
    assert len(heard) == 2


def test_a_new_link_is_made_behind_the_news_of_the_loss_of_the_former(make_peer: Make, monkeypatch) -> None:
    """Otherwise that news would end what the new link carries.

    Its pages would be free for others while it writes them.
    """
    prefill, decode = make_peer("prefill"), make_peer("decode")
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    note, num_links = prefill.node._note, []
    offer = Offer(RequestId("s"), Epoch(1), 8, prefill.layout.layout_id)
    offering = threading.Thread(target=prefill.node.offer, args=(decode.ref, offer))

    def late(event: TransferEvent) -> None:
        if isinstance(event, PeerDisconnected):
            offering.start()
            offering.join(0.2)
            num_links.append(len(prefill.node._table.placed))
        note(event)

    monkeypatch.setattr(prefill.node, "_note", late)
    prefill.node._table.placed[decode.name, True].fail("a test says so")
    prefill.wait(PeerDisconnected)
    assert num_links == [0]
    offering.join()
    decode.message(Offer, "s")
    assert prefill.node.knows(decode.name, RequestId("s"), Epoch(1))
    assert not prefill.node.knows(decode.name, RequestId("r"), Epoch(1))


@contextmanager
def _held_fence(link: Link, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This link is not fenced in here."""
    may_end, fence = threading.Event(), link._fence

    def late(*of: Any) -> None:
        assert may_end.wait(30)
        fence(*of)

    monkeypatch.setattr(link, "_fence", late)
    try:
        yield
    finally:
        may_end.set()


def test_a_new_link_waits_for_all_that_fails_with_the_former(make_peer: Make, monkeypatch) -> None:
    """The end that heard of the loss first connects again while the other end's second direction still ends.

    The loss of that would be the new link's, too.
    """
    one, two = make_peer("one"), make_peer("two")
    offer_and_grant(one, two, "a", 8, [10, 11])
    offer_and_grant(two, one, "b", 8, [20, 21])
    key = RequestId("c"), Epoch(1)
    with _held_fence(one.node._table.placed[two.name, True], monkeypatch):
        two.node._table.placed[one.name, True].fail("a test says so")
        two.wait(PeerDisconnected)
        two.node.offer(one.ref, Offer(*key, 8, two.layout.layout_id))
        with pytest.raises(AssertionError):
            one.wait(MessageReceived, lambda heard: heard.message.request_id == "c", timeout_s=0.2)
    one.wait(PeerDisconnected)
    one.message(Offer, "c")
    assert one.node.knows(two.name, *key)
    one.node.grant(two.name, Grant(*key, [[BlockId(1), BlockId(2)]], 0))
    two.message(Grant, "c")


def test_a_link_that_fails_while_it_dials_waits_for_no_greeting(make_peer: Make, monkeypatch) -> None:
    """Others wait for its end."""
    prefill = make_peer("prefill", handshake_timeout_s=600.0)
    may_dial, dial = threading.Event(), OutgoingLink._dial

    def late(link: OutgoingLink) -> socket.socket:
        assert may_dial.wait(30)
        return dial(link)

    monkeypatch.setattr(OutgoingLink, "_dial", late)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ref = WorkerRef(WorkerId("decode"), Incarnation("1"), "", f"127.0.0.1:{silent.getsockname()[1]}")
        prefill.node.offer(ref, Offer(RequestId("r"), Epoch(1), 8, prefill.layout.layout_id))
        (link,) = prefill.node._table.all()
        link.fail("a test says so")
        may_dial.set()
        assert prefill.wait(PeerDisconnected).error == "a test says so"


def test_whoever_hears_of_an_offer_can_grant_it(make_peer: Make) -> None:
    """A grant of what the link does not know yet would be passed over, and both sides would wait."""
    prefill, decode = make_peer("prefill"), make_peer("decode")
    key, emit, known = (RequestId("r"), Epoch(1)), decode.node._emit, []

    def heard(event: TransferEvent) -> None:
        known.append(decode.node.knows(prefill.name, *key))
        emit(event)

    decode.node._parts = replace(decode.node._parts, emit=heard)
    prefill.node.offer(decode.ref, Offer(*key, 8, prefill.layout.layout_id))
    decode.message(Offer, "r")
    assert known == [True]


def test_whoever_waits_for_the_end_of_a_link_finds_its_loss_told(make_peer: Make) -> None:
    """Otherwise the loss would end the link that is made next."""
    prefill, decode = make_peer("prefill"), make_peer("decode")
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    link, on_lost, are_gone = prefill.node._table.placed[decode.name, True], prefill.node._on_lost, []

    def lost(link: Link, event: PeerDisconnected) -> None:
        on_lost(link, event)
        are_gone.append(link.gone.is_set())

    link.parts = replace(link.parts, on_lost=lost)
    link.fail("a test says so")
    assert link.gone.wait(30) and are_gone == [False]


@pytest.mark.parametrize("speaker", ["prefill", "decode"])
def test_what_is_the_other_sides_to_say_ends_the_link(make_peer: Make, speaker: str) -> None:
    prefill, decode = make_peer("prefill"), make_peer("decode")
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    key = RequestId("r"), Epoch(1)
    if speaker == "prefill":
        prefill.node._table.placed[decode.name, True].send(Commit(*key, 0, 0))
        hearer, word = decode, "prefill sent Commit"
    else:
        decode.node._table.placed[prefill.name, False].send(fin("r", 0))
        hearer, word = prefill, "decode sent Fin"
    assert word in hearer.wait(PeerDisconnected).error
    assert not any(
        isinstance(event, MessageReceived) and isinstance(event.message, Commit | Fin) for event in hearer.seen
    )


def test_a_link_that_fails_before_its_thread_has_the_socket_does_not_go_up(make_peer: Make, monkeypatch) -> None:
    """It has its place in the node by then: the loss of the other direction, or the node's end, finds it there."""
    prefill, decode = make_peer("prefill"), make_peer("decode")
    run = IncomingLink.run

    def late(link: IncomingLink, *of: Any) -> None:
        link.fail("a test says so")
        run(link, *of)

    monkeypatch.setattr(IncomingLink, "run", late)
    prefill.node.offer(decode.ref, Offer(RequestId("r"), Epoch(1), 8, prefill.layout.layout_id))
    assert decode.wait(PeerDisconnected).error == "a test says so"
    prefill.wait(PeerDisconnected)


def test_a_handshake_with_a_peer_that_says_nothing_ends_with_the_link(make_peer: Make, monkeypatch) -> None:
    """Though the link failed before its thread had the socket."""
    silent, run, agree = threading.Event(), IncomingLink.run, handshake.agree

    def late(link: IncomingLink, *of: Any) -> None:
        link.fail("a test says so")
        run(link, *of)

    def silently(*of: Any, sends: bool) -> Any:
        return agree(*of, sends=sends) if not sends or silent.wait(DEADLINE_S) else None

    monkeypatch.setattr(IncomingLink, "run", late)
    monkeypatch.setattr(handshake, "agree", silently)
    prefill, decode = make_peer("prefill"), make_peer("decode", handshake_timeout_s=10 * DEADLINE_S)
    prefill.node.meet([decode.ref])
    try:
        assert decode.wait(PeerDisconnected).error == "a test says so"
    finally:
        silent.set()
    prefill.wait(PeerDisconnected)


def lack_threads(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The first thread of each of these names can't be started."""
    start, lacks = threading.Thread.start, set(names)

    def lacking(thread: threading.Thread) -> None:
        if thread.name in lacks:
            lacks.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", lacking)


@pytest.mark.parametrize("what", ["a thread", "a descriptor"])
def test_a_link_for_which_something_is_lacking_holds_no_page_and_no_channel(
    make_peer: Make, monkeypatch, caplog, transport: str, what: str
) -> None:
    """Nobody has touched a page, so the loss is a fenced one; `leftovers` counts the descriptors."""
    caplog.set_level(logging.CRITICAL, "kv_transfer.links.link")  # an error that is kept keeps what it came through
    prefill, decode = make_peer("prefill", transport=transport), make_peer("decode", transport=transport)

    def without(*_: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    if what == "a thread":
        lack_threads(monkeypatch, "kv-data-prefill", "kv-data-decode")
    else:
        monkeypatch.setattr(ControlConnection, "__init__", without)
    prefill.node.offer(decode.ref, Offer(RequestId("r"), Epoch(1), 8, prefill.layout.layout_id))
    assert prefill.wait(PeerDisconnected).fenced and decode.wait(PeerDisconnected).fenced
    assert not prefill.node.stats() and not decode.node.stats()


@pytest.mark.parametrize("name", ["kv-link-decode", "kv-peer"])
def test_a_connection_for_which_no_thread_is_left_is_lost_and_the_next_is_made(
    make_peer: Make, monkeypatch, name: str
) -> None:
    prefill, decode = make_peer("prefill"), make_peer("decode")
    lack_threads(monkeypatch, name)
    prefill.node.offer(decode.ref, Offer(RequestId("r"), Epoch(1), 8, prefill.layout.layout_id))
    prefill.wait(PeerDisconnected)
    offer_and_grant(prefill, decode, "s", 8, [1, 2])


def test_pages_that_a_stuck_thread_may_write_are_in_use_until_the_loss_is_told(make_peer: Make, monkeypatch) -> None:
    """The other direction ends later, and the attempt meanwhile."""
    one, two = (make_peer(name, transport="loopback") for name in ("one", "two"))  # its channel has nothing to close
    offer_and_grant(one, two, "a", 8, [10, 11])
    offer_and_grant(two, one, "b", 8, [20, 21])
    writes, may_write, unpack = threading.Event(), threading.Event(), HostStaging.unpack

    def stuck(*of: Any) -> None:
        writes.set()
        assert may_write.wait(30)
        unpack(*of)

    monkeypatch.setattr(HostStaging, "unpack", stuck)
    monkeypatch.setattr("kv_transfer.links.link.FENCE_TIMEOUT_S", 0.05)
    send(one, two, "a", 0, 0, 8, [3, 4])
    assert writes.wait(30)
    incoming, outgoing = two.node._table.placed[one.name, False], two.node._table.placed[one.name, True]
    with _held_fence(outgoing, monkeypatch):
        incoming.fail("a test says so")
        assert incoming.gone.wait(30)
        two.node.abort(one.name, _abort("a"))
        assert not any(isinstance(event, Drained | PeerDisconnected) for event in [*two.seen, *two.node.poll()])
    assert not two.wait(PeerDisconnected).fenced
    may_write.set()
    assert two.wait(Drained).request_id == "a"


def test_a_process_that_was_stopped_while_it_fenced_has_no_thread_that_is_stuck(make_peer: Make, monkeypatch) -> None:
    """The time for the data thread was over when they both went on."""
    one, two = (make_peer(name, transport="loopback") for name in ("one", "two"))
    offer_and_grant(one, two, "a", 8, [10, 11])
    writes, may_write, looks = threading.Event(), threading.Event(), list[str]()
    unpack, join = HostStaging.unpack, threading.Thread.join

    def held_up(*of: Any) -> None:
        writes.set()
        assert may_write.wait(30)
        unpack(*of)

    def join_late(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name != "kv-data-one":
            return join(thread, timeout)
        looks.append(thread.name)
        if len(looks) > 1:
            may_write.set()
            join(thread, 30)

    monkeypatch.setattr(HostStaging, "unpack", held_up)
    monkeypatch.setattr(threading.Thread, "join", join_late)
    send(one, two, "a", 0, 0, 8, [3, 4])
    assert writes.wait(30)
    two.node._table.placed[one.name, False].fail("a test says so")
    assert two.wait(PeerDisconnected).fenced


def test_two_prefills_into_one_decode(make_peer: Make, transport: str) -> None:
    decode = make_peer("decode", transport=transport)
    prefills = [make_peer(name, transport=transport) for name in ("prefill-1", "prefill-02")]
    for number, prefill in enumerate(prefills):
        offer_and_grant(prefill, decode, f"r{number}", 16, list(range(number * 4, number * 4 + 4)))
    for number, prefill in enumerate(prefills):
        send(prefill, decode, f"r{number}", 0, 0, 16, [9, 8, 7, 6])
    assert {decode.wait(ChunkLanded).peer_id for _ in prefills} == {"prefill-1", "prefill-02"}
    assert pages_equal(prefills[0], [9, 8, 7, 6], decode, [0, 1, 2, 3])
    assert pages_equal(prefills[1], [9, 8, 7, 6], decode, [4, 5, 6, 7])


def test_wait_and_refuse_reach_prefill(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    key = RequestId("r"), Epoch(1)
    prefill.node.offer(decode.ref, Offer(*key, 8, prefill.layout.layout_id))
    decode.message(Offer, "r")
    decode.node.wait(prefill.name, Wait(*key, "no pages"))
    assert prefill.message(Wait, "r").reason == "no pages"
    decode.node.refuse(prefill.name, Refuse(*key, "overloaded", "no"))
    assert prefill.message(Refuse, "r").code == "overloaded"
    assert not prefill.node.knows(decode.name, *key)


def test_prefill_aborts(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    prefill.node.abort(decode.name, _abort("r"))
    assert prefill.wait(Drained).request_id == "r"
    assert decode.message(Abort, "r").code == "cancelled"
    assert decode.wait(Drained).request_id == "r"
    prefill.message(AbortAck, "r")
    send(prefill, decode, "r", 0, 0, 8, [3, 4])
    offer_and_grant(prefill, decode, "next", 4, [1])
    send(prefill, decode, "next", 0, 0, 4, [5])
    assert decode.wait(ChunkLanded).header.request_id == "next"


class Held(LoopbackTransport):
    """Keeps every message back until `let_go` is set: a network that delivers late. `holds`: the first one is there."""

    def __init__(self) -> None:
        self.holds, self.let_go = threading.Event(), threading.Event()

    def open(self, *args):
        opening = super().open(*args)
        finish = opening.finish

        def finish_held(answer: bytes):
            out = finish(answer)
            send_on = out.send

            def send(slot: Slot, nbytes: int) -> None:
                self.holds.set()
                assert self.let_go.wait(30)
                send_on(slot, nbytes)

            out.send = send  # type: ignore[method-assign]
            return out

        opening.finish = finish_held  # type: ignore[method-assign]
        return opening


def test_a_chunk_that_comes_after_its_abort_is_thrown_away(make_peer: Make) -> None:
    held = Held()
    prefill = make_peer("prefill", transport="loopback", transports={"tcp": held})
    decode = make_peer("decode-1", transport="loopback")
    offer_and_grant(prefill, decode, "r", 64, list(range(16)))
    send(prefill, decode, "r", 0, 0, 64, list(range(16, 32)))
    assert held.holds.wait(30)
    decode.node.abort(prefill.name, _abort("r"))
    decode.wait(Drained)
    before = decode.pool.copy()
    prefill.message(Abort, "r")
    held.let_go.set()
    prefill.wait(Drained)
    offer_and_grant(prefill, decode, "next", 4, [60])
    send(prefill, decode, "next", 0, 0, 4, [5])
    assert decode.wait(ChunkLanded).header.request_id == "next"
    assert (decode.pool[:, :60] == before[:, :60]).all()
    assert decode.node.stats()[0].num_stale == 1


def test_pages_are_in_use_until_the_message_that_reads_them_has_left(make_peer: Make) -> None:
    """Drained may not come while the sender's thread still reads for the attempt."""
    held = Held()
    prefill = make_peer("prefill", transport="loopback", transports={"tcp": held})
    decode = make_peer("decode-1", transport="loopback")
    offer_and_grant(prefill, decode, "r", 4, [1])
    send(prefill, decode, "r", 0, 0, 4, [2])
    assert held.holds.wait(30)
    prefill.node.abort(decode.name, _abort("r"))
    decode.message(Abort, "r")
    assert not any(isinstance(event, Drained) for event in [*prefill.seen, *prefill.node.poll()])
    held.let_go.set()
    prefill.wait(Drained)


def test_decode_aborts(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    decode.node.abort(prefill.name, _abort("r"))
    assert decode.wait(Drained) == Drained(RequestId("r"), Epoch(1))
    prefill.message(Abort, "r")
    assert prefill.wait(Drained) == Drained(RequestId("r"), Epoch(1))
    decode.message(AbortAck, "r")


def test_unknown_attempts_are_drained_at_once(make_peer: Make) -> None:
    peer = make_peer("alone")
    peer.node.abort(peer.name, _abort("x"))
    assert peer.wait(Drained).request_id == "x"


def test_a_stale_epoch_never_lands(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    decode.node.abort(prefill.name, _abort("r"))
    decode.wait(Drained)
    offer_and_grant(prefill, decode, "r", 8, [1, 2], epoch=2)
    before = decode.pool.copy()
    send(prefill, decode, "r", 0, 0, 8, [3, 4], epoch=1)
    send(prefill, decode, "r", 0, 0, 4, [5], epoch=2)
    assert decode.wait(ChunkLanded).header.epoch == 2
    assert (decode.pool[:, 2] == before[:, 2]).all() and pages_equal(prefill, [5], decode, [1])


@pytest.mark.parametrize(
    ("pages", "num_tokens", "first"), [([64], 4, 0), ([-1], 4, 0), ([1, 1], 8, 0), ([1], 8, 0), ([1], 4, 2)]
)
def test_chunks_that_make_no_sense_are_refused_at_the_sender(
    make_peer: Make, pages: list[int], num_tokens: int, first: int
) -> None:
    peer = make_peer("alone")
    with pytest.raises(ValueError):
        peer.node.send_chunk(peer.name, RequestId("r"), Epoch(1), 0, first, num_tokens, pages)  # type: ignore[arg-type]


def test_a_grant_outside_the_pool_is_refused_at_decode(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    key = RequestId("r"), Epoch(1)
    prefill.node.offer(decode.ref, Offer(*key, 8, prefill.layout.layout_id))
    decode.message(Offer, "r")
    with pytest.raises(ValueError, match="outside the pool"):
        decode.node.grant(prefill.name, Grant(*key, [[1, 64]], 0))  # type: ignore[list-item]


class Tampering(LoopbackTransport):
    """Changes one byte of the first message that it carries."""

    def open(self, *args):
        opening = super().open(*args)
        finish = opening.finish

        def finish_tampered(answer: bytes):
            out = finish(answer)
            send_on = out.send

            def send(slot: Slot, nbytes: int) -> None:
                slot.payload[nbytes // 2] ^= 1
                out.send = send_on  # type: ignore[method-assign]
                send_on(slot, nbytes)

            out.send = send  # type: ignore[method-assign]
            return out

        opening.finish = finish_tampered  # type: ignore[method-assign]
        return opening


def test_a_corrupted_byte_is_reported_and_lands_only_when_sent_again(make_peer: Make) -> None:
    prefill = make_peer("prefill", transport="loopback", transports={"tcp": Tampering()})
    decode = make_peer("decode-1", transport="loopback")
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    before = decode.pool.copy()
    send(prefill, decode, "r", 0, 0, 8, [3, 4])
    assert "checksum" in decode.wait(ChunkBad).reason
    assert (decode.pool == before).all()
    send(prefill, decode, "r", 0, 0, 8, [3, 4])
    decode.wait(ChunkLanded)
    assert pages_equal(prefill, [3, 4], decode, [1, 2])
    assert decode.node.stats()[0].num_bad == 1


def test_a_restarted_peer_is_another_peer(make_peer: Make, transport: str) -> None:
    decode = make_peer("decode", transport=transport)
    old, new = (make_peer("prefill", transport=transport) for _ in range(2))
    offer_and_grant(old, decode, "r", 8, [1, 2])
    offer_and_grant(new, decode, "s", 8, [1, 2])
    assert decode.wait(PeerDisconnected).incarnation == old.incarnation
    assert old.wait(PeerDisconnected).peer_id == "decode"
    send(new, decode, "s", 0, 0, 8, [3, 4])
    decode.wait(ChunkLanded)
    assert pages_equal(new, [3, 4], decode, [1, 2])


def test_offers_to_a_former_incarnation_are_lost(make_peer: Make) -> None:
    prefill, decode = make_peer("prefill"), make_peer("decode")
    gone = WorkerRef(decode.name, "gone", "", decode.node.address)  # type: ignore[arg-type]
    prefill.node.offer(gone, Offer(RequestId("r"), Epoch(1), 8, prefill.layout.layout_id))
    lost = prefill.wait(PeerDisconnected)
    assert lost.incarnation == "gone" and "now served by" in lost.error


def test_offers_that_keep_coming_do_not_put_off_the_news_of_a_loss(make_peer: Make, monkeypatch) -> None:
    """Each made a connection of its own that failed with the one before, and the loss is told when none is left."""
    prefill, decode = make_peer("prefill"), make_peer("decode")
    may_dial = threading.Semaphore(0)

    def dial(link: OutgoingLink) -> None:
        may_dial.acquire()
        raise errors.PeerLost("nobody answers")

    def offer(request_id: str) -> None:
        prefill.node.offer(decode.ref, Offer(RequestId(request_id), Epoch(1), 8, prefill.layout.layout_id))

    monkeypatch.setattr(OutgoingLink, "_dial", dial)
    try:
        offer("first")
        (link,) = prefill.node._table.all()
        link.fail("silent for 3 s")
        for number in range(3):
            offer(f"next {number}")
            may_dial.release()
            assert link.gone.wait(60.0)
            if not (others := prefill.node._table.all()):
                break
            (link,) = others
        assert prefill.wait(PeerDisconnected).error == "silent for 3 s"
    finally:
        may_dial.release(10)


def test_nobody_at_the_address(make_peer: Make) -> None:
    prefill = make_peer("prefill")
    nobody = WorkerRef("decode", "x", "", "127.0.0.1:1")  # type: ignore[arg-type]
    prefill.node.offer(nobody, Offer(RequestId("r"), Epoch(1), 8, prefill.layout.layout_id))
    assert "can't connect to decode at 127.0.0.1:1" in prefill.wait(PeerDisconnected).error
    assert prefill.node.bad_paths == ("x",)


def test_a_path_is_bad_from_a_failure_to_the_next_commit(make_peer: Make) -> None:
    prefill, decode = make_peer("prefill"), make_peer("decode")
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    decode.node.abort(prefill.name, Abort(RequestId("r"), Epoch(1), errors.Corrupt.code, "a checksum differs"))
    prefill.message(Abort, "r")
    assert prefill.node.bad_paths == (decode.incarnation,) and decode.node.bad_paths == ()
    offer_and_grant(prefill, decode, "s", 8, [3, 4])
    send(prefill, decode, "s", 0, 0, 8, [3, 4])
    landed = decode.wait(ChunkLanded).header
    decode.node.commit(prefill.name, Commit(RequestId("s"), Epoch(1), 1, landed.nbytes))
    prefill.message(Commit, "s")
    assert prefill.node.bad_paths == ()


def test_a_cancelled_handoff_says_nothing_of_its_path(make_peer: Make) -> None:
    prefill, decode = make_peer("prefill"), make_peer("decode")
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    decode.node.abort(prefill.name, _abort("r"))
    prefill.message(Abort, "r")
    assert prefill.node.bad_paths == ()


def test_without_checksum_pages_still_arrive(make_peer: Make) -> None:
    prefill, decode = (make_peer(name, checksum=False) for name in ("prefill", "decode-1"))
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    send(prefill, decode, "r", 0, 0, 8, [3, 4])
    landed = decode.wait(ChunkLanded).header
    assert (landed.checksum, landed.loss) == (1, UNCHECKED)
    assert np.array_equal(prefill.pool[:, 3], decode.pool[:, 1])


@pytest.mark.parametrize("is_asked_by_prefill", [False, True])
def test_a_chunk_is_checked_if_either_end_asks_for_it(make_peer: Make, is_asked_by_prefill: bool) -> None:
    prefill = make_peer("prefill", checksum=is_asked_by_prefill)
    decode = make_peer("decode-1", checksum=not is_asked_by_prefill)
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    send(prefill, decode, "r", 0, 0, 8, [3, 4])
    assert decode.wait(ChunkLanded).header.loss == ""


def test_an_owner_that_is_busy_does_not_lose_the_link(make_peer: Make) -> None:
    """Heartbeats come from the transfer's own threads; nobody polls here for many of them."""
    prefill, decode = (make_peer(name, heartbeat_s=0.05, heartbeat_misses=8) for name in ("prefill", "decode-1"))
    offer_and_grant(prefill, decode, "r", 4, [1])
    time.sleep(1.0)
    send(prefill, decode, "r", 0, 0, 4, [2])
    decode.wait(ChunkLanded)


def test_closing_while_chunks_are_queued_ends_at_once(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    offer_and_grant(prefill, decode, "r", 256, list(range(64)))
    for index in range(64):
        send(prefill, decode, "r", index, index * 4, 4, [index])
    prefill.node.close()
    assert decode.wait(PeerDisconnected).fenced
    assert not prefill.node.stats() and not decode.node.stats()


def test_a_transport_that_a_worker_does_not_have_is_refused_at_its_start() -> None:
    settings, pages = TransferSettings(secret=SECRET, transport="nvlink"), make_pool()
    words = "transfer is 'nvlink', which this worker, with its pages in the host's memory, does not have"
    with pytest.raises(ConfigError, match=words):
        TransferNode(settings, WorkerId("w"), Incarnation("1"), LAYOUT, pages, lambda: None)


def test_a_transport_that_is_asked_for_and_cannot_be_loaded_is_refused_at_the_start(monkeypatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("libucp.so.0: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", broken)
    node = partial(TransferNode, layout=LAYOUT, pool=make_pool(), wake=lambda: None)
    node(TransferSettings(secret=SECRET), WorkerId("w"), Incarnation("1")).close()
    with pytest.raises(ConfigError, match="transfer is 'ucx': transport 'ucx' can't be loaded: libucp"):
        node(TransferSettings(secret=SECRET, transport="ucx"), WorkerId("w"), Incarnation("1"))


def test_a_link_that_was_opened_beforehand_is_the_one_that_hands_over(make_peer: Make) -> None:
    prefill, decode = make_peer("prefill"), make_peer("decode")
    prefill.node.meet([decode.ref])
    until(lambda: [link.state for link in decode.node.stats()] == ["up"])
    prefill.node.meet([decode.ref])
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    assert [(link.transport, link.state) for link in prefill.node.stats()] == [("tcp", "up")]
    assert prefill.seen == decode.seen == []


def test_a_former_incarnation_is_not_met_in_place_of_the_one_that_is_there(make_peer: Make) -> None:
    """The registry's word may be old when it arrives."""
    prefill, decode = make_peer("prefill"), make_peer("decode")
    prefill.node.meet([decode.ref])
    until(lambda: [link.state for link in prefill.node.stats()] == ["up"])
    prefill.node.meet([structs.replace(decode.ref, incarnation=Incarnation("former"))])
    assert [link.incarnation for link in prefill.node.stats()] == [decode.incarnation]


def test_who_cannot_be_met_is_a_bad_path_and_left_alone_for_a_while(make_peer: Make) -> None:
    prefill = make_peer("prefill")
    nobody = WorkerRef("decode", "x", "", "127.0.0.1:1")  # type: ignore[arg-type]
    prefill.node.meet([nobody])
    assert "can't connect to decode" in prefill.wait(PeerDisconnected).error
    assert prefill.node.bad_paths == ("x",)
    prefill.node.meet([nobody])
    assert prefill.node.stats() == []


@pytest.mark.parametrize(("is_asked", "expected"), [(False, [False, False]), (True, [False, True])])
def test_a_link_that_no_request_needed_fails_without_consequence(
    make_peer: Make, monkeypatch, is_asked, expected
) -> None:
    """Nor is one that a request needs taken for such a one because it failed before it was told of the request."""
    told, offer = [], OutgoingLink.offer
    prefill = make_peer("prefill")
    monkeypatch.setattr(prefill.node._paths, "failed", lambda _, was_asked: told.append(was_asked))
    monkeypatch.setattr(OutgoingLink, "offer", lambda link, message: link.gone.wait() and offer(link, message))
    nobody = WorkerRef("decode", "x", "", "127.0.0.1:1")  # type: ignore[arg-type]
    prefill.node.meet([nobody])
    prefill.wait(PeerDisconnected)
    if is_asked:
        prefill.node.offer(nobody, Offer(RequestId("r"), Epoch(1), 8, prefill.layout.layout_id))
    else:
        prefill.node.meet([nobody])
    prefill.wait(PeerDisconnected)
    assert told == expected


def test_a_link_that_fails_as_a_request_takes_it_was_asked_for(make_peer: Make, monkeypatch) -> None:
    told, offer = [], OutgoingLink.offer
    prefill, decode = make_peer("prefill"), make_peer("decode")
    monkeypatch.setattr(prefill.node._paths, "failed", lambda _, was_asked: told.append(was_asked))
    prefill.node.meet([decode.ref])
    until(lambda: [link.state for link in prefill.node.stats()] == ["up"])

    def lost(link: OutgoingLink, message: Offer) -> None:
        link.fail("a test says so")
        link.gone.wait()
        offer(link, message)

    monkeypatch.setattr(OutgoingLink, "offer", lost)
    prefill.node.offer(decode.ref, Offer(RequestId("r"), Epoch(1), 8, prefill.layout.layout_id))
    prefill.wait(PeerDisconnected)
    assert told == [True]
