"""Two nodes whose pools are a device's, by UCX: a device that takes its time to unpack. Prints a line for each thing
that is looked at; a process of its own, as everything with UCX.
"""

import time
from collections.abc import Callable

import numpy as np

from contracts.handoff import Abort, Commit, Offer
from contracts.ids import Epoch, RequestId
from kv_transfer.chunks.device_pool import PageScatter
from kv_transfer.data_path import grant as receiving
from kv_transfer.events import ChunkLanded, Drained, PeerDisconnected
from kv_transfer.transports import ucx_device
from kv_transfer.transports.stall_limit import StallLimit
from tests.kv_transfer.kv_pair import LAYOUT, Peer, fin, offer_and_grant, pages_equal, send

PAGES, GRANTED = list(range(1, 41)), list(range(20, 60))


class Slow:
    """`unpacking` is not done before `is_time` says so, unless somebody waits."""

    def __init__(self, unpacking: PageScatter, is_time: Callable[[], bool], waited: list["Slow"]) -> None:
        self._unpacking, self._is_time, self._waited = unpacking, is_time, waited

    @property
    def is_done(self) -> bool:
        return self._is_time() and self._unpacking.is_done

    def wait(self) -> np.ndarray | None:
        self._waited.append(self)
        return self._unpacking.wait()


class SlowPool:
    """What `decode`'s device unpacks, in order; `is_time`: whether it goes on."""

    def __init__(self, decode: Peer) -> None:
        assert decode.device is not None
        self.begun: list[Slow] = []
        self.waited: list[Slow] = []
        self.is_time = lambda: len(self.begun) == ucx_device.NUM_SLOTS
        self._unpack = decode.device.unpack
        decode.device.unpack = self.unpack  # type: ignore[method-assign]

    def unpack(self, *args) -> Slow:
        self.begun.append(Slow(self._unpack(*args), lambda: self.is_time(), self.waited))
        return self.begun[-1]


def times_asleep() -> int:
    """How often whoever waits for a message went to sleep, in a moment in which none comes."""
    sleep, calls = ucx_device.UcxDeviceWorker.sleep, []

    def counted(self: ucx_device.UcxDeviceWorker, limit: StallLimit | None) -> None:
        calls.append(self)
        sleep(self, limit)

    ucx_device.UcxDeviceWorker.sleep = counted  # type: ignore[method-assign]
    time.sleep(0.3)
    ucx_device.UcxDeviceWorker.sleep = sleep  # type: ignore[method-assign]
    return len(calls)


def main() -> None:
    prefill, decode = (Peer(name, transport="ucx") for name in ("prefill", "decode"))
    ucx_device.SLOT_NBYTES = 14 * LAYOUT.block_nbytes
    slow, receiving.ALONE_S = SlowPool(decode), 60.0
    offer_and_grant(prefill, decode, "r", 4 * len(PAGES), GRANTED)
    print("in naps" if times_asleep() > 10 else "until it is woken up")
    send(prefill, decode, "r", 0, 0, 4 * len(PAGES), PAGES)
    decode.wait(ChunkLanded)
    prefill.node.finish(decode.name, fin("r", 1))
    prefill.message(Commit, "r")
    in_order = slow.waited == slow.begun and pages_equal(prefill, PAGES, decode, GRANTED)
    print(len(slow.begun), "beside each other,", "in order" if in_order else "wrong")

    slow.is_time = lambda: False
    offer_and_grant(prefill, decode, "s", 8, [1, 2])
    send(prefill, decode, "s", 0, 0, 8, [1, 2])
    while len(slow.begun) < 4:
        decode.woken.wait(0.01)
    prefill.node.abort(decode.name, Abort(RequestId("s"), Epoch(1), "cancelled", "a test says so"))
    prefill.node.offer(decode.ref, Offer(RequestId("u"), Epoch(1), 8, prefill.layout.layout_id))
    decode.message(Offer, "u")  # behind the Abort
    is_kept = not any(isinstance(event, Drained) for event in [*decode.seen, *decode.poll()])
    slow.is_time = lambda: True
    decode.wait(Drained, timeout_s=15.0)  # UCX wakes up by itself every 20 s
    print("kept until it is written" if is_kept else "given back too early")

    print("until it is woken up" if times_asleep() < 5 else "in naps, for nothing")

    slow.is_time = lambda: False
    offer_and_grant(prefill, decode, "t", 8, [3, 4])
    send(prefill, decode, "t", 0, 0, 8, [1, 2])
    while len(slow.begun) < 5:
        decode.woken.wait(0.01)
    prefill.close()
    lost = decode.wait(PeerDisconnected)
    print("fenced behind it" if lost.fenced and slow.waited[-1] is slow.begun[-1] else "fenced too early")
    decode.close()


if __name__ == "__main__":
    main()
