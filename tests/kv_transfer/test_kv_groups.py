"""Two groups of layers, with pages of other sizes and blocks of other lengths, are handed over by each transport."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from contracts.handoff import Commit, Fin, Grant, Offer, PullReady
from contracts.ids import BlockId, Epoch, RequestId
from contracts.layout import KVGroup, KVLayout
from kv_transfer.chunks.checksum import of_pages, seed
from kv_transfer.data_path.grant import GrantedPages
from kv_transfer.data_path.staging import HostStaging
from kv_transfer.events import ChunkBad, ChunkLanded, PeerDisconnected
from tests.kv_transfer.conftest import STAGED
from tests.kv_transfer.kv_pair import LAYOUT, Peer, fin, offer_and_grant
from tests.kv_transfer.kv_pair import send as send_first_group
from tests.kv_transfer.kv_worker import SECRET

Make = Callable[..., Peer]

DRAFT = KVGroup(kind="draft", layers=(3,), num_kv_heads=2, head_dim=16, block_size=2, dtype="bfloat16")
TWO = msgspec.structs.replace(LAYOUT, groups=(*LAYOUT.groups, DRAFT))
HEAD = msgspec.structs.replace(DRAFT, weights="a head", block_size=LAYOUT.block_size, head_dim=12)
ROW = msgspec.structs.replace(HEAD, kind="draft_row", planes=("row",), num_kv_heads=1)
WITH_HEAD = msgspec.structs.replace(LAYOUT, groups=(*LAYOUT.groups, HEAD, ROW))
OTHER_HEAD = msgspec.structs.replace(
    LAYOUT, groups=(*LAYOUT.groups, *(msgspec.structs.replace(group, weights="another") for group in (HEAD, ROW)))
)
KEY = RequestId("r"), Epoch(1)
NUM_TOKENS = 15
FROM = [[3, 40, 5, 9], [8, 2, 51, 60, 30, 31, 12, 13]]
INTO = [[5, 9, 1, 62], [3, 20, 21, 22, 63, 0, 7, 6]]
CHUNKS = [(0, 0, 8), (1, 0, 8), (1, 8, 7), (0, 8, 7)]
"""Group, first token and number of tokens of each chunk: neither group has to come first."""


@pytest.fixture
def pair(make_peer: Make, transport: str) -> tuple[Peer, Peer]:
    return make_peer("prefill", layout=TWO, transport=transport), make_peer("decode", layout=TWO, transport=transport)


def blocks(pages: list[int]) -> list[BlockId]:
    return [BlockId(page) for page in pages]


def grant(prefill: Peer, decode: Peer) -> None:
    prefill.node.offer(decode.ref, Offer(*KEY, NUM_TOKENS, TWO.layout_id))
    decode.message(Offer, "r")
    decode.node.grant(prefill.name, Grant(*KEY, [blocks(pages) for pages in INTO], 0))
    prefill.message(Grant, "r")


def send(prefill: Peer, decode: Peer, index: int) -> None:
    group, first, num_tokens = CHUNKS[index]
    size = TWO.groups[group].block_size
    pages = blocks(FROM[group][first // size : -(-(first + num_tokens) // size)])
    sums = prefill.checksums(pages, group)
    prefill.node.send_chunk(decode.name, *KEY, index, first, num_tokens, pages, sums, group)


def test_the_pages_of_both_groups_arrive_where_they_were_granted_and_nowhere_else(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    before = [decode.pool_of(group).copy() for group in range(2)]
    grant(prefill, decode)
    for index in range(len(CHUNKS)):
        send(prefill, decode, index)
    prefill.node.finish(decode.name, fin("r", len(CHUNKS)))
    landed = [decode.wait(ChunkLanded).header for _ in CHUNKS]
    assert [(header.group, header.first_token, header.num_tokens) for header in landed] == CHUNKS
    assert decode.message(Fin, "r").num_chunks == 4
    nbytes = sum(header.nbytes for header in landed)
    assert nbytes == 4 * TWO.block_nbytes
    decode.node.commit(prefill.name, Commit(*KEY, 4, nbytes))
    assert prefill.message(Commit, "r").nbytes == nbytes
    for group, (pages, into) in enumerate(zip(FROM, INTO, strict=True)):
        assert np.array_equal(prefill.pool_of(group)[:, pages], decode.pool_of(group)[:, into])
        others = [page for page in range(64) if page not in into]
        assert np.array_equal(decode.pool_of(group)[:, others], before[group][:, others])


def test_chunks_that_are_announced_before_they_are_computed_arrive_too(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    grant(prefill, decode)
    for index, (group, first, num_tokens) in enumerate(CHUNKS):
        size = TWO.groups[group].block_size
        pages = blocks(FROM[group][first // size : -(-(first + num_tokens) // size)])
        prefill.node.chunk_scheduled(decode.name, *KEY, first, num_tokens, pages, 1, group)
        prefill.node.chunks_launched(is_all=False)
        prefill.node.chunks_launched(is_all=True)
        send(prefill, decode, index)
        assert decode.wait(ChunkLanded).header.group == group
    for group, (pages, into) in enumerate(zip(FROM, INTO, strict=True)):
        assert np.array_equal(prefill.pool_of(group)[:, pages], decode.pool_of(group)[:, into])


def test_nothing_is_committed_before_every_group_is_whole(pair: tuple[Peer, Peer]) -> None:
    prefill, decode = pair
    grant(prefill, decode)
    for index in (0, 1, 3):
        send(prefill, decode, index)
    prefill.node.finish(decode.name, fin("r", 3))
    for _ in range(3):
        decode.wait(ChunkLanded)
    decode.message(Fin, "r")
    assert not any(isinstance(getattr(event, "message", None), Commit) for event in prefill.poll())


def test_a_peer_with_another_second_group_is_refused_by_its_field(make_peer: Make) -> None:
    other = msgspec.structs.replace(TWO, groups=(TWO.groups[0], msgspec.structs.replace(DRAFT, dtype="float16")))
    prefill, decode = make_peer("prefill", layout=TWO), make_peer("decode", layout=other)
    prefill.node.offer(decode.ref, Offer(*KEY, NUM_TOKENS, TWO.layout_id))
    assert "'groups[1].dtype'" in prefill.wait(PeerDisconnected).error


@pytest.mark.parametrize("moved", [name for name in STAGED if name != "loopback"])
@pytest.mark.parametrize(
    ("here", "there", "difference"),
    [
        (WITH_HEAD, LAYOUT, "groups is ['full', 'draft', 'draft_row'] here, ['full'] there"),
        (LAYOUT, WITH_HEAD, "groups is ['full'] here, ['full', 'draft', 'draft_row'] there"),
        (WITH_HEAD, OTHER_HEAD, "groups[1].weights is a head here, another there"),
    ],
)
def test_the_pages_of_a_head_that_only_one_end_has_stay_where_they_are(
    make_peer: Make,
    moved: str,
    here: KVLayout,
    there: KVLayout,
    difference: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill = make_peer("prefill", layout=here, transport=moved)
    decode = make_peer("decode", layout=there, transport=moved)
    before = [decode.pool_of(group).copy() for group in range(1, len(there.groups))]
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    assert [*prefill.node.groups_with(decode.name, sends=True)] == [0]
    assert [*decode.node.groups_with(prefill.name, sends=False)] == [0]
    send_first_group(prefill, decode, "r", 0, 0, 8, [3, 40])
    prefill.node.finish(decode.name, fin("r", 1))
    assert decode.wait(ChunkLanded).header.nbytes == 2 * LAYOUT.block_nbytes
    assert np.array_equal(prefill.pool_of(0)[:, [3, 40]], decode.pool_of(0)[:, [5, 9]])
    for index, pages in enumerate(before, 1):
        assert np.array_equal(decode.pool_of(index), pages)
    assert f"moves no KV of a draft head, so drafts begin behind the prompt: {difference}" in caplog.text


def test_a_head_that_both_ends_have_takes_its_row_of_each_block_along(
    make_peer: Make, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = make_peer("prefill", layout=WITH_HEAD, transport=transport)
    decode = make_peer("decode", layout=WITH_HEAD, transport=transport)
    pages, into = [3, 40], [5, 9]
    prefill.node.offer(decode.ref, Offer(*KEY, 7, WITH_HEAD.layout_id))
    decode.message(Offer, "r")
    decode.node.grant(prefill.name, Grant(*KEY, [blocks(into)] * 3, 0))
    prefill.message(Grant, "r")
    for group in range(3):
        sums = prefill.checksums(blocks(pages), group)
        prefill.node.send_chunk(decode.name, *KEY, group, 0, 7, blocks(pages), sums, group)
    sizes = [decode.wait(ChunkLanded).header.nbytes for _ in range(3)]
    assert sizes == [2 * group.block_nbytes for group in WITH_HEAD.groups] and sizes[2] == 2 * 12 * 2
    for group in range(3):
        assert np.array_equal(prefill.pool_of(group)[:, pages], decode.pool_of(group)[:, into])
    assert "draft head" not in caplog.text


def test_damaged_pages_of_a_head_are_found_before_they_are_written(
    make_peer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = HostStaging.pack

    def damaging(staging: HostStaging, units: np.ndarray, payload: np.ndarray, checksum: int) -> int:
        found = pack(staging, units, payload, checksum)
        if staging.unit_nbytes == HEAD.page_nbytes(1):
            payload[100] ^= 4
        return found

    monkeypatch.setattr(HostStaging, "pack", damaging)
    prefill, decode = make_peer("prefill", layout=WITH_HEAD), make_peer("decode", layout=WITH_HEAD)
    before = decode.pool_of(1).copy()
    prefill.node.offer(decode.ref, Offer(*KEY, 8, WITH_HEAD.layout_id))
    decode.message(Offer, "r")
    decode.node.grant(prefill.name, Grant(*KEY, [blocks([5, 9])] * 3, 0))
    prefill.message(Grant, "r")
    for group in range(3):
        prefill.node.send_chunk(decode.name, *KEY, group, 0, 8, blocks([3, 40]), None, group)
    bad = decode.wait(ChunkBad)
    assert (bad.header.group, bad.reason) == (1, f"checksum differs in the bytes up to {2 * HEAD.block_nbytes}")
    assert np.array_equal(decode.pool_of(1), before)


def test_a_chunk_of_a_group_that_does_not_move_is_refused_at_its_sender(make_peer: Make) -> None:
    prefill, decode = make_peer("prefill", layout=WITH_HEAD), make_peer("decode")
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    with pytest.raises(ValueError, match="group is 1; 0 move to decode"):
        prefill.node.send_chunk(decode.name, *KEY, 0, 0, 8, blocks([3, 40]), None, 1)


def test_a_node_without_a_pool_for_each_group_is_refused(make_peer: Make) -> None:
    peer = make_peer("prefill", layout=TWO)
    kind, settings = type(peer.node), {"secret": SECRET, "transport": "tcp"}
    from kv_transfer.settings import TransferSettings

    with pytest.raises(ValueError, match="1 pools do not fit a layout of 2 groups"):
        kind(TransferSettings(**settings), peer.name, peer.incarnation, TWO, peer.pools[0], peer.woken.set)
    with pytest.raises(ValueError, match="group is 2; the layout has 2"):
        peer.node.send_chunk(peer.name, *KEY, 0, 0, 8, blocks([1, 2]), None, 2)


@pytest.mark.parametrize(
    ("pages", "reason"),
    [
        ([INTO[0]], "pages of 1 groups granted, the layout has 2"),
        ([INTO[0], INTO[1][:4]], "4 pages granted, 8 are needed"),
        ([INTO[0], [*INTO[1][:7], 64]], "outside the pool of 64"),
    ],
)
def test_a_grant_that_does_not_fit_the_groups_is_refused(pages: list[list[int]], reason: str) -> None:
    tables = [blocks(each) for each in pages]
    with pytest.raises(ValueError, match=reason):
        GrantedPages(Offer(*KEY, NUM_TOKENS, TWO.layout_id), Grant(*KEY, tables, 0), TWO, [64, 64])


def test_the_checksum_of_a_chunk_is_that_of_its_group() -> None:
    sums = np.arange(6, dtype=np.uint32).reshape(1, 6)
    assert len({of_pages(Epoch(epoch), sums, group) for epoch in (1, 2) for group in (0, 1, 2)}) == 6
    assert seed(Epoch(5)) == 5


@pytest.mark.parametrize("group", [-1, 2])
def test_a_chunk_of_no_group_is_refused(group: int) -> None:
    granted = GrantedPages(
        Offer(*KEY, NUM_TOKENS, TWO.layout_id), Grant(*KEY, [blocks(pages) for pages in INTO], 0), TWO, [64, 64]
    )
    pull = PullReady(*KEY, 0, 0, 8, TWO.layout_id, 2 * LAYOUT.block_nbytes, 0, group, pages=blocks([1, 2]))
    assert granted.check(pull.header) == f"group is {group}; the layout has 2"


SHORT = msgspec.structs.replace(LAYOUT.groups[0], kind="window", span=5, layers=(7,))
WINDOWED = msgspec.structs.replace(LAYOUT, groups=(*LAYOUT.groups, SHORT))


def windowed_grant(skips: list[int], num_short: int) -> GrantedPages:
    offer = Offer(*KEY, NUM_TOKENS, WINDOWED.layout_id)
    tables = [blocks(INTO[0]), blocks(INTO[1][:num_short])]
    return GrantedPages(offer, Grant(*KEY, tables, 0, skips), WINDOWED, [64, 64])


def test_of_a_window_only_its_pages_are_granted_and_filled() -> None:
    size = LAYOUT.block_size
    assert WINDOWED.skips(0, NUM_TOKENS) == [0, 2 * size]
    granted = windowed_grant(WINDOWED.skips(0, NUM_TOKENS), 2)
    facts = {"layout_id": WINDOWED.layout_id, "checksum": 0, "pages": blocks([1, 2])}

    def pull(index: int, group: int, first: int, num_tokens: int) -> PullReady:
        nbytes = WINDOWED.groups[group].num_blocks(num_tokens) * WINDOWED.groups[group].block_nbytes
        place = {"index": index, "group": group, "first_token": first, "num_tokens": num_tokens, "nbytes": nbytes}
        return PullReady(*KEY, **facts, **place)  # type: ignore[arg-type]

    early = pull(0, 1, 0, 2 * size).header
    assert granted.check(early) == f"first_token is 0; the grant starts at {2 * size}, blocks are {size}"
    parts = [pull(0, 0, 0, NUM_TOKENS), pull(1, 1, 2 * size, NUM_TOKENS - 2 * size)]
    assert granted.pages(parts[1].header) == blocks(INTO[1][:2])
    for index, part in enumerate(parts):
        assert granted.check(part.header) is None and not granted.is_whole(fin("r", 2))
        granted.chunk_received(part.header)
        assert granted.check(part.header) == f"chunk {index} has arrived already"
    assert granted.is_whole(fin("r", 2))


@pytest.mark.parametrize(("skips", "num_short"), [([0], 4), ([0, 3], 4), ([0, 8], 4), ([0, 16], 0), ([-4, 8], 2)])
def test_skips_that_do_not_fit_the_groups_are_refused(skips: list[int], num_short: int) -> None:
    with pytest.raises(ValueError, match=r"group_skips are|pages granted"):
        windowed_grant(skips, num_short)
