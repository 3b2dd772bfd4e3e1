"""When decode commits what it has fetched, what it launches before it is computed, and when its thread stays awake.
No sockets, no device.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from contracts.errors import TransferError
from contracts.events import Token
from contracts.handoff import ChunkHeader, Fin, Grant, Offer, PullReady, PullScheduled
from contracts.ids import BlockId, Epoch, RequestId
from kv_transfer.chunks import checksum as integrity
from kv_transfer.data_path import grant as receiving
from kv_transfer.data_path import pull_receiver as pulling
from kv_transfer.data_path.grant import GrantTable
from kv_transfer.data_path.pull_receiver import PullReceiver
from kv_transfer.data_path.pull_sender import HIDING, PullSender
from kv_transfer.data_path.sender import SendQueue
from kv_transfer.links.handoff_rate import HandoffRate
from tests.kv_transfer.kv_pair import LAYOUT

KEY = RequestId("r"), Epoch(1)
FIN = Fin(*KEY, 2, Token(0, 7), 0)


class Waiting:
    """Done when the test says so, or when it is asked for."""

    def __init__(self, into: list[int], mark: int, sums: np.ndarray | None) -> None:
        self.into, self.mark, self.sums = into, mark, sums
        self.is_void = self.is_done = self.is_due = False
        self.is_waited = self.is_dropped = False
        self.busy_s, self.on_wait = 0.0, lambda: None

    def wait(self):
        self.on_wait()
        self.is_waited = self.is_done = True
        return self.sums

    def drop(self):
        assert self.is_done and not self.is_waited, "what was read has given back already what it had"
        self.is_dropped = True


class Remote:
    """A peer's pool of which nothing is known but what was asked for. `marks`: whether it can wait for them."""

    num_pages, detail = 64, "made up"

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []
        self.waiting: list[Waiting] = []
        self.marks = True

    def sums(self, num_pages: int) -> np.ndarray:
        return np.full((num_pages, LAYOUT.only_group.num_planes), 7, np.uint32)

    def pull_later(self, pages, into, checks, early_planes, mark):
        if not self.marks:
            return None
        self.waiting.append(Waiting(list(into), mark, self.sums(len(into)) if checks else None))
        return self.waiting[-1]

    def expire(self) -> None:
        for waiting in self.waiting:
            waiting.is_void = waiting.is_void or not waiting.is_done

    def pull(self, pages, into, checks):
        self.asked.append((list(pages), list(into)))
        return self.sums(len(into)) if checks else None

    def close(self) -> None:
        pass


def header(index: int) -> ChunkHeader:
    return ChunkHeader(*KEY, index, 4 * index, 4, LAYOUT.layout_id, LAYOUT.block_nbytes, 0)


def pull(index: int) -> PullReady:
    return PullReady.of(header(index), [BlockId(10 + index)])


def coming(first_token: int, num_tokens: int, pages: list[int], mark: int = 1) -> PullScheduled:
    return PullScheduled(*KEY, first_token, num_tokens, [BlockId(page) for page in pages], 5, mark)


class Decode:
    """Granted were pages 5 and 9, for the 8 tokens from `skip` on."""

    def __init__(self, checks: bool = False, skip: int = 0) -> None:
        self.landings, self.remote, self.said = GrantTable(LAYOUT, [64]), Remote(), []
        self.landings.offered(Offer(*KEY, skip + 8, LAYOUT.layout_id))
        self.landings.grant(Grant(*KEY, [[BlockId(5), BlockId(9)]], skip))
        note = self.said.append
        self.is_left = False
        bad, facts = (lambda *bad: note(bad)), (LAYOUT, [self.remote], checks, lambda: self.is_left)
        self.puller = PullReceiver(self.landings, *facts, note, note, bad, note)

    @property
    def kinds(self) -> list[str]:
        return [type(said).__name__ for said in self.said]


def test_commit_follows_the_last_of_chunks_and_token_0_whichever_it_is():
    decode = Decode()
    decode.puller.put(pull(0))
    assert decode.landings.finished(FIN) is None
    decode.puller.put(pull(1))
    assert decode.kinds == ["ChunkHeader", "Commit", "ChunkHeader"]
    assert decode.said[1].nbytes == 2 * LAYOUT.block_nbytes and decode.landings.is_committed(KEY)
    assert decode.remote.asked == [([10], [5]), ([11], [9])]
    late = Decode()
    for index in range(2):
        late.puller.put(pull(index))
    commit = late.landings.finished(FIN)
    assert commit is not None and commit.num_chunks == 2
    assert late.landings.finished(FIN) is None, "it is said once"


class Passing:
    """A clock that goes on where something takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(pulling, "time", SimpleNamespace(perf_counter=lambda: self.now_s, monotonic=lambda: 0.0))

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


def test_what_was_copied_when_prefill_had_closed_the_link_does_not_land(monkeypatch: pytest.MonkeyPatch):
    decode = Decode()
    decode.puller.put(pull(0))
    assert decode.kinds == ["ChunkHeader"]
    monkeypatch.setattr(decode.remote, "pull", lambda *_: setattr(decode, "is_left", True))  # while it is copied
    with pytest.raises(TransferError, match="prefill has closed the link"):
        decode.puller.put(pull(1))
    assert decode.kinds == ["ChunkHeader"] and decode.landings.finished(FIN) is None


def test_a_link_was_busy_while_a_chunk_that_was_told_of_was_fetched(monkeypatch):
    clock, decode = Passing(monkeypatch), Decode()
    decode.remote.pull = lambda *_: clock.passes(0.3)  # type: ignore[method-assign]
    decode.puller.put(pull(0))
    assert decode.puller.busy_s == pytest.approx(0.3)


def test_of_an_early_one_the_devices_time_counts_and_not_what_was_waited_for_here(monkeypatch):
    clock, decode = Passing(monkeypatch), Decode(checks=True)
    decode.puller.on_pull_scheduled(coming(0, 4, [10]))
    (early,) = decode.remote.waiting
    early.busy_s, early.on_wait = 0.2, lambda: clock.passes(0.01)
    clock.passes(5.0)  # until it is computed
    decode.puller.put(pull(0))
    assert decode.puller.busy_s == pytest.approx(0.2)


def test_one_that_did_not_wait_to_the_end_counts_as_it_is_fetched_anew(monkeypatch):
    clock, decode = Passing(monkeypatch), Decode()
    decode.puller.on_pull_scheduled(coming(0, 4, [10]))
    (early,) = decode.remote.waiting
    early.is_void, early.busy_s = True, 7.0
    decode.remote.pull = lambda *_: clock.passes(0.3)  # type: ignore[method-assign]
    decode.puller.put(pull(0))
    assert decode.puller.busy_s == pytest.approx(0.3)


def test_fewer_chunks_than_token_0_claims_are_no_commit():
    decode = Decode()
    for index in range(2):
        decode.puller.put(pull(index))
    assert decode.landings.finished(Fin(*KEY, 3, Token(0, 7), 0)) is None


def test_what_ends_while_it_is_fetched_is_drained_and_not_committed():
    decode = Decode()
    decode.landings.finished(Fin(*KEY, 1, Token(0, 7), 0))
    decode.remote.pull = lambda *asked: decode.said.append(decode.landings.end(KEY))  # type: ignore[method-assign]
    decode.puller.put(pull(0))
    assert decode.said == [False, KEY]
    decode.puller.put(pull(1))
    assert decode.puller.num_stale == 1


def test_after_a_launch_that_failed_nothing_is_called_drained():
    """What was launched before may still write to the pages; the link's end takes them back."""

    def fails(*asked):
        raise TransferError("the device is gone")

    told, early = Decode(), Decode()
    told.remote.pull = early.remote.pull_later = fails  # type: ignore[method-assign]
    with pytest.raises(TransferError):
        told.puller.put(pull(0))
    with pytest.raises(TransferError):
        early.puller.on_pull_scheduled(coming(0, 4, [10]))
    for decode in (told, early):
        assert not decode.landings.end(KEY) and decode.puller.tend() == math.inf
        assert decode.said == [] and decode.landings.knows(KEY)


def test_an_attempt_that_ends_while_its_launch_fails_is_not_called_drained():
    decode = Decode()

    def fails(*asked):
        assert not decode.landings.end(KEY)
        raise TransferError("the device is gone")

    decode.remote.pull = fails  # type: ignore[method-assign]
    with pytest.raises(TransferError):
        decode.puller.put(pull(0))
    assert decode.said == [] and decode.landings.knows(KEY)


def test_one_handoff_alone_keeps_the_thread_awake_for_a_while(monkeypatch: pytest.MonkeyPatch):
    decode, now = Decode(), [0.0]
    monkeypatch.setattr(receiving.time, "monotonic", lambda: now[0])
    decode.landings._alone_until = now[0] + receiving.ALONE_S
    assert decode.landings.is_alone
    now[0] = receiving.ALONE_S
    assert not decode.landings.is_alone
    now[0] = 0.0
    decode.landings.end(KEY)
    assert not decode.landings.is_alone


def test_what_has_come_before_it_is_told_of_is_read_once_and_then_only_compared():
    decode, waits = Decode(checks=True), []
    decode.puller.on_pull_scheduled(coming(0, 4, [10]))
    (early,) = decode.remote.waiting
    early.on_wait = lambda: waits.append(early.is_done)
    decode.puller.look_ahead()
    early.is_due = True
    decode.puller.look_ahead()
    assert waits == [], "it is not done"
    early.is_done = True
    decode.puller.look_ahead()
    decode.puller.look_ahead()
    assert waits == [True]
    checksum = integrity.of_pages(KEY[1], Remote().sums(1))
    told = ChunkHeader(*KEY, 0, 0, 4, LAYOUT.layout_id, LAYOUT.block_nbytes, checksum)
    decode.puller.put(PullReady.of(told, [BlockId(10)]))
    assert waits == [True] and decode.kinds == ["ChunkHeader"]


def read_ahead() -> tuple[Decode, Waiting]:
    """A chunk that has come and was read before it is told of."""
    decode = Decode(checks=True)
    decode.puller.on_pull_scheduled(coming(0, 4, [10]))
    (early,) = decode.remote.waiting
    early.is_due = early.is_done = True
    decode.puller.look_ahead()
    return decode, early


def test_what_was_read_ahead_counts_only_if_it_is_what_is_told():
    decode, _ = read_ahead()
    decode.puller.put(PullReady.of(header(0), [BlockId(12)]))
    assert decode.remote.asked == [([12], [5])] and decode.said[0][1] == "checksum differs"


def test_a_told_attempt_is_being_read_until_decode_says_otherwise():
    attempts, said = SendQueue(), []
    announcer = PullSender(attempts, None, said.append, lambda *sent: None)
    announcer.put(pull(0))
    assert not said, "nobody has begun this attempt"
    attempts.begin(KEY)
    announcer.put(pull(0))
    announcer.put(FIN)
    assert [type(message).__name__ for message in said] == ["PullReady", "Fin"]
    assert not announcer.end(KEY), "decode may be reading"
    announcer.put(pull(1))
    assert len(said) == 2
    assert announcer.read(KEY) and not announcer.read(KEY)
    attempts.begin(KEY)
    assert announcer.end(KEY), "decode was told of nothing since"


def test_an_attempt_that_ends_while_a_chunk_is_told_is_timed_no_more():
    """The link's thread hears decode's Abort while the core's says the chunk."""
    attempts, rate = SendQueue(), HandoffRate()

    def said_behind_the_end(message: PullScheduled | PullReady | Fin) -> None:
        announcer.end(KEY)
        rate.dropped(KEY)

    announcer = PullSender(attempts, None, said_behind_the_end, rate.reported)
    attempts.begin(KEY)
    rate.begin(KEY)
    announcer.put(pull(0))
    assert not rate._open


def test_a_chunk_that_was_coming_is_not_fetched_again():
    decode = Decode()
    decode.landings.finished(FIN)
    decode.puller.on_pull_scheduled(coming(0, 4, [10], mark=3))
    decode.puller.on_pull_scheduled(coming(4, 4, [11], mark=4))
    assert [(waiting.into, waiting.mark) for waiting in decode.remote.waiting] == [([5], 3), ([9], 4)]
    for index in range(2):
        decode.puller.put(pull(index))
    assert decode.kinds == ["ChunkHeader", "Commit", "ChunkHeader"] and decode.remote.asked == []
    assert decode.puller.tend() == math.inf


def test_of_a_chunk_that_is_coming_only_what_was_granted_is_fetched():
    decode = Decode(skip=4)
    decode.puller.on_pull_scheduled(coming(0, 4, [1], mark=1))
    decode.puller.on_pull_scheduled(coming(0, 12, [1, 10, 11], mark=1))
    assert [waiting.into for waiting in decode.remote.waiting] == [[5, 9]]


@pytest.mark.parametrize(
    "wrong",
    [coming(2, 4, [10]), coming(0, 4, [10, 11]), coming(0, 4, [64]), coming(8, 4, [10]), coming(0, 6, [10, 11])],
)
def test_what_can_not_come_is_no_fault(wrong: PullScheduled):
    decode = Decode()
    decode.puller.on_pull_scheduled(wrong)
    assert decode.remote.waiting == [] and decode.said == [] and decode.puller.num_bad == 0


def test_where_nothing_can_wait_chunks_are_fetched_when_they_are_told():
    decode = Decode()
    decode.remote.marks = False
    decode.puller.on_pull_scheduled(coming(0, 4, [10]))
    decode.puller.put(pull(0))
    assert decode.remote.asked == [([10], [5])] and decode.landings.end(KEY)


def test_the_checksum_of_what_came_early_counts():
    good, bad = (
        PullReady.of(ChunkHeader(*KEY, 0, 0, 4, LAYOUT.layout_id, LAYOUT.block_nbytes, checksum), [BlockId(10)])
        for checksum in (integrity.of_pages(KEY[1], Remote().sums(1)), 1)
    )
    decode = Decode(checks=True)
    decode.puller.on_pull_scheduled(coming(0, 4, [10]))
    decode.puller.put(bad)
    assert decode.said[0][1] == "checksum differs"
    decode.puller.put(good)
    assert decode.kinds[1:] == ["ChunkHeader"] and decode.remote.asked == [([10], [5])]


def test_what_came_too_early_is_fetched_again():
    decode = Decode()
    decode.puller.on_pull_scheduled(coming(0, 4, [10]))
    decode.remote.expire()
    decode.puller.put(pull(0))
    assert decode.remote.asked == [([10], [5])] and decode.kinds == ["ChunkHeader"]


def test_what_was_said_otherwise_is_waited_for_and_fetched_as_it_was_told():
    decode = Decode()
    decode.puller.on_pull_scheduled(coming(0, 8, [10, 11]))
    decode.puller.put(pull(0))
    assert decode.remote.waiting[0].is_done and decode.remote.waiting[0].is_void
    assert decode.remote.asked == [([10], [5])]


def test_no_commit_while_anything_may_write():
    """One chunk is announced for longer than it is told of."""
    decode = Decode()
    decode.landings.enter(KEY)
    for index in range(2):
        decode.puller.put(pull(index))
    assert decode.landings.finished(FIN) is None
    decode.landings.leave(KEY)
    assert decode.landings.finished(FIN) is not None


def test_an_attempt_that_ends_is_drained_when_nothing_waits_for_its_mark():
    decode = Decode()
    decode.puller.on_pull_scheduled(coming(0, 4, [10], mark=1))
    decode.puller.on_pull_scheduled(coming(4, 4, [11], mark=2))
    assert not decode.landings.end(KEY) and decode.landings.knows(KEY)
    first, second = decode.remote.waiting
    first.is_done = True
    assert decode.puller.tend() == pulling.DRAINING_S and decode.said == []
    second.is_done = True
    decode.puller.tend()
    assert decode.said == [KEY] and not decode.landings.knows(KEY)
    assert first.is_dropped and second.is_dropped
    assert decode.puller.tend() == math.inf


def test_what_was_read_ahead_of_an_attempt_that_ends_is_only_forgotten():
    decode, early = read_ahead()
    assert not decode.landings.end(KEY)
    decode.puller.tend()
    assert decode.said == [KEY] and not early.is_dropped


def test_what_ends_while_it_is_fetched_and_another_chunk_is_coming_does_not_land():
    decode = Decode()
    decode.puller.on_pull_scheduled(coming(4, 4, [11]))
    decode.remote.pull = lambda *asked: decode.landings.end(KEY)  # type: ignore[method-assign]
    decode.puller.put(pull(0))
    assert decode.said == [] and decode.puller.num_chunks == 0


def test_a_chunk_that_is_coming_twice_is_launched_once():
    decode = Decode()
    decode.puller.on_pull_scheduled(coming(0, 4, [10]))
    decode.puller.on_pull_scheduled(coming(0, 8, [10, 11]))
    assert [waiting.into for waiting in decode.remote.waiting] == [[5]]


def test_no_more_than_so_many_wait_for_their_marks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pulling, "MAX_EARLY", 1)
    decode = Decode()
    for index in range(2):
        decode.puller.on_pull_scheduled(coming(4 * index, 4, [10 + index]))
    assert len(decode.remote.waiting) == 1


def test_what_is_done_and_not_told_of_hurries_nobody(monkeypatch: pytest.MonkeyPatch):
    decode, now = Decode(), [0.0]
    monkeypatch.setattr(pulling.time, "monotonic", lambda: now[0])
    decode.puller.on_pull_scheduled(coming(0, 4, [10]))
    decode.remote.waiting[0].is_done = True
    now[0] = pulling.LATE_S * 1.1
    decode.puller.on_pull_scheduled(coming(4, 4, [11]))
    decode.puller.tend()
    assert not decode.remote.waiting[1].is_void


def test_what_waits_too_long_waits_no_more(monkeypatch: pytest.MonkeyPatch):
    decode, now = Decode(), [0.0]
    monkeypatch.setattr(pulling.time, "monotonic", lambda: now[0])
    decode.puller.on_pull_scheduled(coming(0, 4, [10]))
    assert decode.puller.tend() == pulling.WATCHING_S
    now[0] = pulling.LATE_S / 2
    decode.puller.tend()
    assert not decode.remote.waiting[0].is_void
    now[0] = pulling.LATE_S * 1.1
    decode.puller.tend()
    assert decode.remote.waiting[0].is_void


class Counter:
    def __init__(self) -> None:
        self.shared, self.values = b"", []

    def set(self, value: int) -> None:
        self.values.append(value)


def test_what_is_coming_is_said_once_the_pages_are_granted_and_marked_once_it_is_launched():
    attempts, said, mark = SendQueue(), [], Counter()
    announcer = PullSender(attempts, mark, said.append, lambda *sent: None)
    announcer.chunk_scheduled(KEY, 0, 4, [BlockId(10)], 5)
    announcer.chunks_launched(is_all=True)
    assert said == [] and mark.values == [], "nobody has begun this attempt"
    attempts.begin(KEY)
    announcer.chunk_scheduled(KEY, 0, 4, [BlockId(10)], 5)
    assert said == []
    announcer.granted(KEY)
    assert said == [coming(0, 4, [10], mark=2)] and mark.values == []
    announcer.chunks_launched(is_all=False)
    announcer.chunks_launched(is_all=True)
    announcer.chunks_launched(is_all=True)
    announcer.chunk_scheduled(KEY, 4, 4, [BlockId(11)], 5)
    assert said[1:] == [coming(4, 4, [11], mark=4)]
    announcer.chunks_launched(is_all=True)
    assert mark.values == [1, 2, 4]
    assert not announcer.end(KEY), "decode may be reading"
    announcer.chunk_scheduled(KEY, 4, 4, [BlockId(11)], 5)
    assert len(said) == 2


def test_what_is_coming_is_forgotten_with_its_attempt():
    attempts, said = SendQueue(), []
    announcer = PullSender(attempts, Counter(), said.append, lambda *sent: None)
    attempts.begin(KEY)
    announcer.chunk_scheduled(KEY, 0, 4, [BlockId(10)], 5)
    assert announcer.end(KEY), "decode was told of nothing"
    announcer.granted(KEY)
    assert said == [] and not announcer._granted


def long_pull(first: int, num_tokens: int) -> PullReady:
    return PullReady(
        *KEY, first // 4, first, num_tokens, LAYOUT.layout_id, num_tokens // 4 * LAYOUT.block_nbytes, 0, pages=[]
    )


def told_behind(num_tokens: int, chunk: int, marks: bool = True) -> list[tuple[int, int]]:
    """Return after which token decode is told of the tokens up to which.

    The prompt is computed in chunks of `chunk` tokens.
    """
    attempts, said, told = SendQueue(), [], []
    announcer = PullSender(attempts, Counter() if marks else None, said.append, lambda *sent: None)
    attempts.begin(KEY)
    announcer.begin(KEY, num_tokens)
    announcer.granted(KEY)
    for first in range(0, num_tokens, chunk):
        size = min(chunk, num_tokens - first)
        announcer.chunk_scheduled(KEY, first, size, [], 5)
        announcer.chunks_launched(is_all=True)
        announcer.put(long_pull(first, size))
        pulls = [message for message in said if isinstance(message, PullReady)]
        comings = [message for message in said if isinstance(message, PullScheduled)]
        if pulls:
            told.append((first + size, pulls[-1].first_token + pulls[-1].num_tokens))
            assert [message.first_token for message in pulls] == sorted(message.first_token for message in pulls)
        assert [message.first_token for message in comings] == ([first] if pulls and marks else [])
        said.clear()
    return told


def test_a_long_prompt_is_told_of_in_bursts_and_its_last_chunk_by_itself():
    assert told_behind(8192, 1024) == [(7168, 7168), (8192, 8192)]
    assert told_behind(8192, 2048) == [(6144, 6144), (8192, 8192)]
    assert told_behind(1024, 1024) == [(1024, 1024)] == told_behind(1024, 1024, marks=False)
    assert told_behind(8192, 1024, marks=False) == [(7168, 7168), (8192, 8192)]


@pytest.mark.parametrize(("num_tokens", "chunk"), [(131072, 2048), (131072, 128), (8200, 1024), (30000, 960), (68, 64)])
def test_what_is_left_to_be_computed_behind_a_burst_hides_its_copies(num_tokens: int, chunk: int):
    told, before = told_behind(num_tokens, chunk), 0
    assert told[-1] == (num_tokens, num_tokens)
    for computed, up_to in told:
        assert computed == up_to
        left, copied = num_tokens - computed, up_to - before
        assert copied <= max(HIDING * left, chunk), "a burst as long as what is left may take to hide it"
        waits = left > 0 and copied + chunk <= HIDING * (left - chunk)
        assert not waits, "with the next chunk it would still be hidden"
        before = up_to


def test_what_waits_for_its_burst_goes_with_token_0_and_ends_with_its_attempt():
    attempts, said = SendQueue(), []
    announcer = PullSender(attempts, None, said.append, lambda *sent: None)
    attempts.begin(KEY)
    announcer.begin(KEY, 400)
    announcer.put(long_pull(0, 4))
    assert said == [] and announcer.num_chunks == 0
    announcer.put(FIN)
    assert [type(message).__name__ for message in said] == ["PullReady", "Fin"] and announcer.num_chunks == 1
    assert not announcer.end(KEY), "decode may be reading"
    attempts.begin(KEY)
    announcer.read(KEY)
    announcer.begin(KEY, 400)
    announcer.put(long_pull(0, 4))
    assert announcer.end(KEY), "decode was told of nothing"
    announcer.put(FIN)
    assert len(said) == 2
