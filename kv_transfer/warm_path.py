"""Handoffs that nobody asked for, so that the processor has in its caches what the next one runs.

An idle worker's first handoff finds the code that decides about it in the machine's memory, and takes several times as
long for it. To wait without sleep is no help: what is not run is not kept. See docs/history/handoff.md, run R.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from contracts import codec
from contracts.events import Token
from contracts.handoff import ChunkHeader, Commit, Fin, Grant, HandoffMessage, Offer
from contracts.ids import BlockId, Epoch, Incarnation, RequestId, WorkerId
from contracts.request import WorkerRef
from kv_transfer.chunks import checksum as integrity
from kv_transfer.chunks import chunk_plan as plan
from kv_transfer.connection.frames import HANDOFF, PROTOCOL, Hello
from kv_transfer.data_path.pull_sender import PullSender
from kv_transfer.events import TransferEvent
from kv_transfer.links.incoming_link import IncomingLink
from kv_transfer.links.link import Link, LinkParts
from kv_transfer.links.outgoing_link import OutgoingLink
from kv_transfer.links.path_health import PathHealth

log = logging.getLogger(__name__)

REHEARSAL_S = 0.001
"""Some 70 us of it are spent on that."""

_KEY = RequestId("rehearsal"), Epoch(1)
_PAGE = BlockId(0)


class Rehearsal:
    """A node hands a prompt of one block over to itself: all that a handoff by `nvlink` is but sockets, the device, and
    whoever is told of it.
    """

    def __init__(self, parts: LinkParts) -> None:
        quiet = replace(parts, emit=_unheard, note=_unheard, wake=_ignore, paths=PathHealth(time.monotonic))
        me = WorkerId("rehearsal"), Incarnation("rehearsal")
        self._decode = _Decode(quiet, Hello(PROTOCOL, *me, "prefill", b""))
        self._prefill = _Prefill(quiet, WorkerRef(*me, "", ""))
        self._prefill.tell, self._decode.tell = _ear(self._decode), _ear(self._prefill)
        layout = parts.layout
        facts = layout.layout_id, plan.chunk_nbytes(layout, layout.block_size)
        checksum = integrity.of_pages(_KEY[1], _sums(layout.num_planes))
        self._offer = Offer(*_KEY, layout.block_size, layout.layout_id)
        self._header = ChunkHeader(*_KEY, 0, 0, layout.block_size, *facts, checksum)
        self._num_planes = layout.num_planes
        self._next_s = 0.0
        self._lock = threading.Lock()

    def keep_warm(self) -> bool:
        """Run it if it is due, and say so. From any thread; one that finds another at it does without.

        The first that goes wrong is the last: what it leaves behind would be in the way of the next, and no link of
        somebody's is to end for it.
        """
        if time.perf_counter() < self._next_s or not self._lock.acquire(blocking=False):
            return False
        try:
            self._next_s = math.inf
            self.run()
            self._next_s = time.perf_counter() + REHEARSAL_S
            return True
        except Exception:
            log.exception("a rehearsal went wrong: lone handoffs take longer from now on")
            return False
        finally:
            self._lock.release()

    def run(self) -> None:
        """Raises RuntimeError if it does not come to Commit."""
        prefill, decode = self._prefill, self._decode
        prefill.offer(self._offer)
        decode.grant(Grant(*_KEY, [_PAGE], 0))
        prefill.chunk_scheduled(_KEY, 0, self._header.num_tokens, [_PAGE], self._num_planes - 1)
        prefill.chunks_launched(is_all=False)
        prefill.chunks_launched(is_all=True)
        decode.looks_ahead()
        prefill.send_chunk(self._header, [_PAGE], None)
        prefill.finish(Fin(*_KEY, 1, Token(0, 0), 0))
        if not decode.grants.is_committed(_KEY):
            raise RuntimeError("decode did not commit what was handed over")
        decode.commit(Commit(*_KEY, 1, self._header.nbytes))


def _ear(link: Link) -> Callable[[bytes], None]:
    """What comes to this end, as if it came over a socket."""
    reader = codec.FrameReader()

    def hear(data: bytes) -> None:
        for payload in reader.feed(data):
            link._on_message(HANDOFF.decode(payload))

    return hear


class _Prefill(OutgoingLink):
    tell: Callable[[bytes], None]

    def __init__(self, parts: LinkParts, peer: WorkerRef) -> None:
        super().__init__(parts, peer, was_asked=True)
        self._pull_sender = PullSender(self.queue, _Mark(), self.send, self._rate.told)

    def send(self, message: HandoffMessage) -> None:
        self.tell(codec.frame(message))


class _Decode(IncomingLink):
    tell: Callable[[bytes], None]

    def __init__(self, parts: LinkParts, hello: Hello) -> None:
        super().__init__(parts, hello)
        self._pull_receiver = self._pull_receiver_of(_Nowhere(parts.layout.num_planes), checks=True)

    def send(self, message: HandoffMessage) -> None:
        self.tell(codec.frame(message))

    def looks_ahead(self) -> None:
        assert self._pull_receiver is not None
        self._pull_receiver.look_ahead()


class _Mark:
    """kv_transfer.chunks.device_pool.DeviceSemaphore, which nobody waits for."""

    shared = b""

    def set(self, value: int) -> None:
        """Decode has copied by then."""


class _Nowhere:
    """kv_transfer.chunks.device_pool.RemotePool, and Later: nothing is copied, and it is done at once."""

    num_pages, detail = 1, "nowhere"
    is_void, is_due, is_done, busy_s = False, True, True, 0.0

    def __init__(self, num_planes: int) -> None:
        self._num_planes = num_planes

    def pull(self, pages: Sequence[BlockId], into: Sequence[BlockId], checks: bool) -> np.ndarray:
        return _sums(self._num_planes)

    def pull_later(
        self, pages: Sequence[BlockId], into: Sequence[BlockId], checks: bool, early_planes: int, mark: int
    ) -> "_Nowhere":
        return self

    def wait(self) -> np.ndarray:
        return _sums(self._num_planes)

    def drop(self) -> None:
        """There is nothing to give back."""

    expire = rehearse = close = drop


def _sums(num_planes: int) -> np.ndarray:
    return np.zeros((1, num_planes), np.uint32)


def _unheard(event: TransferEvent) -> None:
    """Nobody asked for this handoff."""


def _ignore() -> None:
    """There is nobody to wake."""
