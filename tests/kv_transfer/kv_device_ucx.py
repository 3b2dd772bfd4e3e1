"""Two nodes whose pools are a device's, by UCX: what is checked of a chunk that is packed and unpacked. Prints a line
for each; a process of its own, as everything with UCX.

    python -m tests.kv_transfer.kv_device_ucx PREFILL_SHARDS DECODE_SHARDS [PREFILL_SHARDS DECODE_SHARDS ...]
"""

import sys
from functools import partial

import msgspec
import numpy as np

from kv_transfer.events import ChunkBad, ChunkLanded
from tests.kv_transfer.kv_pair import LAYOUT, Peer, offer_and_grant, pages_equal, send

PAGES, GRANTED = list(range(1, 41)), list(range(20, 60))


def damaged(pack, pages, into, num_parts) -> None:
    """One byte of the first message, after it was packed."""
    pack(pages, into, num_parts)
    into.put(np.array([into.tensor[0].item() ^ 1], dtype=np.uint8))


def check(*sizes: str) -> None:
    layouts = [msgspec.structs.replace(LAYOUT.with_groups(num_kv_heads=4), tp_size=int(size)) for size in sizes]
    names = zip(("prefill", "decode"), layouts, strict=True)
    prefill, decode = (Peer(name, layout=layout, transport="ucx") for name, layout in names)
    offer_and_grant(prefill, decode, "r", 4 * len(PAGES), GRANTED)
    assert prefill.device is not None and decode.device is not None
    others = [page for page in range(64) if page not in GRANTED]
    before, pack = decode.pool[:, others].copy(), prefill.device.pack
    prefill.device.pack = partial(damaged, pack)  # type: ignore[method-assign]
    send(prefill, decode, "r", 0, 0, 4 * len(PAGES), PAGES)
    print(decode.wait(ChunkBad).reason)
    prefill.device.pack = pack  # type: ignore[method-assign]
    send(prefill, decode, "r", 0, 0, 4 * len(PAGES), PAGES)
    decode.wait(ChunkLanded)
    print("landed" if pages_equal(prefill, PAGES, decode, GRANTED) else "wrong")
    print("kept" if np.array_equal(decode.pool[:, others], before) else "written")
    print(*(peer.node.stats()[0].detail for peer in (prefill, decode)), sep="\n")
    prefill.close()
    decode.close()


if __name__ == "__main__":
    for first in range(1, len(sys.argv), 2):
        check(*sys.argv[first : first + 2])
