"""When decode commits what it has fetched, and when its thread stays awake. No sockets, no device."""

import pytest

from contracts.events import Token
from contracts.handoff import ChunkHeader, Fin, Grant, Offer, Pull
from contracts.ids import BlockId, Epoch, RequestId
from kv_transfer import receiving
from kv_transfer.pulling import Announcer, Puller
from kv_transfer.receiving import Landings
from kv_transfer.sending import SendQueue
from tests.kv_transfer.kv_pair import LAYOUT

KEY = RequestId("r"), Epoch(1)
FIN = Fin(*KEY, 2, Token(0, 7), 0)


class Remote:
    """A peer's pool of which nothing is known but what was asked for."""

    num_pages, detail = 64, "made up"

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []
        self.num_rehearsals = 0

    def pull(self, pages, into, checks):
        self.asked.append((list(pages), list(into)))

    def rehearse(self) -> None:
        self.num_rehearsals += 1

    def close(self) -> None:
        pass


def header(index: int) -> ChunkHeader:
    return ChunkHeader(*KEY, index, 4 * index, 4, LAYOUT.layout_id, LAYOUT.block_nbytes, 0)


def pull(index: int) -> Pull:
    return Pull.of(header(index), [BlockId(10 + index)])


class Decode:
    def __init__(self) -> None:
        self.landings, self.remote, self.said = Landings(LAYOUT, 64), Remote(), []
        self.landings.offered(Offer(*KEY, 8, LAYOUT.layout_id))
        self.landings.grant(Grant(*KEY, [BlockId(5), BlockId(9)], 0))
        note = self.said.append
        self.puller = Puller(self.landings, LAYOUT, self.remote, False, note, note, lambda *bad: note(bad), note)

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


def test_rehearsals_come_now_and_then_and_not_after_a_pull():
    decode = Decode()
    decode.puller.stay_awake()
    decode.puller.stay_awake()
    assert decode.remote.num_rehearsals == 1
    decode.puller._next_rehearsal_s = 0.0
    decode.puller.put(pull(0))
    decode.puller.stay_awake()
    assert decode.remote.num_rehearsals == 1


def test_a_told_attempt_is_being_read_until_decode_says_otherwise():
    attempts, said = SendQueue(), []
    announcer = Announcer(attempts, said.append, lambda *sent: None)
    announcer.put(pull(0))
    assert not said, "nobody has begun this attempt"
    attempts.begin(KEY)
    announcer.put(pull(0))
    announcer.put(FIN)
    assert [type(message).__name__ for message in said] == ["Pull", "Fin"]
    assert not announcer.end(KEY), "decode may be reading"
    announcer.put(pull(1))
    assert len(said) == 2
    assert announcer.read(KEY) and not announcer.read(KEY)
    attempts.begin(KEY)
    assert announcer.end(KEY), "decode was told of nothing since"
