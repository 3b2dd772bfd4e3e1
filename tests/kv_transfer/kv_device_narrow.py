"""Two nodes whose pools are a device's, by UCX: prefill's cache is bf16, decode's e4m3. Prints a line for each thing
that is checked; a process of its own, as everything with UCX.

    python -m tests.kv_transfer.kv_device_narrow PREFILL_SHARDS DECODE_SHARDS [PREFILL_SHARDS DECODE_SHARDS ...]
"""

import sys
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from contracts.handoff import Offer
from contracts.ids import Epoch, RequestId
from contracts.layout import KVLayout
from engine.cuda.kv.kv_cache import DeviceCache
from kernels import catalog
from kernels.caps import Caps, detect
from kernels.registry import Registry
from kernels.specs import KVDtype, RopeSpec
from kv_transfer.events import ChunkBad, ChunkLanded, PeerDisconnected
from kv_transfer.transports import ucx_device
from tests.kv_transfer import kv_device
from tests.kv_transfer.kv_pair import Peer, offer_and_grant, send

WIDE = KVLayout.uniform(
    model="m", num_layers=3, num_kv_heads=2, head_dim=64, block_size=64, dtype="bfloat16", scales="none"
)
NARROW = WIDE.with_groups(dtype="float8_e4m3fn")
NUM_BLOCKS, PAGES, GRANTED = 64, list(range(1, 41)), list(range(20, 60))
KEPT: list[DeviceCache] = []
NUM_TOKENS = len(PAGES) * WIDE.block_size - 5


def main(*sizes: str) -> None:
    for first in range(0, len(sizes), 2):
        check(*map(int, sizes[first : first + 2]))
    print("refused:", refusal(make_peers("tcp")), refusal(reversed(make_peers())))


def check(*sizes: int) -> None:
    prefill, decode = make_peers("ucx", *sizes)
    assert prefill.device is not None
    offer_and_grant(prefill, decode, "r", NUM_TOKENS, GRANTED)
    before, honest = decode.pool.copy(), prefill.device.narrow
    prefill.device.narrow = partial(damaged, honest)  # type: ignore[method-assign]
    send(prefill, decode, "r", 0, 0, NUM_TOKENS, PAGES)
    print("damaged:", decode.wait(ChunkBad).reason)
    prefill.device.narrow = honest  # type: ignore[method-assign]
    send(prefill, decode, "r", 0, 0, NUM_TOKENS, PAGES)
    landed = decode.wait(ChunkLanded).header
    print("nbytes", landed.nbytes == len(PAGES) * NARROW.block_nbytes, landed.layout_id == decode.layout.layout_id)
    full = slice(0, len(PAGES) - 1)  # the last page is not filled: what lies behind its tokens is nobody's
    print("pages", np.array_equal(decode.pool[:, GRANTED[full]], before[:, PAGES[full]]))
    others = [page for page in range(NUM_BLOCKS) if page not in GRANTED]
    print("others", np.array_equal(decode.pool[:, others], before[:, others]))
    for peer in (prefill, decode):
        peer.close()


def make_peers(transport: str = "ucx", *sizes: int) -> tuple[Peer, Peer]:
    """In so many shards, one each without. What decode's cache holds beforehand is what its own kernel writes of
    prefill's values, on the same blocks.
    """
    ucx_device.SLOT_NBYTES = 1 << 18  # so that a chunk takes several
    values = (torch.randn(NUM_BLOCKS * WIDE.block_size, 3, 6 * WIDE.only_group.head_dim) * 60).bfloat16()
    torch.manual_seed(1)
    scales = 0.05 + torch.rand(WIDE.only_group.num_layers, 2)
    peers = []
    sides: list[tuple[str, KVLayout, KVDtype]] = [("prefill", WIDE, "bf16"), ("decode", NARROW, "e4m3")]
    for (name, layout, kv), size in zip(sides, sizes or (1, 1), strict=True):
        device = kv_device.DECODE_DEVICE if name == "decode" else kv_device.DEVICE
        if device.type == "cuda":
            torch.cuda.set_device(device)
        registry = catalog.registry(detect() if device.type == "cuda" else Caps("cpu"))
        dtype = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}[kv]
        cache = DeviceCache(layout, NUM_BLOCKS, dtype, device, scales if kv == "e4m3" else None)
        write(cache, values.to(device), kv, registry)
        cache = in_shards(cache, size, registry)
        peers.append(Peer(name, NUM_BLOCKS, cache.layout, transport=transport, pool=cache.transfer_pool))
    if kv_device.DEVICE.type == "cuda":
        torch.cuda.set_device(kv_device.DEVICE)  # where prefill's checksums are made
    return peers[0], peers[1]


def in_shards(whole: DeviceCache, size: int, registry: Registry) -> DeviceCache:
    """The first shard of a group, which shares them all; the others live as long as it does."""
    if size == 1:
        whole.share(registry)
        return whole
    layout = msgspec.structs.replace(whole.layout, tp_size=size)
    scales = torch.tensor(
        [(layer.k_scale, layer.v_scale) for layer in map(whole.layer, range(layout.only_group.num_layers))]
    )
    given = scales if whole.layout.only_group.scales != "none" else None
    group = [DeviceCache(layout, NUM_BLOCKS, whole._planes.dtype, whole.device, given) for _ in range(size)]
    for shard, heads in zip(group, whole._planes.view(torch.uint8).chunk(size, dim=2), strict=True):
        shard._planes.view(torch.uint8).copy_(heads)
    group[0].share(registry, [shard.export() for shard in group[1:]])
    KEPT.extend(group)
    return group[0]


def write(cache: DeviceCache, values: Tensor, kv: KVDtype, registry: Registry) -> None:
    """Every token of every block, at position 0, where RoPE turns nothing. `values` `[tokens, layers, q, k and v]`."""
    spec = RopeSpec(2, WIDE.only_group.num_kv_heads, WIDE.only_group.head_dim, WIDE.block_size, kv)
    tokens, device = len(values), values.device
    half = WIDE.only_group.head_dim // 2
    no_turn = torch.cat([torch.ones(1, half), torch.zeros(1, half)], 1).to(device)
    slots, zeros = torch.arange(tokens, device=device), torch.zeros(tokens, dtype=torch.int32, device=device)
    out = torch.empty(tokens, 2, WIDE.only_group.head_dim, dtype=torch.bfloat16, device=device)
    for index in range(WIDE.only_group.num_layers):
        layer, qkv = cache.layer(index), values[None, :, index].contiguous()
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        registry.get("rope_append", spec)(qkv, zeros, slots, no_turn, out, layer.keys, layer.values, **scales)


def damaged(narrow, pages, into, narrowing, num_parts):
    """One byte of a message, after it was packed and summed."""
    sums = narrow(pages, into, narrowing, num_parts)
    into.put(np.array([into.tensor[0].item() ^ 1], dtype=np.uint8))
    return sums


def refusal(peers) -> str:
    """The field that these two do not agree on."""
    prefill, decode = peers
    prefill.node.offer(decode.ref, Offer(RequestId("r"), Epoch(1), NUM_TOKENS, prefill.layout.layout_id))
    error = prefill.wait(PeerDisconnected).error
    for peer in (prefill, decode):
        peer.close()
    return error.partition("do not match in '")[2].partition("'")[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
