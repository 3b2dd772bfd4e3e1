"""The prefill side alone: what it offers, sends and lets go, whatever the order in which things come."""

# pyright: reportArgumentType=false
# The twins of engine and node have their methods, not their classes.

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.events import Failed, FinishReason
from contracts.handoff import Abort, Commit, Grant, Wait
from contracts.ids import BlockId, Epoch, Incarnation, RequestId
from engine.messages import ChunkDone, ChunkScheduled, Ended, Sampled, StepOutput
from kv_transfer.events import Drained, MessageReceived, PeerDisconnected
from prefill_svc.prefill_role import PrefillRole
from testing.scripted_worker_parts import NOTHING, D, P, Remembering, ScriptedEngine, first_token, opened
from worker.core.attempt_table import AttemptTable

R, E = RequestId("r"), Epoch(1)
BLOCK = 4


class Side:
    """One request of `num_tokens`, offered."""

    def __init__(self, num_tokens: int) -> None:
        self.engine, self.node, self.ledger = ScriptedEngine(), Remembering(), AttemptTable()
        self.role = PrefillRole(P, self.engine, self.node, self.ledger, grant_timeout_s=5.0)
        self.live = opened(self.ledger, self.role, R, num_tokens)
        self.role.on_started(self.live, 0.0)

    def compute(self, chunk: ChunkDone, is_last: bool) -> None:
        sampled = (Sampled(self.live.key, first_token()),) if is_last else ()
        self.role.on_step(StepOutput((), (chunk,), sampled, (), (), 0, 0), 1.0)

    def hear(self, message) -> None:
        self.role.on_transfer(MessageReceived(D, message), 1.0)

    def grant(self, skip_tokens: int, num_tokens: int) -> None:
        pages = [BlockId(900 + number) for number in range(-(-(num_tokens - skip_tokens) // BLOCK))]
        self.hear(Grant(R, E, [pages], skip_tokens))


@dataclass
class Sums:
    """A device's checksums, each the number of its block."""

    blocks: list[BlockId]

    def wait(self) -> list[BlockId]:
        return self.blocks


def cut(num_tokens: int, cuts: set[int], key: RequestId) -> list[ChunkDone]:
    """A prompt's chunks; block number i holds tokens 4i to 4i + 3."""
    edges = [0, *sorted(c * BLOCK for c in cuts if 0 < c * BLOCK < num_tokens), num_tokens]
    spans = [
        (first, end, [BlockId(b) for b in range(first // BLOCK, -(-end // BLOCK))]) for first, end in pairwise(edges)
    ]
    return [ChunkDone(key, first, end - first, blocks, Sums(blocks), "4bit") for first, end, blocks in spans]


@given(st.integers(1, 60), st.sets(st.integers(1, 14)), st.integers(0, 14), st.integers(0, 15))
def test_what_decode_lacks_is_sent_once_in_order_whenever_the_grant_comes(num_tokens, cuts, skip_blocks, grant_after):
    side = Side(num_tokens)
    chunks = cut(num_tokens, cuts, side.live.key)
    skip = min(skip_blocks, (num_tokens - 1) // BLOCK) * BLOCK
    for number, chunk in enumerate(chunks):
        if number == min(grant_after, len(chunks) - 1):
            side.grant(skip, num_tokens)
        side.compute(chunk, is_last=number == len(chunks) - 1)
    sent = side.node.told("send_chunk")
    at = skip
    for number, (peer, request_id, epoch, index, first, count, pages, sums, group, loss) in enumerate(sent):
        assert (peer, request_id, epoch, index, first, group, loss) == (D, R, E, number, at, 0, "4bit")
        assert count > 0, "the node refuses an empty chunk with a ValueError"
        assert pages == sums == [BlockId(b) for b in range(first // BLOCK, -(-(first + count) // BLOCK))]
        at += count
    assert at == num_tokens
    ((_, fin),) = side.node.told("finish")
    assert (fin.num_chunks, fin.first) == (len(sent), first_token())
    assert side.node.calls[-1][0] == "finish"


def test_nothing_is_sent_before_the_grant_and_one_offer_is_made():
    side = Side(8)
    side.role.on_started(side.live, 0.5)  # a preempted sequence starts again
    side.compute(cut(8, set(), side.live.key)[0], is_last=True)
    assert [name for name, _ in side.node.calls] == ["offer"]


def test_a_second_grant_is_stale():
    side = Side(8)
    side.grant(0, 8)
    side.grant(4, 8)
    side.compute(cut(8, set(), side.live.key)[0], is_last=True)
    assert [call[4] for call in side.node.told("send_chunk")] == [0]
    assert side.ledger.num_stale == 1


@pytest.mark.parametrize("skip_tokens", [-4, 3, 8, 12])
def test_a_grant_that_skips_what_can_not_be_skipped_fails_the_request(skip_tokens):
    """The node refuses such chunks with a ValueError, and nothing in the core's loop expects one."""
    side = Side(8)
    side.hear(Grant(R, E, [[BlockId(900)]], skip_tokens))
    side.compute(cut(8, set(), side.live.key)[0], is_last=True)
    (event,) = [event for event in side.ledger.take()[0]["g"] if isinstance(event, Failed)]
    assert event.code == "corrupt" and str(skip_tokens) in event.message
    assert [name for name, _ in side.node.calls] == ["offer", "abort"]


@pytest.mark.parametrize("group_skips", [[4], [0, 0], [8]])
def test_a_grant_of_other_pages_than_are_kept_fails_the_request(group_skips):
    side = Side(8)
    side.hear(Grant(R, E, [[BlockId(900), BlockId(901)]], 0, group_skips))
    side.compute(cut(8, set(), side.live.key)[0], is_last=True)
    (event,) = [event for event in side.ledger.take()[0]["g"] if isinstance(event, Failed)]
    assert event.code == "corrupt" and event.message.endswith("they move from [0] on")


def test_pages_are_kept_until_the_commit():
    side = Side(8)
    side.grant(0, 8)
    side.compute(cut(8, set(), side.live.key)[0], is_last=True)
    assert side.engine.told("release") == [] and not side.role.is_idle()
    side.hear(Commit(R, E, 1, 8))
    assert side.engine.told("release") == [(side.live.key,)]
    assert side.role.is_idle() and len(side.ledger) == 0 and side.ledger.take()[0] == {}


def test_aborted_pages_are_kept_until_nobody_reads_them():
    side = Side(8)
    side.grant(0, 8)
    side.role.drop(side.live, "the client left", 2.0)
    assert side.engine.told("release") == [] and not side.role.is_idle()
    side.role.on_transfer(Drained(R, E), 2.0)
    side.role.on_transfer(Drained(R, E), 2.0)  # said twice, done once
    assert side.engine.told("release") == [(side.live.key,)] and side.role.is_idle()


def test_pages_that_decode_gave_up_are_kept_until_nobody_reads_them():
    side = Side(8)
    side.grant(0, 8)
    side.hear(Abort(R, E, "cancelled", "the client left"))
    assert len(side.ledger) == 0 and side.engine.told("release") == [] and not side.role.is_idle()
    side.role.on_transfer(Drained(R, E), 2.0)
    assert side.engine.told("release") == [(side.live.key,)] and side.role.is_idle()


def test_one_that_was_never_offered_is_freed_at_once():
    engine, node, ledger = ScriptedEngine(), Remembering(), AttemptTable()
    role = PrefillRole(P, engine, node, ledger)
    live = opened(ledger, role, R, 8)
    role.drop(live, "the client left", 0.0)
    assert engine.told("release") == [(live.key,)] and node.calls == [] and role.is_idle()


@pytest.mark.parametrize("is_dropped", [False, True])
def test_the_loss_of_a_former_link_ends_nothing_that_a_new_one_has(is_dropped):
    """It was offered between the loss and the news of it; decode keeps pages for it."""
    side = Side(8)
    if is_dropped:
        side.role.drop(side.live, "the client left", 2.0)
    side.node.under_way.add((D, R, E))
    lost = PeerDisconnected(D, Incarnation("1"), "gone", True)
    side.role.on_transfer(lost, 2.0)
    assert side.engine.told("release") == [] and side.ledger.take()[0] == {}
    side.node.under_way.clear()
    side.role.on_transfer(lost, 3.0)
    assert side.engine.told("release") == [(side.live.key,)] and side.role.is_idle()


@pytest.mark.parametrize(("incarnation", "is_freed"), [("0", False), ("1", True)])
def test_only_the_loss_of_the_very_reader_frees_what_it_may_read(incarnation, is_freed):
    side = Side(8)
    side.grant(0, 8)
    side.hear(Abort(R, E, "cancelled", "the client left"))
    side.role.on_transfer(PeerDisconnected(D, Incarnation(incarnation), "gone", True), 2.0)
    assert len(side.engine.told("release")) == is_freed


def test_what_was_not_offered_yet_outlives_the_loss_of_the_link():
    """Its offer makes another one."""
    engine, node, ledger = ScriptedEngine(), Remembering(), AttemptTable()
    role = PrefillRole(P, engine, node, ledger)
    live = opened(ledger, role, R, 8)
    role.on_transfer(PeerDisconnected(D, Incarnation("1"), "gone", True), 1.0)
    assert ledger.take()[0] == {} and engine.told("release") == []
    role.on_started(live, 2.0)
    assert [name for name, _ in node.calls if name != "knows"] == ["offer"]


@pytest.mark.parametrize("is_granted", [False, True])
def test_token_0_as_the_last_ends_it_here_and_tells_decode(is_granted):
    """With Fin, decode would commit, and go on behind the end."""
    side = Side(8)
    if is_granted:
        side.grant(0, 8)
    (chunk,) = cut(8, set(), side.live.key)
    ended = Ended(side.live.key, 1, FinishReason.STOP)
    side.role.on_step(StepOutput((), (chunk,), (Sampled(side.live.key, first_token()),), (ended,), (), 0, 0), 1.0)
    ((_, abort),) = side.node.told("abort")
    assert abort.code == "finished" and side.node.told("finish") == []
    assert side.role.counters()["handoffs_aborted"] == 0


@pytest.mark.parametrize(("waited_s", "is_local"), [(4.9, False), (5.1, True)])
def test_after_its_patience_a_computed_prompt_is_decoded_here(waited_s, is_local):
    side = Side(8)
    side.hear(Wait(R, E, "full"))
    side.compute(cut(8, set(), side.live.key)[0], is_last=True)
    side.live.mark_s = 1.0
    side.role.on_tick(1.0 + waited_s)
    assert bool(side.engine.told("keep_local")) is is_local
    assert side.role.counters()["handoffs_local"] == is_local
    assert side.role.is_idle() is is_local


def test_what_is_decoded_here_is_freed_when_it_is_dropped():
    side = Side(8)
    side.compute(cut(8, set(), side.live.key)[0], is_last=True)
    side.role.on_tick(1e6)
    assert side.engine.told("keep_local") and side.engine.told("release") == []
    side.role.drop(side.live, "the client left", 1e6)
    assert side.engine.told("release") == [(side.live.key,)]


def test_what_was_sent_is_decodes_however_long_the_commit_takes():
    """Decoded here as well, it would be answered twice."""
    side = Side(8)
    side.grant(0, 8)
    side.compute(cut(8, set(), side.live.key)[0], is_last=True)
    side.role.on_tick(1e6)
    assert side.engine.told("keep_local") == side.node.told("abort") == []
    side.hear(Commit(R, E, 1, 8))
    assert side.role.counters()["handoffs_committed"] == 1


def test_a_prompt_still_in_computation_has_all_the_patience():
    side = Side(8)
    side.role.on_tick(1e6)
    assert side.engine.told("keep_local") == []


@pytest.mark.parametrize("commit", [Commit(R, E, 0, 8), Commit(R, E, 2, 8)])
def test_a_commit_that_does_not_add_up_fails_the_request(commit):
    side = Side(8)
    side.grant(0, 8)
    side.compute(cut(8, set(), side.live.key)[0], is_last=True)
    side.hear(commit)
    (event,) = side.ledger.take()[0]["g"]
    assert isinstance(event, Failed) and event.code == "corrupt"
    assert side.role.counters()["handoffs_committed"] == 0


def test_a_commit_before_token_0_was_sent_fails_the_request():
    """Nothing was to be committed, and nothing was timed: in the core's loop that would be a TypeError."""
    side = Side(8)
    side.grant(0, 8)
    side.hear(Commit(R, E, 0, 0))
    (event,) = side.ledger.take()[0]["g"]
    assert isinstance(event, Failed) and event.code == "corrupt"
    assert [name for name, _ in side.node.calls] == ["offer", "abort"]


def test_a_step_without_news_says_nothing():
    side = Side(8)
    before = list(side.node.calls)
    side.role.on_step(NOTHING, 1.0)
    assert side.node.calls == before


def test_what_is_coming_is_told_of_an_attempt_that_was_offered():
    engine, node, ledger = ScriptedEngine(), Remembering(), AttemptTable()
    role = PrefillRole(P, engine, node, ledger)
    live = opened(ledger, role, R, 8)
    chunk = ChunkScheduled(live.key, 0, 8, [BlockId(3), BlockId(4)], 5)
    role.on_chunk_scheduled(live, chunk)
    assert node.told("chunk_scheduled") == []
    role.on_started(live, 0.0)
    role.on_chunk_scheduled(live, chunk)
    assert node.told("chunk_scheduled") == [(D, R, E, 0, 8, [BlockId(3), BlockId(4)], 5, 0)]
