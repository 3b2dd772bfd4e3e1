"""The rehearsal of handoffs, which keeps the code that the next one runs in the processor's caches.

The first handoff of an idle worker finds the code that decides about it in main memory, and takes several times as long
for it. Waiting without sleep does not help: code that does not run is evicted. See docs/history/handoff.md, run R.
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
from contracts.layout import KVGroup, KVLayout
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
"""The period of rehearsals in seconds, of which one takes some 70 us."""

_REQUEST_ID, _EPOCH = RequestId("rehearsal"), Epoch(1)
_KEY = _REQUEST_ID, _EPOCH


class Rehearsal:
    """A handoff of a prompt of one block from a node to itself.

    It runs all that a handoff by `nvlink` does, except for sockets, the device and the owner's events.
    """

    def __init__(self, parts: LinkParts) -> None:
        quiet = replace(parts, emit=_drop_event, note=_drop_event, wake=_ignore, paths=PathHealth(time.monotonic))
        worker_id, incarnation = WorkerId("rehearsal"), Incarnation("rehearsal")
        hello = Hello(protocol=PROTOCOL, worker_id=worker_id, incarnation=incarnation, role="prefill", nonce=b"")
        self._decode = _DecodeEnd(quiet, hello)
        self._prefill = _PrefillEnd(quiet, WorkerRef(worker_id=worker_id, incarnation=incarnation, url="", transfer=""))
        self._prefill.deliver, self._decode.deliver = _deliver_to(self._decode), _deliver_to(self._prefill)
        layout = parts.layout
        self._offer = Offer(
            request_id=_REQUEST_ID, epoch=_EPOCH, num_tokens=layout.block_size, layout_id=layout.layout_id
        )
        self._headers = [_header_of(layout, index) for index in range(len(layout.groups))]
        self._pages = [_pages_of(layout, group) for group in layout.groups]
        self._num_planes = [group.num_planes for group in layout.groups]
        self._next_s = 0.0
        self._lock = threading.Lock()

    def keep_warm(self) -> bool:
        """Run a rehearsal if one is due, and return whether it ran.

        Any thread may call it; one that finds another thread rehearsing returns False. After the first failure there is
        no further rehearsal: its remains would block the next one, and no link of a real peer may end for it.
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
        """Hand the block over. Raises RuntimeError if decode does not commit it."""
        prefill, decode = self._prefill, self._decode
        prefill.offer(self._offer)
        decode.grant(Grant(request_id=_REQUEST_ID, epoch=_EPOCH, pages=self._pages, skip_tokens=0))
        for index, (header, pages) in enumerate(zip(self._headers, self._pages, strict=True)):
            prefill.chunk_scheduled(_KEY, 0, header.num_tokens, pages, self._num_planes[index] - 1, index)
        prefill.chunks_launched(is_all=False)
        prefill.chunks_launched(is_all=True)
        decode.looks_ahead()
        for header, pages in zip(self._headers, self._pages, strict=True):
            prefill.send_chunk(header, pages, None)
        num_chunks = len(self._headers)
        prefill.finish(Fin(_REQUEST_ID, _EPOCH, num_chunks=num_chunks, first=Token(0, 0), cached_tokens=0))
        if not decode.grants.is_committed(_KEY):
            raise RuntimeError("decode did not commit what was handed over")
        nbytes = sum(header.nbytes for header in self._headers)
        decode.commit(Commit(request_id=_REQUEST_ID, epoch=_EPOCH, num_chunks=num_chunks, nbytes=nbytes))


def _pages_of(layout: KVLayout, group: KVGroup) -> list[BlockId]:
    return [BlockId(page) for page in range(group.num_blocks(layout.block_size))]


def _header_of(layout: KVLayout, index: int) -> ChunkHeader:
    """Return the header of a block in one group."""
    group, num_tokens = layout.groups[index], layout.block_size
    sums = _sums(group.num_blocks(num_tokens), group.num_planes)
    return ChunkHeader(
        request_id=_REQUEST_ID,
        epoch=_EPOCH,
        index=index,
        first_token=0,
        num_tokens=num_tokens,
        layout_id=layout.layout_id,
        nbytes=plan.chunk_nbytes(layout, num_tokens, index),
        checksum=integrity.of_pages(_EPOCH, sums, index),
        group=index,
    )


def _deliver_to(link: Link) -> Callable[[bytes], None]:
    """Return a function that passes frames to this end as if they came over a socket."""
    reader = codec.FrameReader()

    def deliver(data: bytes) -> None:
        for payload in reader.feed(data):
            link.on_message(HANDOFF.decode(payload))

    return deliver


class _PrefillEnd(OutgoingLink):
    """The prefill end, which passes its messages to the decode end."""

    deliver: Callable[[bytes], None]

    def __init__(self, parts: LinkParts, peer: WorkerRef) -> None:
        super().__init__(parts, peer, was_asked=True)
        self._pull_sender = PullSender(self.queue, _NoSemaphore(), self.send, self._rate.reported)

    def send(self, message: HandoffMessage) -> None:
        self.deliver(codec.frame(message))


class _DecodeEnd(IncomingLink):
    """The decode end, which passes its messages to the prefill end."""

    deliver: Callable[[bytes], None]

    def __init__(self, parts: LinkParts, hello: Hello) -> None:
        super().__init__(parts, hello)
        layout = parts.layout
        remotes = [_NoPool(group.num_planes, group.num_blocks(layout.block_size)) for group in layout.groups]
        self._pull_receiver = self._pull_receiver_of(remotes, checks=True)

    def send(self, message: HandoffMessage) -> None:
        self.deliver(codec.frame(message))

    def looks_ahead(self) -> None:
        assert self._pull_receiver is not None
        self._pull_receiver.look_ahead()


class _NoSemaphore:
    """A DeviceSemaphore (kv_transfer.chunks.device_pool) that has no waiter."""

    shared = b""

    def set(self, value: int) -> None:
        """Do nothing: decode has copied by then."""


class _NoPool:
    """A RemotePool and DeferredCopy (kv_transfer.chunks.device_pool) that copies nothing."""

    detail = "none"
    is_void, is_due, is_done, busy_s = False, True, True, 0.0

    def __init__(self, num_planes: int, num_pages: int = 1) -> None:
        self._num_planes, self.num_pages = num_planes, num_pages

    def pull(self, pages: Sequence[BlockId], into: Sequence[BlockId], checks: bool) -> np.ndarray:
        return _sums(self.num_pages, self._num_planes)

    def pull_later(
        self, pages: Sequence[BlockId], into: Sequence[BlockId], checks: bool, early_planes: int, mark: int
    ) -> "_NoPool":
        return self

    def wait(self) -> np.ndarray:
        return _sums(self.num_pages, self._num_planes)

    def drop(self) -> None:
        """Do nothing: no memory is held."""

    expire = rehearse = close = drop


def _sums(num_pages: int, num_planes: int) -> np.ndarray:
    return np.zeros((num_pages, num_planes), np.uint32)


def _drop_event(event: TransferEvent) -> None:
    """Drop an event: a rehearsal has no owner."""


def _ignore() -> None:
    """Do nothing: there is no thread to wake."""
