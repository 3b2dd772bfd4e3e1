"""An offer that is a bound: the KV of a running answer, of which Fin says how much came."""

import threading
from collections.abc import Callable

import pytest

from contracts import codec
from contracts.events import Token
from contracts.handoff import MAX_MOVED_NBYTES, MAX_MOVED_TOKENS, ChunkHeader, Commit, Fin, Grant, Offer, PullReady
from contracts.ids import BlockId, Epoch, RequestId
from kv_transfer.data_path.grant import GrantTable
from kv_transfer.data_path.pull_sender import PullSender
from kv_transfer.data_path.sender import SendQueue
from kv_transfer.events import ChunkLanded
from kv_transfer.links.incoming_link import IncomingLink
from tests.kv_transfer.kv_pair import LAYOUT, Peer, pages_equal, send
from tests.waiting import PATIENCE_S, until

KEY = RequestId("r"), Epoch(1)
SIZE = LAYOUT.block_size
BOUND = 8 * SIZE
SKIP = 2 * SIZE
PAGES = [BlockId(page) for page in range(20, 26)]


def table(is_bound: bool = True) -> GrantTable:
    grants = GrantTable(LAYOUT, [64])
    grants.offered(Offer(*KEY, BOUND, LAYOUT.layout_id, is_bound))
    grants.grant(Grant(*KEY, [PAGES], SKIP))
    return grants


def header(index: int, first: int, num_tokens: int) -> ChunkHeader:
    nbytes = LAYOUT.num_blocks(num_tokens) * LAYOUT.block_nbytes
    return ChunkHeader(*KEY, index, first, num_tokens, LAYOUT.layout_id, nbytes, 0)


def test_the_table_commits_no_bound_offer_whose_owner_may_not_have_taken_it_over():
    grants = table()
    for index, (first, num) in enumerate([(SKIP, SIZE), (3 * SIZE, 5 * SIZE)]):
        assert grants.chunk_received(header(index, first, num)) is None
    assert grants.finished(Fin(*KEY, 2, Token(9, 7), 0, BOUND, [Token(8, 7)])) is None
    assert not grants.is_committed(KEY)


def test_only_a_bound_offer_may_end_inside_a_block_before_its_last_token():
    assert [table(is_bound).find(KEY).check(header(0, SKIP, SIZE - 1)) for is_bound in (True, False)] == [  # type: ignore[union-attr]
        None,
        f"the chunk ends at token {3 * SIZE - 1}, inside a block",
    ]


def test_an_offer_that_is_no_bound_is_whole_when_all_of_it_came():
    grants = table(is_bound=False)
    grants.finished(Fin(*KEY, 1, Token(0, 7), 0))
    assert grants.chunk_received(header(0, SKIP, 6 * SIZE)) is not None


def test_the_kv_of_a_running_answer_arrives_and_the_rest_of_its_pages_stays_as_it_was(
    make_peer: Callable[..., Peer], transport: str
):
    prefill, decode = make_peer("prefill", transport=transport), make_peer("decode", transport=transport)
    prefill.node.offer(decode.ref, Offer(*KEY, BOUND, LAYOUT.layout_id, is_bound=True))
    assert decode.message(Offer, "r").is_bound
    decode.node.grant(prefill.name, Grant(*KEY, [PAGES], SKIP))
    prefill.message(Grant, "r")
    before = decode.pool.copy()
    send(prefill, decode, "r", 0, SKIP, 2 * SIZE, [1, 2])
    send(prefill, decode, "r", 1, 4 * SIZE, SIZE, [3])
    send(prefill, decode, "r", 2, 5 * SIZE, SIZE - 1, [4])
    fin = Fin(*KEY, 3, Token(9, 7), 0, 6 * SIZE - 1, [Token(8, 7, -0.5, [(7, -0.5)])])
    prefill.node.finish(decode.name, fin)
    assert [decode.wait(ChunkLanded).header.num_tokens for _ in range(3)] == [2 * SIZE, SIZE, SIZE - 1]
    assert decode.message(Fin, "r") == fin
    decode.node.commit(prefill.name, Commit(*KEY, 3, 0))
    assert prefill.message(Commit, "r").num_chunks == 3
    assert pages_equal(prefill, [1, 2, 3, 4], decode, [20, 21, 22, 23])
    assert (decode.pool[:, 24:26] == before[:, 24:26]).all()


def test_a_fin_of_as_many_tokens_as_it_may_have_arrives(make_peer: Callable[..., Peer]):
    """Each with all alternatives that a client may ask for, and numbers as long as they get."""
    prefill, decode = make_peer("prefill"), make_peer("decode")
    prefill.node.offer(decode.ref, Offer(*KEY, BOUND, LAYOUT.layout_id, is_bound=True))
    decode.message(Offer, "r")
    longest = (1 << 32) - 1
    drawn = [Token(longest, longest, -0.1, [(longest, -0.1)] * 20) for _ in range(MAX_MOVED_TOKENS)]
    assert len(codec.encode(drawn)) <= MAX_MOVED_NBYTES
    fin = Fin(*KEY, 0, drawn[0], 0, SKIP, drawn[1:])
    prefill.node.finish(decode.name, fin)
    assert decode.message(Fin, "r") == fin


def test_what_decode_has_yet_to_fetch_of_a_running_answer_is_on_its_way(
    make_peer: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
):
    """An answer would be paused while gigabytes of it are read, which are reported in a moment."""
    prefill, decode = make_peer("prefill", transport="nvlink"), make_peer("decode", transport="nvlink")
    prefill.node.offer(decode.ref, Offer(*KEY, BOUND, LAYOUT.layout_id, is_bound=True))
    decode.message(Offer, "r")
    decode.node.grant(prefill.name, Grant(*KEY, [PAGES], SKIP))
    prefill.message(Grant, "r")
    assert not prefill.node.has_queued(decode.name, *KEY)
    link, may_read = decode.node._table.incoming(prefill.name), threading.Event()
    assert isinstance(link, IncomingLink) and link._pull_receiver is not None
    (remote,) = link._pull_receiver._remotes
    pull = remote.pull
    monkeypatch.setattr(remote, "pull", lambda *facts: may_read.wait(PATIENCE_S) and pull(*facts))
    send(prefill, decode, "r", 0, SKIP, 2 * SIZE, [1, 2])
    assert prefill.node.has_queued(decode.name, *KEY)
    may_read.set()
    decode.wait(ChunkLanded)
    until(lambda: not prefill.node.has_queued(decode.name, *KEY))


def test_only_a_peer_that_says_what_it_has_fetched_is_waited_for():
    attempts = SendQueue()
    attempts.begin(KEY)
    says, says_not = (PullSender(attempts, None, lambda _: None, lambda *_: None, tells) for tells in (True, False))
    for sender in (says, says_not):
        for index in range(2):
            sender.put(PullReady.of(header(index, SKIP, SIZE), [BlockId(1)]))
    assert says.has_unfetched(KEY) and not says_not.has_unfetched(KEY)
    says.fetched(KEY, 0)
    assert says.has_unfetched(KEY)
    says.fetched(KEY, 1)
    assert not says.has_unfetched(KEY)
    says.put(PullReady.of(header(2, SKIP, SIZE), [BlockId(1)]))
    says.end(KEY)
    assert not says.has_unfetched(KEY)
    says.fetched(KEY, 2)  # it comes after the end
    assert not says.has_unfetched(KEY)
