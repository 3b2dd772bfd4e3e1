"""The decode side alone: pages in order of arrival, commits only of what is whole, two holds on every page."""

# pyright: reportArgumentType=false
# The twins of engine and node have their methods, not their classes.

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.events import Failed
from contracts.handoff import Abort, ChunkHeader, Fin, Offer
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId
from contracts.kv_loss import UNCHECKED
from decode_svc.decode_role import DecodeRole
from engine.messages import StepOutput
from kv_transfer.events import ChunkBad, ChunkLanded, Drained, MessageReceived, PeerDisconnected
from testing.scripted_worker_parts import D, P, Remembering, ScriptedEngine, first_token, opened
from worker.core.attempt_table import AttemptTable
from worker.handoff.incoming import EARLY_OFFER_S

E = Epoch(1)
ENDED = StepOutput((), (), (), ("something ended",), (), 0, 0)


class Side:
    def __init__(self, free: int = 100, skip_tokens: int = 0) -> None:
        self.engine, self.node, self.ledger = (
            ScriptedEngine(free=free, skip_tokens=skip_tokens),
            Remembering(),
            AttemptTable(),
        )
        self.role = DecodeRole(D, self.engine, self.node, self.ledger)

    def begin(self, name: str, num_tokens: int, priority: int = 0):
        return opened(self.ledger, self.role, name, num_tokens, priority=priority)

    def hear(self, message, now: float = 1.0) -> None:
        self.role.on_transfer(MessageReceived(P, message), now)

    def offer(self, name: str, num_tokens: int, now: float = 1.0, nbytes_per_s: float = 0.0) -> None:
        layout_id = self.engine.layout.layout_id
        self.hear(Offer(RequestId(name), E, num_tokens, layout_id, nbytes_per_s=nbytes_per_s), now)

    def header(self, name: str, index: int, first: int, count: int) -> ChunkHeader:
        return ChunkHeader(RequestId(name), E, index, first, count, self.engine.layout.layout_id, count, 0)

    def land(self, name: str, index: int, first: int, count: int, landed_s: float = 1.0, now: float = 1.0) -> None:
        self.role.on_transfer(ChunkLanded(P, self.header(name, index, first, count), landed_s), now)

    def fin(self, name: str, num_chunks: int) -> None:
        self.hear(Fin(RequestId(name), E, num_chunks, first_token(), 0))

    def granted(self) -> list[str]:
        return [grant.request_id for _, grant in self.node.told("grant")]

    def failures(self) -> list[str]:
        return [event.code for event in self.ledger.take()[0].get(GatewayId("g"), []) if isinstance(event, Failed)]


def test_pages_beyond_the_cached_prefix_are_granted():
    side = Side(skip_tokens=8)
    side.begin("r", 20)
    side.offer("r", 20)
    ((_, grant),) = side.node.told("grant")
    assert (grant.skip_tokens, grant.pages) == (8, [[2, 3, 4]])


def test_pages_that_tiers_here_do_not_fill_are_granted_once_these_have_filled_the_others():
    side = Side(skip_tokens=4)
    side.engine.loads = True
    live = side.begin("r", 20)
    layout = side.engine.layout
    side.offer("r", 20, nbytes_per_s=3.0 * layout.block_nbytes)
    assert side.engine.told("load_reserved") == [(live.key, 3.0 * layout.block_size)]
    side.role.advance(1.0)
    assert side.granted() == [] and side.engine.told("prepare") == [(live.key,)]
    side.engine.loaded.append((live.key, 12))
    side.role.advance(2.0)
    ((_, grant),) = side.node.told("grant")
    assert (grant.skip_tokens, grant.pages) == (12, [[3, 4]])
    side.fin("r", 1)
    side.land("r", 0, 12, 8)
    assert [commit.num_chunks for _, commit in side.node.told("commit")] == [1]


def test_nothing_is_loaded_where_the_rate_of_the_link_is_not_known():
    side = Side()
    side.engine.loads = True
    side.begin("r", 20)
    side.offer("r", 20)
    assert side.engine.told("load_reserved") == [] and side.granted() == ["r"]


@pytest.mark.parametrize(
    "end",
    [
        MessageReceived(P, Abort(RequestId("r"), E, "cancelled", "the client left")),
        PeerDisconnected(P, Incarnation("1"), "gone", False),
    ],
    ids=["aborted", "link lost, not fenced"],
)
def test_a_handoff_that_ends_while_its_pages_are_filled_holds_none(end):
    """No peer was told of them, so none can write there: what the engine gives them to is safe at once."""
    side = Side()
    side.engine.loads = True
    live = side.begin("r", 20)
    side.offer("r", 20, nbytes_per_s=1e6)
    side.role.on_transfer(end, 2.0)
    assert side.engine.told("release") == side.engine.told("incoming_writer_ended") == [(live.key,)]
    side.role.advance(2.0)
    assert side.granted() == [] and side.role.is_idle() and side.role.counters()["quarantined"] == 0
    side.role.on_transfer(Drained(RequestId("r"), E), 2.0)
    assert len(side.engine.told("incoming_writer_ended")) == 1


def test_a_handoff_whose_pages_were_filled_waits_for_its_writer():
    side = Side()
    side.engine.loads = True
    live = side.begin("r", 20)
    side.offer("r", 20, nbytes_per_s=1e6)
    side.engine.loaded.append((live.key, 12))
    side.role.advance(2.0)
    side.role.on_transfer(PeerDisconnected(P, Incarnation("1"), "gone", False), 2.0)
    assert side.engine.told("incoming_writer_ended") == [] and side.role.counters()["quarantined"] == 1


def test_a_first_step_is_prepared_when_prefill_has_the_grant():
    side = Side()
    side.node.calls = calls = side.engine.calls
    live = side.begin("r", 8)
    side.offer("r", 8)
    assert [name for name, _ in calls] == ["reserve", "grant", "prepare"]
    assert side.engine.told("prepare") == [(live.key,)]


def test_the_account_of_landing_ends_with_the_last_chunk_not_when_the_loop_hears_of_it():
    side = Side()
    live = side.begin("r", 8)
    side.offer("r", 8, now=1.0)
    side.fin("r", 2)
    side.land("r", 0, 0, 4, landed_s=1.5, now=2.0)
    side.land("r", 1, 4, 4, landed_s=2.5, now=9.0)
    assert live.stages_s == {"expect": 1.0, "land": 1.5} and live.mark_s == 2.5


def test_of_a_prompt_that_is_cached_here_nothing_lands():
    side = Side(skip_tokens=8)
    live = side.begin("r", 8)
    side.offer("r", 8, now=1.0)
    side.fin("r", 0)
    assert live.stages_s == {"expect": 1.0, "land": 0.0}


def test_the_first_in_line_is_not_overtaken_by_a_smaller_one():
    side = Side(free=4)
    for name, num_tokens in (("a", 12), ("big", 16), ("small", 4)):
        side.begin(name, num_tokens)
        side.offer(name, num_tokens)
    assert side.granted() == ["a"]
    assert [wait.request_id for _, wait in side.node.told("wait")] == ["big", "small"]
    side.engine.free = 5
    side.role.on_step(ENDED, 2.0)
    assert side.granted() == ["a", "big", "small"]
    assert side.role.counters()["kv_handoffs_received_waited"] == 2


def test_the_lowest_priority_has_the_next_free_pages():
    side = Side(free=0)
    for name, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0)):
        side.begin(name, 8, priority)
        side.offer(name, 8)
    side.engine.free = 100
    side.role.on_tick(2.0)
    assert side.granted() == ["c", "b", "d", "a"]


def test_pages_are_asked_for_with_the_place_in_the_order_that_the_offer_had():
    """Prompts of this worker that came in between come after it, though others' pages were asked for before."""
    side = Side(free=0)
    lives = [side.begin(name, 8, priority) for name, priority in (("a", 1), ("b", 0))]
    for name in "ab":
        side.offer(name, 8)
    side.engine.free = 100
    side.role.on_tick(2.0)
    assert side.engine.told("reserve") == [(lives[1].key, (0.0, 2)), (lives[0].key, (0.0, 1))]


def test_who_waits_is_told_once():
    side = Side(free=0)
    side.begin("r", 8)
    side.offer("r", 8)
    for now in range(5):
        side.role.on_tick(float(now))
    assert len(side.node.told("wait")) == 1


def test_a_cancel_of_the_first_in_line_lets_the_next_one_in():
    side = Side(free=1)
    big = side.begin("big", 40)
    side.begin("small", 4)
    side.offer("big", 40)
    side.offer("small", 4)
    side.role.drop(big, "the client left", 2.0)
    assert side.engine.told("release") == [(big.key,)], "the engine would leave it room for ever"
    side.role.on_tick(2.0)
    assert side.granted() == ["small"]


@given(st.permutations([0, 1, 2, "fin"]))
def test_it_commits_when_all_is_there_wherever_fin_comes(order):
    """Chunks come in order; control and data travel apart."""
    side = Side()
    live = side.begin("r", 20)
    side.offer("r", 20)
    chunks = iter([(0, 0, 8), (1, 8, 8), (2, 16, 4)])
    for step in order:
        assert side.node.told("commit") == []
        side.fin("r", 3) if step == "fin" else side.land("r", *next(chunks))
    ((_, commit),) = side.node.told("commit")
    assert (commit.num_chunks, commit.nbytes) == (3, 20)
    assert side.engine.told("adopt") == [(live.key, first_token())]
    assert side.engine.told("incoming_writer_ended") == [(live.key,)]
    assert side.role.is_idle() and side.failures() == []


@pytest.mark.parametrize(
    ("index", "first", "count"),
    [(1, 0, 8), (0, 8, 8), (0, 4, 8)],
    ids=["index skipped", "tokens skipped", "inside the granted prefix"],
)
def test_a_chunk_that_is_not_the_next_fails_the_request(index: int, first: int, count: int):
    side = Side()
    side.begin("r", 20)
    side.offer("r", 20)
    side.land("r", index, first, count)
    assert side.failures() == ["corrupt"]
    assert side.node.told("abort") and side.engine.told("adopt") == []


def test_a_broken_chunk_fails_the_request_at_once():
    """Though it is the last: nothing that comes later would tell."""
    side = Side()
    side.begin("r", 8)
    side.offer("r", 8)
    side.fin("r", 1)
    side.role.on_transfer(ChunkBad(P, side.header("r", 0, 0, 8), "checksum differs"), 1.0)
    assert side.failures() == ["corrupt"] and len(side.node.told("abort")) == 1
    assert side.node.told("commit") == side.engine.told("adopt") == []


@pytest.mark.parametrize("num_chunks", [0, 2, 3, 4])
@pytest.mark.parametrize("fin_first", [False, True])
def test_a_fin_that_claims_other_chunks_than_came_fails_at_once(num_chunks: int, fin_first: bool):
    """One chunk of three blocks holds all that was offered."""
    side = Side()
    side.begin("r", 12)
    side.offer("r", 12)
    steps = [lambda: side.fin("r", num_chunks), lambda: side.land("r", 0, 0, 12)]
    for step in steps if fin_first else reversed(steps):
        step()
    assert side.failures() == ["corrupt"] and len(side.node.told("abort")) == 1
    assert side.node.told("commit") == side.engine.told("adopt") == []
    side.role.on_transfer(Drained(RequestId("r"), E), 2.0)
    assert side.role.is_idle()


def test_a_fin_that_came_before_the_pages_of_an_unasked_attempt_is_corrupt():
    side = Side()
    side.begin("r", 8)
    side.fin("r", 3)
    assert side.failures() == ["corrupt"] and side.role.is_idle()


def test_a_page_is_free_when_request_and_writer_have_both_let_go():
    side = Side()
    live = side.begin("r", 8)
    side.offer("r", 8)
    side.role.drop(live, "the client left", 2.0)
    assert side.engine.told("release") == [(live.key,)]
    assert side.engine.told("incoming_writer_ended") == []
    side.role.on_transfer(Drained(RequestId("r"), E), 2.0)
    side.role.on_transfer(Drained(RequestId("r"), E), 2.0)
    assert side.engine.told("incoming_writer_ended") == [(live.key,)] and side.role.is_idle()


def test_an_offer_that_does_not_fit_its_job_is_corrupt():
    side = Side()
    side.begin("r", 8)
    side.offer("r", 9)
    assert side.failures() == ["corrupt"] and side.granted() == []


def test_an_offer_of_a_stranger_is_corrupt():
    side = Side()
    side.begin("r", 8)
    side.role.on_transfer(MessageReceived("someone", Offer(RequestId("r"), E, 8, side.engine.layout.layout_id)), 1.0)
    assert side.failures() == ["corrupt"] and side.granted() == []


def test_an_early_offer_waits_for_its_job_and_no_longer():
    side = Side()
    side.offer("soon", 8, now=1.0)
    side.offer("never", 8, now=1.0)
    side.begin("soon", 8)
    assert side.granted() == ["soon"]
    side.role.on_tick(1.0 + EARLY_OFFER_S)
    assert side.node.told("refuse") == []
    side.role.on_tick(1.1 + EARLY_OFFER_S)
    ((_, refuse),) = side.node.told("refuse")
    assert (refuse.request_id, refuse.code) == ("never", "unavailable")


def test_an_early_offer_goes_with_its_peer():
    """Granted later, its pages would wait for chunks that nobody sends, until the job's deadline."""
    side = Side()
    side.offer("r", 8)
    side.role.on_transfer(PeerDisconnected("someone", Incarnation("1"), "gone", True), 2.0)
    assert not side.role.is_idle()
    side.role.on_transfer(PeerDisconnected(P, Incarnation("1"), "gone", True), 2.0)
    assert side.role.is_idle()
    ((_, refuse),) = side.node.told("refuse")  # heard by nobody, or by a successor whose offer it was
    assert refuse.request_id == "r" and refuse.reason.endswith("gone")
    side.begin("r", 8)
    assert side.granted() == [] and side.engine.told("reserve") == []


def test_a_second_early_offer_of_an_attempt_changes_nothing():
    """The node would not take a grant that fits the second, and say so with a ValueError in the core's loop."""
    side = Side()
    side.offer("r", 9)
    side.offer("r", 8)
    side.begin("r", 8)
    assert side.failures() == ["corrupt"] and side.granted() == []


def test_an_early_offer_that_is_taken_back_is_forgotten():
    side = Side()
    side.offer("r", 8)
    side.hear(Abort(RequestId("r"), E, "cancelled", "the client left"))
    side.begin("r", 8)
    assert side.granted() == []
    side.role.on_tick(100.0)
    assert side.node.told("refuse") == []


def test_a_job_that_comes_after_its_end_does_not_stay():
    """Token 0 was the last, and prefill was done with it before the job was here."""
    side = Side()
    side.offer("r", 8)
    side.hear(Abort(RequestId("r"), E, "finished", "token 0 ended the request"))
    assert side.role.is_idle()
    side.begin("r", 8)
    assert len(side.ledger) == 0 and side.role.is_idle() and side.failures() == []
    side.begin("r", 8)
    assert len(side.ledger) == 1  # an attempt of that name is taken again: one job, one end


def test_ends_without_a_job_are_not_kept_for_ever():
    side = Side()
    side.hear(Abort(RequestId("r"), E, "finished", "token 0 ended the request"), now=1.0)
    side.role.on_tick(1.1 + EARLY_OFFER_S)
    side.begin("r", 8)
    assert len(side.ledger) == 1


def test_what_prefill_aborts_is_told_by_prefill_alone():
    side = Side()
    side.begin("r", 8)
    side.offer("r", 8)
    side.hear(Abort(RequestId("r"), E, "finished", "token 0 ended the request"))
    assert side.failures() == [] and len(side.ledger) == 0
    assert side.role.counters()["kv_handoffs_received_aborted"] == 0


def test_a_chunk_of_nobody_is_stale():
    side = Side()
    side.land("ghost", 0, 0, 8)
    side.fin("ghost", 1)
    assert side.ledger.num_stale == 2


def test_a_chunk_that_came_before_its_pages_were_taken_is_stale():
    """It lies on those of somebody who had the attempt's name before."""
    side = Side(free=0)
    side.begin("r", 8)
    side.offer("r", 8)
    side.land("r", 0, 0, 8)
    side.fin("r", 1)
    assert side.ledger.num_stale == 1
    assert side.node.told("commit") == side.engine.told("adopt") == []


@pytest.mark.parametrize(("incarnation", "is_freed"), [("0", False), ("1", True)])
def test_only_the_loss_of_the_very_writer_frees_what_it_may_write(incarnation, is_freed):
    """A worker's successor under the same id may be writing while the end of its predecessor is still being told."""
    side = Side()
    side.begin("r", 20)
    side.offer("r", 20)
    side.hear(Abort(RequestId("r"), E, "cancelled", "why"))
    assert side.engine.told("incoming_writer_ended") == []
    side.role.on_transfer(PeerDisconnected(P, Incarnation(incarnation), "gone", True), 2.0)
    assert len(side.engine.told("incoming_writer_ended")) == is_freed


def landed(skip_tokens: int = 4) -> Side:
    """A side to which two chunks of a handoff have come, up to token 12 of 20."""
    side = Side(skip_tokens=skip_tokens)
    side.begin("r", 20)
    side.offer("r", 20)
    side.land("r", 0, 4, 4)
    side.land("r", 1, 8, 4)
    return side


GONE = PeerDisconnected(P, Incarnation("1"), "gone", True)
OVER = [
    ([GONE], 12),
    ([MessageReceived(P, Abort(RequestId("r"), E, "cancelled", "why")), Drained(RequestId("r"), E)], 12),
    ([MessageReceived(P, Abort(RequestId("r"), E, "cancelled", "why"))], 0),  # a writer may go on
    ([PeerDisconnected(P, Incarnation("1"), "gone", False)], 0),
]


@pytest.mark.parametrize(("events", "num_saved"), OVER)
def test_what_had_come_is_kept_once_no_writer_is_left(events, num_saved):
    side = landed()
    for event in events:
        side.role.on_transfer(event, 2.0)
    assert side.engine.num_saved == num_saved == side.role.counters()["kv_saved_tokens"]


def test_of_a_broken_chunk_only_those_before_it_are_kept():
    side = landed()
    side.role.on_transfer(ChunkBad(P, side.header("r", 2, 12, 8), "checksum differs"), 2.0)
    side.role.on_transfer(Drained(RequestId("r"), E), 2.0)
    assert side.engine.num_saved == 12


@pytest.mark.parametrize("tell", [lambda side: side.land("r", 3, 16, 4), lambda side: side.fin("r", 40)])
def test_of_a_peer_that_contradicts_itself_nothing_is_kept(tell):
    side = landed()
    tell(side)
    side.role.on_transfer(Drained(RequestId("r"), E), 2.0)
    assert side.engine.num_saved == 0 and side.role.is_idle()


def test_what_kv_has_lost_is_told_to_the_engine_whatever_was_asked_for_here():
    side = Side()
    live = side.begin("r", 20)
    side.offer("r", 20)
    side.land("r", 0, 0, 4)
    header = msgspec.structs.replace(side.header("r", 1, 4, 4), loss=UNCHECKED)
    side.role.on_transfer(ChunkLanded(P, header, 1.0), 1.0)
    assert side.engine.told("incoming_lost") == [(live.key, 4, UNCHECKED)]
