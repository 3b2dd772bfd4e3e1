"""Two nodes whose pools are a device's, by `auto`: what becomes of a link whose UCX can't be used. Prints a line for
each case; a process of its own, as everything with UCX.
"""

import logging
import sys
from collections.abc import Callable
from functools import partial

from contracts.errors import TransferError
from kv_transfer.events import ChunkLanded
from kv_transfer.transports import ucx_device
from kv_transfer.transports.ucx_device import UcxDeviceOutbound
from tests.kv_transfer.kv_pair import Peer, offer_and_grant, pages_equal, send

Case = Callable[[Peer, Peer], None]


def main() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    ucx_device.SLOT_NBYTES = 1 << 18
    for case in (nothing, partial(no_memory, 0), partial(no_memory, 1), no_arrival, detour):
        prefill, decode = (Peer(name, transport="auto") for name in ("prefill", "decode"))
        for peer in (prefill, decode):
            del peer.node._transports._given["nvlink"]
            peer.node._transports._loaded.clear()
        undo = case(prefill, decode)
        print(handed_over(prefill, decode), *(left(peer) for peer in (prefill, decode)))
        (undo or (lambda: None))()


def handed_over(prefill: Peer, decode: Peer) -> str:
    offer_and_grant(prefill, decode, "r", 8, [5, 9])
    send(prefill, decode, "r", 0, 0, 8, [1, 2])
    decode.wait(ChunkLanded)
    assert pages_equal(prefill, [1, 2], decode, [5, 9])
    transport = prefill.node.stats()[0].transport
    prefill.close()
    decode.close()
    return transport


def left(peer: Peer) -> int:
    """What lent buffers were not taken back."""
    return peer.num_lent  # type: ignore[attr-defined]


def nothing(prefill: Peer, decode: Peer) -> None:
    count(prefill)
    count(decode)


def no_memory(who: int, *peers: Peer) -> None:
    """For the last of the slots."""
    for peer in peers:
        count(peer, ucx_device.NUM_SLOTS - 1 if peer is peers[who] else 99)


def no_arrival(prefill: Peer, decode: Peer) -> Callable[[], None]:
    nothing(prefill, decode)
    arrive = UcxDeviceOutbound._arrive

    def fail(self: UcxDeviceOutbound, *args: object) -> None:
        raise TransferError("nothing came")

    UcxDeviceOutbound._arrive = fail  # type: ignore[method-assign]
    return lambda: setattr(UcxDeviceOutbound, "_arrive", arrive)


def detour(prefill: Peer, decode: Peer) -> None:
    nothing(prefill, decode)
    ucx_device.is_direct = lambda words, pool: False


def count(peer: Peer, most: int = 99) -> None:
    pool = peer.device
    assert pool is not None
    lend, take_back = pool.allocate, pool.free
    peer.num_lent = 0  # type: ignore[attr-defined]

    def lend_some(nbytes: int):
        if peer.num_lent == most:  # type: ignore[attr-defined]
            raise TransferError("no memory for staging")
        peer.num_lent += 1  # type: ignore[attr-defined]
        return lend(nbytes)

    def take_one_back(buffer) -> None:
        peer.num_lent -= 1  # type: ignore[attr-defined]
        take_back(buffer)

    pool.allocate, pool.free = lend_some, take_one_back  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
