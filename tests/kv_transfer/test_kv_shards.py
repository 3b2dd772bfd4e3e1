"""Pools that lie on several devices of a group: pages arrive whole, whatever the shards of the two sides are."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from contracts.errors import TransferError
from contracts.handoff import Commit, Offer
from contracts.ids import BlockId, Epoch, RequestId
from contracts.layout import KVLayout
from contracts.node import TransferCapabilities
from engine.cuda.kv.part_kernels import Resharding
from engine.cuda.kv.resharding import spans
from engine.cuda.runtime.shared_memory import HostMapping
from kv_transfer.chunks.page_pool import PagePool
from kv_transfer.connection import layout_negotiation as conversion
from kv_transfer.connection.handshake_frames import Terms
from kv_transfer.events import ChunkBad, ChunkLanded, PeerDisconnected
from kv_transfer.node import TransferNode
from kv_transfer.settings import TransferSettings
from tests.kv_transfer.kv_device import DEVICE
from tests.kv_transfer.kv_pair import Peer, fin, offer_and_grant, pages_equal, send

Make = Callable[..., Peer]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="a process can't open its own GPU memory"),
]

LAYOUT = KVLayout.uniform(model="m", num_layers=2, num_kv_heads=4, head_dim=8, block_size=4, dtype="float32")
SIZES = [(prefill, decode) for prefill in (1, 2, 4) for decode in (1, 2, 4)]
UNEQUAL = [(1, 2), (4, 1), (2, 4), (2, 2)]
PAGES, GRANTED = [3, 4, 5, 9, 10, 11, 0, 63], [5, 9, 1, 2, 60, 61, 7, 8]


def sharded(tp_size: int, layout: KVLayout = LAYOUT) -> KVLayout:
    return msgspec.structs.replace(layout, tp_size=tp_size)


@pytest.fixture
def make_pair(make_peer: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Peer, Peer]]:
    monkeypatch.setenv("KV_TEST_POOL", "device")

    def make(sizes: tuple[int, int], transport: str, **settings: object) -> tuple[Peer, Peer]:
        names = zip(("prefill", "decode-1"), sizes, strict=True)
        one, two = (make_peer(name, layout=sharded(size), transport=transport, **settings) for name, size in names)
        return one, two

    return make


@pytest.mark.parametrize("transport", ["nvlink", "shm", "tcp"])
@pytest.mark.parametrize("sizes", SIZES)
def test_pages_are_whole_whatever_the_shards(make_pair, sizes: tuple[int, int], transport: str) -> None:
    prefill, decode = make_pair(sizes, transport, slot_nbytes=700)  # messages begin in the middle of a part
    others = [page for page in range(64) if page not in GRANTED]
    before = decode.pool[:, others].copy()
    offer_and_grant(prefill, decode, "r", 30, GRANTED)
    send(prefill, decode, "r", 0, 0, 16, PAGES[:4])
    send(prefill, decode, "r", 1, 16, 14, PAGES[4:])
    prefill.node.finish(decode.name, fin("r", 2))
    nbytes = sum(decode.wait(ChunkLanded).header.nbytes for _ in range(2))
    assert nbytes == 8 * LAYOUT.block_nbytes
    decode.node.commit(prefill.name, Commit(RequestId("r"), Epoch(1), 2, nbytes))
    prefill.message(Commit, "r")
    assert pages_equal(prefill, PAGES, decode, GRANTED)
    assert np.array_equal(decode.pool[:, others], before)
    assert decode.node.stats()[0].num_bad == 0


def test_a_shard_of_a_finer_pool_is_a_part_of_the_coarser_ones_page(make_pair) -> None:
    """It is cut by heads: a page is `[kv_heads, block, head_dim]`."""
    prefill, decode = make_pair((1, 4), "nvlink")
    offer_and_grant(prefill, decode, "r", 4, [7])
    send(prefill, decode, "r", 0, 0, 4, [3])
    decode.wait(ChunkLanded)
    assert decode.device is not None
    by_head = prefill.pool[:, 3].reshape(LAYOUT.only_group.num_planes, LAYOUT.only_group.num_kv_heads, -1)
    for head, shard in enumerate(decode.device._shards):
        assert np.array_equal(shard[:, 7].numpy(), by_head[:, head])


@pytest.mark.parametrize("sizes", UNEQUAL)
def test_a_byte_that_changes_in_any_shard_is_found(make_pair, sizes: tuple[int, int]) -> None:
    """After the sums were made, where the chunk was computed."""
    prefill, decode = make_pair(sizes, "nvlink")
    assert prefill.device is not None
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    blocks = [BlockId(1), BlockId(2)]
    sums = prefill.checksums(blocks)
    chunk = decode.name, RequestId("r"), Epoch(1), 0, 0, 8, blocks
    for shard in prefill.device._shards:
        for at in (0, shard.shape[2] - 1):
            shard[3, 2, at] ^= 1
            prefill.node.send_chunk(*chunk, sums)
            assert decode.wait(ChunkBad).reason == "checksum differs"
            shard[3, 2, at] ^= 1
    prefill.node.send_chunk(*chunk, sums)
    decode.wait(ChunkLanded)
    assert pages_equal(prefill, [1, 2], decode, [5, 9])


@pytest.mark.parametrize("sizes", SIZES)
def test_sums_made_before_the_peer_was_known_do(make_pair, sizes: tuple[int, int]) -> None:
    prefill, decode = make_pair(sizes, "nvlink")
    blocks = [BlockId(1), BlockId(2)]
    sums = prefill.checksums(blocks)
    assert sums is not None and sums.shape == (2, sizes[0] * LAYOUT.only_group.num_planes)
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    prefill.node.send_chunk(decode.name, RequestId("r"), Epoch(1), 0, 0, 8, blocks, sums)
    decode.wait(ChunkLanded)
    assert pages_equal(prefill, [1, 2], decode, [5, 9])


def test_one_prefill_serves_peers_of_several_sizes(make_pair, make_peer: Make) -> None:
    prefill, decode = make_pair((1, 2), "nvlink")
    finer, equal = (make_peer(f"decode-{size}0", layout=sharded(size), transport="nvlink") for size in (4, 1))
    for peer in (decode, finer, equal, decode):
        request_id = f"r{len(peer.node.stats())}-{peer.name}"
        offer_and_grant(prefill, peer, request_id, 8, [5, 9])
        send(prefill, peer, request_id, 0, 0, 8, [1, 2])
        peer.wait(ChunkLanded)
        peer.node.commit(prefill.name, Commit(RequestId(request_id), Epoch(1), 1, 0))
        assert pages_equal(prefill, [1, 2], peer, [5, 9])
    sums = prefill.checksums([BlockId(1)])
    assert sums is not None and sums.shape == (1, (1 + 2 + 4) * LAYOUT.only_group.num_planes)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups with more GPUs than KV heads."""
    monkeypatch.setenv("KV_TEST_PREFILL_COPIES", "2")
    monkeypatch.setenv("KV_TEST_DECODE_COPIES", "3")


@pytest.mark.parametrize("transport", ["nvlink", "shm", "tcp"])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 2), (4, 1)])
def test_what_comes_is_written_to_every_gpu_that_holds_it(
    copied: None, make_pair, sizes: tuple[int, int], transport: str
) -> None:
    """And read of the first: copies are computed by GPUs that need not round alike."""
    prefill, decode = make_pair(sizes, transport, slot_nbytes=700)
    assert prefill.device is not None and decode.device is not None
    for shard in prefill.device.copies[1]:
        shard.zero_()
    before = decode.pool.copy()
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    send(prefill, decode, "r", 0, 0, 8, [1, 2])
    assert decode.wait(ChunkLanded).header.nbytes == 2 * LAYOUT.block_nbytes
    others = [page for page in range(64) if page not in (5, 9)]
    for copy in decode.device.copies:
        pages = np.concatenate([shard[:, :64].numpy() for shard in copy], axis=2)
        assert np.array_equal(pages[:, [5, 9]], prefill.pool[:, [1, 2]])
        assert np.array_equal(pages[:, others], before[:, others])


def test_a_copy_that_came_wrong_is_found(copied: None, make_pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = make_pair((2, 4), "nvlink")
    assert decode.device is not None
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    honest = HostMapping.copy_pages
    for copy in decode.device.copies:
        victim = copy[3]

        def copy_pages(mapping, source, pages, target, grid, into, planes, victim=victim) -> None:
            honest(mapping, source, pages, target, grid, into, planes)
            if target.data_ptr() == victim.data_ptr():
                victim[3, 9, 0] ^= 1

        monkeypatch.setattr(HostMapping, "copy_pages", copy_pages)
        send(prefill, decode, "r", 0, 0, 8, [1, 2])
        assert decode.wait(ChunkBad).reason == "checksum differs"
    monkeypatch.setattr(HostMapping, "copy_pages", honest)
    send(prefill, decode, "r", 0, 0, 8, [1, 2])
    decode.wait(ChunkLanded)


@pytest.mark.parametrize("sizes", UNEQUAL)
def test_what_was_coming_lands_in_every_shard(make_pair, sizes: tuple[int, int]) -> None:
    prefill, decode = make_pair(sizes, "nvlink")
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    prefill.node.chunk_scheduled(decode.name, RequestId("r"), Epoch(1), 0, 8, [BlockId(1), BlockId(2)], 3)
    prefill.node.chunks_launched(is_all=True)
    send(prefill, decode, "r", 0, 0, 8, [1, 2])
    decode.wait(ChunkLanded)
    assert pages_equal(prefill, [1, 2], decode, [5, 9])


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_shards_that_do_not_divide_are_refused_by_name(make_peer: Make, sizes: tuple[int, int], monkeypatch) -> None:
    monkeypatch.setenv("KV_TEST_POOL", "device")
    six = LAYOUT.with_groups(num_kv_heads=6)
    prefill, decode = (
        make_peer(name, layout=sharded(size, six), transport="tcp")
        for name, size in zip(("prefill", "decode"), sizes, strict=True)
    )
    prefill.node.offer(decode.ref, Offer(RequestId("r"), Epoch(1), 8, prefill.layout.layout_id))
    lost = prefill.wait(PeerDisconnected)
    assert lost.code == "layout_mismatch" and "'tp_size'" in lost.error


def test_a_hosts_pool_has_one_shard() -> None:
    pages = np.zeros((LAYOUT.only_group.num_planes, 4, sharded(2).only_group.page_nbytes(2)), dtype=np.uint8)
    with pytest.raises(ValueError, match="2 shards"):
        PagePool(pages, sharded(2))


@pytest.mark.parametrize(("num_shards", "num_parts"), [(2, 3), (4, 2), (3, 4)])
def test_what_cannot_be_cut_is_refused(num_shards: int, num_parts: int) -> None:
    with pytest.raises(TransferError, match="can't be cut"):
        spans(num_shards, 96, num_parts)


def test_parts_are_in_the_order_of_the_heads() -> None:
    assert spans(2, 100, 4) == [(0, 0, 50), (0, 50, 50), (1, 0, 50), (1, 50, 50)]
    assert spans(1, 100, 1) == [(0, 0, 100)]


@pytest.mark.parametrize(("num_heads", "tp_size", "counts"), [(4, 1, [1, 2, 4]), (4, 2, [2, 4]), (4, 4, [4])])
def test_pages_may_be_wanted_in_as_many_parts_as_any_peer_has_shards(
    num_heads: int, tp_size: int, counts: list[int]
) -> None:
    layout = msgspec.structs.replace(LAYOUT.with_groups(num_kv_heads=num_heads), tp_size=tp_size)
    assert conversion.part_counts(layout) == counts


def test_a_latent_is_cut_for_no_peer() -> None:
    """A re-shard of it is a copy: its layout is the same for any number of GPUs, each of which gets whole pages."""
    assert conversion.part_counts(LATENT) == [1] == [conversion.num_parts(LATENT, LATENT)]
    for size in (2, 4):
        assert not conversion.is_possible(terms(sharded(size, LATENT)), terms(LATENT))


@pytest.mark.parametrize("sizes", SIZES)
def test_nothing_is_compiled_in_a_handshake(make_pair, sizes: tuple[int, int], monkeypatch) -> None:
    """It has a limit that a compiler may pass."""
    warmed: list[int] = []
    monkeypatch.setattr(Resharding, "warm_up", lambda cut: warmed.append(len(cut.parts)))
    prefill, decode = make_pair(sizes, "nvlink")
    own = [size for size in (1, 2, 4) for each in sizes if size > each]
    assert sorted(warmed) == sorted(own), "but of one's own, which the engine has warmed up"
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    send(prefill, decode, "r", 0, 0, 8, [1, 2])
    decode.wait(ChunkLanded)
    assert len(warmed) == len(own)


NARROW = LAYOUT.with_groups(dtype="float8_e4m3fn", scales="layer-x")
WIDE = LAYOUT.with_groups(dtype="bfloat16")
LATENT = KVLayout.uniform(
    model="m", num_layers=2, num_kv_heads=1, head_dim=20, block_size=4, dtype="bfloat16", is_latent=True
)
SCALES = [0.5] * LAYOUT.only_group.num_planes


def terms(layout: KVLayout, memory: str = "cuda", scales=(), available: str = "ucx tcp") -> Terms:
    return Terms(layout, 64, "auto", available.split(), "a", True, memory, list(scales))


@pytest.mark.parametrize(
    ("receiver", "taken"),
    [
        (terms(LAYOUT, memory="host"), [LAYOUT]),
        (terms(LAYOUT), [sharded(1), sharded(2), sharded(4)]),
        (terms(sharded(2)), [sharded(2), sharded(1), sharded(4)]),
        (terms(sharded(3, LAYOUT.with_groups(num_kv_heads=3))), None),
        (terms(LATENT), [LATENT]),
        (terms(NARROW), [sharded(size, NARROW) for size in (1, 2, 4)]),
        (
            terms(NARROW, scales=SCALES),
            [*(sharded(size, NARROW) for size in (1, 2, 4)), *(sharded(size, WIDE) for size in (1, 2, 4))],
        ),
        (terms(NARROW, scales=SCALES, available="tcp"), [sharded(size, NARROW) for size in (1, 2, 4)]),
        (terms(NARROW, scales=[*SCALES[1:], float("nan")]), [sharded(size, NARROW) for size in (1, 2, 4)]),
    ],
)
def test_what_a_worker_says_it_takes(receiver: Terms, taken: list[KVLayout] | None) -> None:
    own = receiver.layout
    expected = taken or [own, msgspec.structs.replace(own, tp_size=1)]
    assert conversion.receivable_layouts(receiver) == expected


def test_a_node_says_what_it_takes_and_how(make_pair) -> None:
    _, decode = make_pair((1, 2), "tcp")
    said = decode.node.capabilities
    assert (said.sends, said.takes) == (["tcp"], {sharded(size).layout_id: ["tcp"] for size in (2, 1, 4)})
    pages = np.zeros((LAYOUT.only_group.num_planes, 4, LAYOUT.only_group.page_nbytes(1)), dtype=np.uint8)
    settings = TransferSettings(secret=b"s", transport="tcp")
    node = TransferNode(settings, decode.name, decode.incarnation, LAYOUT, pages, lambda: None)
    assert node.capabilities == TransferCapabilities(memory="host", sends=["tcp"], takes={LAYOUT.layout_id: ["tcp"]})
    node.close()


@pytest.mark.timeout(300)
def test_a_peer_that_dies_in_mid_transfer_changes_no_page_of_any_shard() -> None:
    """The deaths of a peer that is stopped, over nvlink; by ucx, and the other way round, see test_kv_ucx."""
    environment = {"KV_TEST_POOL": "device", "KV_TEST_PREFILL_TP": "1", "KV_TEST_DECODE_TP": "2"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kv_transfer/test_kv_death.py"]
    command += ["-k", "stopped"]
    result = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | environment | {"KV_TEST_TRANSPORTS": "nvlink"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-4000:] + result.stderr[-4000:]
