"""Nothing reaches a page unless every fact in its header is as granted."""

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import PeerLost
from contracts.events import Token
from contracts.handoff import ChunkHeader, Commit, Fin, Grant, Offer
from contracts.ids import BlockId, Epoch, RequestId
from kv_transfer.chunks import checksum as integrity
from kv_transfer.chunks import chunk_plan as plan
from kv_transfer.chunks.page_pool import PagePool
from kv_transfer.chunks.wire_format import KVSegment, read_meta, write_meta
from kv_transfer.data_path.grant import GrantedPages, GrantTable
from kv_transfer.data_path.receiver import Receiver
from kv_transfer.data_path.sender import ChunkJob, FinJob, Sender, SendQueue
from kv_transfer.data_path.staging import HostStaging
from kv_transfer.transports.base import Ring, Slot, Take, Taking
from tests.kv_transfer.kv_pair import LAYOUT

NUM_BLOCKS = 32
OFFER = Offer(RequestId("r"), Epoch(2), 30, LAYOUT.layout_id)
GRANT = Grant(OFFER.request_id, OFFER.epoch, [[4, 9, 1, 30, 31, 5, 6]], 4)  # type: ignore[list-item]
RING = Ring(2, 3 * LAYOUT.only_group.page_nbytes(1), 1.0)


def _header(**changes: object) -> ChunkHeader:
    header = ChunkHeader(OFFER.request_id, OFFER.epoch, 0, 4, 12, LAYOUT.layout_id, 3 * LAYOUT.block_nbytes, 0)
    return msgspec.structs.replace(header, **changes)


def _landing() -> GrantedPages:
    return GrantedPages(OFFER, GRANT, LAYOUT, [NUM_BLOCKS])


def test_a_chunk_as_granted_may_land_on_its_pages() -> None:
    assert _landing().check(_header()) is None
    assert _landing().pages(_header()) == [4, 9, 1]
    last = _header(index=1, first_token=28, num_tokens=2, nbytes=LAYOUT.block_nbytes)
    assert _landing().check(last) is None
    assert _landing().pages(last) == [6]


WRONG = [
    {"layout_id": "another"},
    {"first_token": 0},
    {"first_token": 5},
    {"first_token": 24},
    {"num_tokens": 0},
    {"num_tokens": -4},
    {"num_tokens": 11},
    {"nbytes": 1},
]


@pytest.mark.parametrize("changes", WRONG)
def test_a_header_that_differs_is_told_why(changes: dict) -> None:
    assert _landing().check(_header(**changes))


def test_a_chunk_lands_once_under_any_index() -> None:
    landing = _landing()
    landing.chunk_received(_header())
    assert landing.check(_header())
    assert landing.check(_header(index=7))
    assert landing.check(_header(index=7, first_token=16)) is None
    assert landing.check(_header(first_token=16)), "the index counts once, too"


@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(0, 5))
def test_no_header_ever_reaches_a_page_that_was_not_granted(first: int, num_tokens: int, index: int) -> None:
    landing = _landing()
    nbytes = plan.chunk_nbytes(LAYOUT, num_tokens)
    header = _header(first_token=first, num_tokens=num_tokens, index=index, nbytes=nbytes)
    if landing.check(header) is None:
        pages = landing.pages(header)
        assert len(pages) == LAYOUT.num_blocks(num_tokens)
        assert pages == GRANT.pages[0][first // 4 - 1 :][: len(pages)]


@pytest.mark.parametrize(
    ("pages", "skip"),
    [([1, 2], 4), ([*range(6), 32], 4), ([1] * 7, 4), (list(range(7)), 3), ([], 32), ([*range(7)], -4)],
)
def test_a_grant_that_does_not_fit_is_refused(pages: list[int], skip: int) -> None:
    with pytest.raises(ValueError):
        GrantedPages(OFFER, Grant(OFFER.request_id, OFFER.epoch, [pages], skip), LAYOUT, [NUM_BLOCKS])  # type: ignore[arg-type]


def test_a_page_lands_for_one_attempt_at_a_time() -> None:
    landings = GrantTable(LAYOUT, [NUM_BLOCKS])
    landings.offered(OFFER)
    landings.offered(Offer(RequestId("s"), Epoch(1), 4, LAYOUT.layout_id))
    assert landings.grant(GRANT)
    with pytest.raises(ValueError, match="another attempt"):
        landings.grant(Grant(RequestId("s"), Epoch(1), [[30]], 0))  # type: ignore[list-item]
    assert landings.end((OFFER.request_id, OFFER.epoch))
    assert landings.grant(Grant(RequestId("s"), Epoch(1), [[30]], 0))  # type: ignore[list-item]


def test_a_second_offer_of_an_attempt_changes_nothing() -> None:
    """A grant that fits the first would not fit the second: a ValueError in the loop of decode's core."""
    landings = GrantTable(LAYOUT, [NUM_BLOCKS])
    landings.offered(OFFER)
    landings.offered(msgspec.structs.replace(OFFER, num_tokens=8))
    assert landings.grant(GRANT)


class Script:
    """An inbound channel that plays messages, then breaks. `num_late`: so many are still being taken out."""

    detail = "script"

    def __init__(
        self, messages: list[tuple[KVSegment, np.ndarray]], before: Callable[[int], None], num_late: int = 0
    ) -> None:
        self._messages, self._before, self._next, self._num_late = messages, before, 0, num_late
        self._takings: list[Taking] = []

    def receive(self, take: Take) -> None:
        if self._next == len(self._messages):
            self._before(self._next)
            self._finish(0)
            raise PeerLost("the end")
        self._before(self._next)
        piece, data = self._messages[self._next]
        self._next += 1
        slot = Slot(0, np.zeros(RING.stride, dtype=np.uint8))
        write_meta(piece, slot.meta)
        slot.payload[: len(data)] = data
        if taking := take(slot):
            self._takings.append(taking)
        self._finish(self._num_late)

    def _finish(self, num_late: int) -> None:
        while len(self._takings) > num_late:
            self._takings.pop(0).finish()

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class LateStaging(HostStaging):
    """Unpacks when somebody waits for it, as a device does that takes its time."""

    def unpack(self, payload: np.ndarray, units: np.ndarray) -> "LateStaging.Late":
        return LateStaging.Late(partial(super().unpack, payload.copy(), units))

    class Late:
        is_done = False

        def __init__(self, unpack: Callable[[], None]) -> None:
            self.wait = unpack


class Stage:
    """A receiver with one grant, what it says, and what its pool holds."""

    def __init__(self, num_late: int = 0) -> None:
        self.staging, self.num_late = (LateStaging if num_late else HostStaging), num_late
        shape = (LAYOUT.only_group.num_planes, NUM_BLOCKS, LAYOUT.only_group.page_nbytes(1))
        self.pool = np.zeros(shape, dtype=np.uint8)
        self.landings = GrantTable(LAYOUT, [NUM_BLOCKS])
        self.landings.offered(OFFER)
        self.landings.grant(GRANT)
        self.committed: list[Commit] = []
        self.landed: list[ChunkHeader] = []
        self.bad: list[str] = []
        self.drained: list = []

    def play(
        self,
        messages: list[tuple[KVSegment, np.ndarray]],
        before: Callable[[int], None] = lambda i: None,
        checks: bool = True,
    ) -> Receiver:
        receiver = Receiver(
            self.landings,
            [self.staging(PagePool(self.pool, LAYOUT), RING.slot_nbytes, checks)],
            Script(messages, before, self.num_late),
            self.committed.append,
            self.landed.append,
            lambda header, reason: self.bad.append(reason),
            self.drained.append,
        )
        with pytest.raises(PeerLost):
            receiver.run()
        return receiver

    @property
    def written(self) -> list[int]:
        return np.flatnonzero(self.pool.any(axis=(0, 2))).tolist()


def _messages(
    header: ChunkHeader, value: int = 7, slot_nbytes: int = RING.slot_nbytes
) -> list[tuple[KVSegment, np.ndarray]]:
    """The chunk as an honest sender cuts it, every byte the same."""
    data = np.full(header.nbytes, value, dtype=np.uint8)
    checksum, messages = integrity.seed(header.epoch), []
    for offset in range(0, header.nbytes, slot_nbytes):
        part = data[offset : offset + slot_nbytes]
        checksum = integrity.extend(checksum, part)
        said = msgspec.structs.replace(header, checksum=checksum)
        messages.append((KVSegment(said, offset, len(part)), part))
    return messages


def test_an_honest_chunk_lands_on_the_granted_pages_only() -> None:
    stage = Stage()
    receiver = stage.play(_messages(_header()))
    assert (len(stage.landed), stage.bad, stage.written) == (1, [], [1, 4, 9])
    assert (receiver.num_chunks, receiver.nbytes) == (1, 3 * LAYOUT.block_nbytes)
    assert (stage.pool[:, [1, 4, 9]] == 7).all()
    assert stage.committed == [], "token 0 has not come"


@pytest.mark.parametrize("again", [{}, {"index": 1}, {"index": 1, "num_tokens": 4, "nbytes": LAYOUT.block_nbytes}])
def test_nothing_is_written_where_a_device_still_unpacks_a_chunk(again: dict) -> None:
    """The last is of the chunk's first page alone, and what is missing is of others."""
    stage, first = Stage(num_late=1), _messages(_header(), slot_nbytes=2 * LAYOUT.only_group.page_nbytes(1))
    stage.play([*first, *_messages(_header(**again), 8)])
    assert (len(stage.landed), stage.bad) == (1, ["pages of it are being written"])
    assert (stage.pool[:, [1, 4, 9]] == 7).all()


def test_what_a_device_unpacks_of_an_ended_attempt_is_drained_once_and_not_told() -> None:
    stage, key, is_drained = Stage(num_late=99), (OFFER.request_id, OFFER.epoch), []
    messages = [*_messages(_header()), *_messages(_header(index=1, first_token=16))]
    stage.play(messages, before=lambda i: is_drained.append(stage.landings.end(key)) if i == len(messages) else None)
    assert is_drained == [False] and stage.drained == [key]
    assert not stage.landed and not stage.bad and not stage.committed


def test_commit_is_said_of_what_is_whole_and_right_as_soon_as_token_0_is_here() -> None:
    fin = Fin(OFFER.request_id, OFFER.epoch, 1, Token(0, 7), 4)
    all_of_it = _header(num_tokens=26, nbytes=7 * LAYOUT.block_nbytes)
    before, behind, broken = Stage(), Stage(), Stage()
    assert before.landings.finished(fin) is None
    before.play(_messages(all_of_it))
    (commit,) = before.committed
    assert (commit.num_chunks, commit.nbytes) == (1, 7 * LAYOUT.block_nbytes)
    behind.play(_messages(all_of_it))
    assert behind.landings.finished(fin) == commit and behind.committed == []
    messages = _messages(all_of_it)
    messages[-1][1][0] ^= 1
    broken.landings.finished(fin)
    broken.play(messages)
    assert broken.committed == [] and len(broken.bad) == 1
    short = Stage()
    short.landings.finished(fin)
    short.play(_messages(_header()))
    assert short.committed == [] and len(short.landed) == 1, "as many chunks as are claimed, and four pages are missing"


@pytest.mark.parametrize("changes", [*WRONG[:6], {"nbytes": LAYOUT.block_nbytes}])
def test_a_chunk_with_a_wrong_header_touches_no_page(changes: dict) -> None:
    stage = Stage()
    header = _header(**changes)
    stage.play(_messages(header))
    assert (stage.landed, len(stage.bad), stage.written) == ([], 1, [])


@pytest.mark.parametrize("changes", [{"epoch": 1}, {"epoch": 3}, {"request_id": "unknown"}])
def test_a_stale_or_unknown_attempt_is_thrown_away_and_counted(changes: dict) -> None:
    stage = Stage()
    receiver = stage.play(_messages(_header(**changes)))
    assert (stage.landed, stage.bad, stage.written, receiver.num_stale) == ([], [], [], 1)


@given(st.integers(0, 3 * LAYOUT.block_nbytes - 1))
def test_a_changed_byte_is_found_before_its_message_is_written(at: int) -> None:
    stage, messages = Stage(), _messages(_header())
    index, offset = divmod(at, RING.slot_nbytes)
    messages[index][1][offset] ^= 1
    stage.play(messages)
    assert stage.landed == [] and len(stage.bad) == 1
    assert not (stage.pool == 6).any()


def test_a_chunk_that_stops_early_is_bad_when_the_next_begins() -> None:
    stage = Stage()
    after = _header(index=1, first_token=16, num_tokens=12)
    stage.play([*_messages(_header())[:-1], *_messages(after)])
    assert len(stage.bad) == 1 and "only" in stage.bad[0]
    assert [header.index for header in stage.landed] == [1]


def test_a_chunk_without_its_first_bytes_is_bad() -> None:
    stage = Stage()
    stage.play(_messages(_header())[1:])
    assert (stage.landed, stage.written) == ([], []) and "missing" in stage.bad[0]


@pytest.mark.parametrize("sizes", [[6], [3, 2, 2], [0], [-1], [3, -1]], ids=["slot", "chunk", "none", "less", "back"])
def test_a_message_of_another_size_than_it_can_have_is_bad(sizes: list[int]) -> None:
    """In pages, of a block of six and slots of three; its checksum is right, for who looks at nothing else."""
    stage, header, messages, offset = Stage(), _header(num_tokens=4, nbytes=LAYOUT.block_nbytes), [], 0
    payload, checksum = np.full(RING.slot_nbytes, 7, dtype=np.uint8), integrity.seed(header.epoch)
    for nbytes in (size * LAYOUT.only_group.page_nbytes(1) for size in sizes):
        checksum = integrity.extend(checksum, payload[:nbytes])
        messages.append((KVSegment(msgspec.structs.replace(header, checksum=checksum), offset, nbytes), payload))
        offset += nbytes
    stage.play(messages)
    (reason,) = stage.bad
    assert stage.landed == [] and ("a message of" in reason or "more bytes" in reason)


@pytest.mark.parametrize("changes", [{"index": 1}, {"epoch": 3}])
def test_what_goes_on_as_another_chunk_is_not_the_rest_of_this_one(changes: dict) -> None:
    stage, (first, *rest) = Stage(), _messages(_header())
    others = [
        (msgspec.structs.replace(piece, header=msgspec.structs.replace(piece.header, **changes)), data)
        for piece, data in rest
    ]
    stage.play([first, *others])
    assert stage.landed == [] and "only" in stage.bad[0]


def test_a_chunk_with_a_hole_is_bad_without_its_checksum_too() -> None:
    stage, messages = Stage(), _messages(_header())
    stage.play([messages[0], *messages[2:]], checks=False)
    assert stage.landed == [] and "only" in stage.bad[0]


def test_a_bad_chunk_may_come_again_and_a_good_one_may_not() -> None:
    stage, broken = Stage(), _messages(_header())
    broken[0][1][5] ^= 1
    stage.play([*broken, *_messages(_header()), *_messages(_header())])
    assert len(stage.landed) == 1 and len(stage.bad) == 2


def test_an_attempt_that_ends_on_the_way_is_written_no_further() -> None:
    stage, key = Stage(), (OFFER.request_id, OFFER.epoch)
    seen = []

    def end(index: int) -> None:
        if index == 1:
            seen.append((stage.landings.end(key), stage.pool.copy()))

    stage.play(_messages(_header()), end)
    drained, at_the_end = seen[0]
    assert drained and (stage.pool == at_the_end).all()
    assert (stage.landed, stage.bad, stage.drained) == ([], [], [])


def test_a_name_that_is_used_again_owes_nothing_to_who_had_it() -> None:
    """And nothing of an attempt is kept for ever: neither a Fin that came behind its end, nor that it was drained."""
    landings, key = GrantTable(LAYOUT, [NUM_BLOCKS]), (OFFER.request_id, OFFER.epoch)
    fin, all_of_it = Fin(*key, 1, Token(0, 7), 4), _header(num_tokens=26, nbytes=7 * LAYOUT.block_nbytes)
    for said in (fin, None):
        landings.offered(OFFER)
        landings.grant(GRANT)
        assert landings.enter(key)
        if said is not None:
            landings.finished(said)
            assert not landings.end(key), "it is being written"
            assert landings.leave(key), "it is drained now"
            landings.finished(said)
    assert not landings.leave(key)
    assert landings.chunk_received(all_of_it) is None and not landings.is_committed(key), "token 0 has not come"
    assert landings.finished(fin) is not None
    landings.end(key)
    assert not landings.is_committed(key), "or the next one's Commit would be taken for said"
    assert landings.chunk_received(all_of_it) is None, "it may end between its last write and the word of it"


class Tape:
    """An outbound channel that keeps what is sent. The first message is the last one that its attempt lives to see."""

    detail = "tape"

    def __init__(self, queue: SendQueue) -> None:
        self._queue, self.messages = queue, []

    def acquire(self) -> Slot:
        return Slot(0, np.zeros(RING.stride, dtype=np.uint8))

    def send(self, slot: Slot, nbytes: int) -> None:
        piece = read_meta(slot.meta)
        self.messages.append((piece, slot.payload[:nbytes]))
        if len(self.messages) == 1:
            assert not self._queue.end((piece.header.request_id, piece.header.epoch)), "it is being read"

    def flush(self) -> None:
        if self.messages:
            self._queue.stop()

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


def test_a_chunk_that_its_sender_gave_up_is_not_bad() -> None:
    """The word that its attempt is over was sent before, on another connection, and may be heard later."""
    stage, queue, drained = Stage(), SendQueue(), []
    following = msgspec.structs.replace(OFFER, request_id=RequestId("next"))
    stage.landings.offered(following)
    stage.landings.grant(Grant(following.request_id, following.epoch, [[20, 21, 22, 23, 24, 25, 26]], 4))  # type: ignore[list-item]
    for header in (_header(), _header(index=1, first_token=16), _header(request_id=following.request_id)):
        queue.begin((header.request_id, header.epoch))
        queue.put(ChunkJob(header, [BlockId(2), BlockId(7), BlockId(8)]))
    tape, staging = Tape(queue), HostStaging(PagePool(stage.pool.copy(), LAYOUT), RING.slot_nbytes, True)
    Sender(queue, [staging], tape, lambda fin: None, lambda *sent: None, drained.append).run()
    assert [piece.header.request_id for piece, _ in tape.messages][:2] == ["r", "next"]
    assert [piece.is_after_cut for piece, _ in tape.messages] == [False, True, *[False] * (len(tape.messages) - 2)]
    assert drained == [(OFFER.request_id, OFFER.epoch)]
    stage.play(tape.messages)
    assert stage.bad == [] and [header.request_id for header in stage.landed] == ["next"]


def test_what_is_sent_goes_with_its_attempt_and_nothing_comes_behind() -> None:
    queue, key = SendQueue(), (OFFER.request_id, OFFER.epoch)
    fin = FinJob(Fin(*key, 1, Token(0, 7), 4))
    queue.begin(key)
    queue.put(fin)
    assert queue.end(key), "nothing is read for it"
    queue.put(fin)
    assert queue.is_empty
