"""Pages that decode fetches by itself: what prefill may say of them, and how long it must keep them."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from contracts.errors import TransferError
from contracts.handoff import Abort, AbortAck, ChunkHeader, Commit, Offer, PullReady
from contracts.ids import BlockId, Epoch, RequestId
from kv_transfer.events import ChunkBad, ChunkLanded, Drained, MessageReceived, PeerDisconnected
from tests.kv_transfer.kv_device import DEVICE
from tests.kv_transfer.kv_pair import LAYOUT, Peer, offer_and_grant, pages_equal, send

Make = Callable[..., Peer]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="a process can't open its own GPU memory"),
]


@pytest.fixture
def pair(make_peer: Make) -> tuple[Peer, Peer]:
    prefill, decode = (make_peer(name, transport="nvlink") for name in ("prefill", "decode-1"))
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    return prefill, decode


def say(prefill: Peer, decode: Peer, **changes: object) -> None:
    """A PullReady of both blocks that is not as it should be."""
    facts = {"index": 0, "first_token": 0, "num_tokens": 8, "layout_id": LAYOUT.layout_id} | changes
    pages = facts.pop("pages", [BlockId(1), BlockId(2)])
    checksum = facts.pop("checksum", 0)
    header = ChunkHeader(RequestId("r"), Epoch(1), nbytes=2 * LAYOUT.block_nbytes, checksum=checksum, **facts)  # type: ignore[arg-type]
    link = prefill.node._table.outgoing(decode.name)
    assert link is not None
    link.send(PullReady.of(header, pages))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "checksum differs"),
        ({"layout_id": "another"}, "layout_id"),
        ({"first_token": 3}, "blocks are 4"),
        ({"pages": [BlockId(1)]}, "1 pages for 8 tokens"),
        ({"pages": [BlockId(1), BlockId(66)]}, "outside the peer's pool"),
        ({"pages": [BlockId(-1), BlockId(2)]}, "outside the peer's pool"),
    ],
)
def test_a_lie_about_a_chunk_is_found_and_the_truth_may_follow(pair: tuple[Peer, Peer], changes, reason: str) -> None:
    prefill, decode = pair
    others = [page for page in range(64) if page not in (5, 9)]
    before = decode.pool[:, others].copy()
    say(prefill, decode, **changes)
    assert reason in decode.wait(ChunkBad).reason
    send(prefill, decode, "r", 0, 0, 8, [1, 2])
    decode.wait(ChunkLanded)
    assert pages_equal(prefill, [1, 2], decode, [5, 9])
    assert np.array_equal(decode.pool[:, others], before)


def test_prefill_keeps_what_it_told_of_until_decode_has_let_go(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    send(prefill, decode, "r", 0, 0, 4, [1])
    decode.wait(ChunkLanded)
    prefill.node.abort(decode.name, Abort(RequestId("r"), Epoch(1), "cancelled", "a test says so"))
    drained = prefill.wait(Drained)
    acks = [
        event for event in prefill.seen if isinstance(event, MessageReceived) and isinstance(event.message, AbortAck)
    ]
    assert drained.request_id == "r"
    assert acks or prefill.message(AbortAck, "r")
    decode.wait(Drained)


def test_what_was_never_told_is_drained_at_once(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    prefill.node.abort(decode.name, Abort(RequestId("r"), Epoch(1), "cancelled", "a test says so"))
    assert any(isinstance(event, Drained) for event in prefill.poll())
    prefill.message(AbortAck, "r")
    assert not any(isinstance(event, Drained) for event in prefill.seen), "it is said once"


def test_a_commit_that_crosses_an_abort_leaves_one_drained(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    send(prefill, decode, "r", 0, 0, 8, [1, 2])
    decode.wait(ChunkLanded)
    link = prefill.node._table.outgoing(decode.name)
    assert link is not None
    link.end((RequestId("r"), Epoch(1)))  # prefill has given up; its Abort is still on the way
    decode.node.commit(prefill.name, Commit(RequestId("r"), Epoch(1), 1, 2 * LAYOUT.block_nbytes))
    prefill.message(Commit, "r")
    assert not any(isinstance(event, Drained) for event in prefill.seen)
    link.send(Abort(RequestId("r"), Epoch(1), "cancelled", "a test says so"))
    prefill.wait(Drained)


def test_an_abort_in_the_middle_of_a_commit_is_drained(pair: tuple[Peer, Peer], monkeypatch) -> None:
    """The link's thread hears of the commit while prefill's engine gives up: the pages would be held for ever."""
    prefill, decode = pair
    key = RequestId("r"), Epoch(1)
    send(prefill, decode, "r", 0, 0, 8, [1, 2])
    decode.wait(ChunkLanded)
    link = prefill.node._table.outgoing(decode.name)
    assert link is not None
    is_alive, aborts = link.queue.is_alive, []

    def is_alive_until_now(key: tuple[RequestId, Epoch]) -> bool:
        alive = is_alive(key)
        if not aborts:
            abort = Abort(*key, "cancelled", "a test says so")
            aborts.append(threading.Thread(target=prefill.node.abort, args=(decode.name, abort)))
            aborts[0].start()
            aborts[0].join(0.5)  # as far as it gets
        return alive

    monkeypatch.setattr(link.queue, "is_alive", is_alive_until_now)
    decode.node.commit(prefill.name, Commit(*key, 1, 2 * LAYOUT.block_nbytes))
    prefill.wait(Drained)
    aborts[0].join()


def test_an_abort_of_decode_ends_it_for_prefill(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    send(prefill, decode, "r", 0, 0, 4, [1])
    decode.wait(ChunkLanded)
    decode.node.abort(prefill.name, Abort(RequestId("r"), Epoch(1), "cancelled", "a test says so"))
    for peer in pair:
        peer.wait(Drained)
    decode.message(AbortAck, "r")
    link = prefill.node._table.outgoing(decode.name)
    assert link is not None and link._pull_sender is not None
    assert not link._pull_sender.read((RequestId("r"), Epoch(1))), "what was told of is not kept for ever"


def test_once_decode_has_told_of_its_abort_no_chunk_lands(pair: tuple[Peer, Peer], monkeypatch) -> None:
    """Prefill gives the pages to others then, and what it told of before is still on its way."""
    prefill, decode = pair
    link = decode.node._table.incoming(prefill.name)
    assert link is not None
    tell = link.send

    def tell_and_be_held_up(message: object) -> None:
        tell(message)  # type: ignore[arg-type]
        if isinstance(message, Abort):
            prefill.wait(Drained)
            say(prefill, decode)
            while not (stats := link.stats()).num_stale + stats.num_bad + stats.num_chunks:
                time.sleep(0.001)

    monkeypatch.setattr(link, "send", tell_and_be_held_up)
    decode.node.abort(prefill.name, Abort(RequestId("r"), Epoch(1), "cancelled", "a test says so"))
    decode.wait(Drained)
    assert not [event for event in decode.seen if isinstance(event, ChunkBad | ChunkLanded)]


def test_a_pull_over_a_link_of_messages_ends_it(make_peer: Make) -> None:
    prefill, decode = (make_peer(name, transport="tcp") for name in ("prefill", "decode-1"))
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    say(prefill, decode)
    assert "over tcp" in decode.wait(PeerDisconnected).error


def test_host_and_device_do_not_meet(make_peer: Make) -> None:
    prefill, decode = make_peer("prefill", transport="nvlink"), make_peer("decode-1", transport="auto")
    prefill.node.offer(decode.ref, Offer(RequestId("r"), Epoch(1), 8, LAYOUT.layout_id))
    lost = prefill.wait(PeerDisconnected)
    assert lost.code == "config" and lost.error.startswith("memory: ")


def test_a_pool_that_cannot_be_mapped_leaves_the_next_transport(make_peer: Make, monkeypatch) -> None:
    """And its pages are staged then; without UCX here, whose tests run in processes of their own."""
    prefill, decode = make_peer("prefill", transport="nvlink"), make_peer("decode-1", transport="nvlink")
    for peer in (prefill, decode):
        object.__setattr__(peer.node._parts.settings, "transport", "auto")
        monkeypatch.setattr(peer.node._transports, "available", lambda: ["nvlink", "shm", "tcp"])

    def refuse(shared: bytes, mark: bytes) -> None:
        raise TransferError("no way there")

    assert decode.device is not None
    monkeypatch.setattr(decode.device, "attach", refuse)
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    assert decode.node.stats()[0].transport == "shm"
    send(prefill, decode, "r", 0, 0, 8, [1, 2])
    decode.wait(ChunkLanded)
    assert pages_equal(prefill, [1, 2], decode, [5, 9])


def land_what_was_coming(prefill: Peer, decode: Peer) -> Any:
    """Returns the mark that decode has of prefill."""
    prefill.node.chunk_scheduled(decode.name, RequestId("r"), Epoch(1), 0, 8, [BlockId(1), BlockId(2)], 5)
    prefill.node.chunks_launched(is_all=True)
    send(prefill, decode, "r", 0, 0, 8, [1, 2])
    decode.wait(ChunkLanded)
    assert pages_equal(prefill, [1, 2], decode, [5, 9])
    link = decode.node._table.incoming(prefill.name)
    assert link is not None and link._pull_receiver is not None
    return link._pull_receiver._remotes[0]._mark  # type: ignore[attr-defined]


def test_what_was_coming_lands_when_it_is_told(pair: tuple[Peer, Peer]) -> None:
    assert land_what_was_coming(*pair).value == 2


def test_nothing_is_told_ahead_where_prefill_can_set_no_mark(make_peer: Make, monkeypatch) -> None:
    prefill, decode = (make_peer(name, transport="nvlink") for name in ("prefill", "decode-1"))
    assert prefill.device is not None
    monkeypatch.setattr(prefill.device, "mark", lambda: None)
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    assert land_what_was_coming(prefill, decode) is None


def test_what_was_coming_and_is_never_computed_is_drained(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    prefill.node.chunk_scheduled(decode.name, RequestId("r"), Epoch(1), 0, 8, [BlockId(1), BlockId(2)], 5)
    prefill.node.abort(decode.name, Abort(RequestId("r"), Epoch(1), "cancelled", "a test says so"))
    for peer in pair:
        peer.wait(Drained)


MARKS = {"noise": b"noise", "nobody's": bytes(12), "ours": os.getpid().to_bytes(4, "little") + bytes(8)}


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
def test_marks_that_cannot_be_mapped_leave_pulls_that_are_told(make_peer: Make, monkeypatch, mark: bytes) -> None:
    prefill, decode = (make_peer(name, transport="nvlink") for name in ("prefill", "decode-1"))
    assert decode.device is not None
    attach = decode.device.attach
    monkeypatch.setattr(decode.device, "attach", lambda shared, _: attach(shared, mark))
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    land_what_was_coming(prefill, decode)
