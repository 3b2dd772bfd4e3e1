"""The sending half of a link: the engine's thread queues chunks, another thread packs and sends them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from contracts.handoff import ChunkHeader, Fin
from contracts.ids import BlockId, Epoch, RequestId
from kv_transfer.chunks import chunk_plan as plan
from kv_transfer.chunks.wire_format import META_NBYTES, KVSegment, write_meta
from kv_transfer.codecs.level import LEVELS
from kv_transfer.data_path.compression import Compressor
from kv_transfer.data_path.staging import Staging
from kv_transfer.transports.base import Outbound, Slot

Key = tuple[RequestId, Epoch]


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """A chunk to send. `header.checksum` is set for a device's pages, not yet computed for a host's."""

    header: ChunkHeader
    pages: list[BlockId]

    @property
    def key(self) -> Key:
        return self.header.request_id, self.header.epoch


@dataclass(frozen=True, slots=True)
class FinJob:
    """A Fin to send after the chunks before it."""

    fin: Fin

    @property
    def key(self) -> Key:
        return self.fin.request_id, self.fin.epoch


Job = ChunkJob | FinJob


class SendQueue:
    """The jobs of live attempts, in order. One thread takes; any thread puts or ends an attempt."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._alive: set[Key] = set()
        self._current: Key | None = None
        self._draining: Key | None = None
        self._stopped = False
        self._changed = threading.Condition()

    def begin(self, key: Key) -> None:
        with self._changed:
            self._alive.add(key)

    @property
    def num_alive(self) -> int:
        """Return how many attempts have begun and are not over."""
        with self._changed:
            return len(self._alive)

    def knows(self, key: Key) -> bool:
        """Return whether the attempt is alive, or over while a page of it is still being read."""
        with self._changed:
            return key in self._alive or key == self._current

    def is_alive(self, key: Key) -> bool:
        with self._changed:
            return key in self._alive

    def has_queued(self, key: Key) -> bool:
        """Return whether a job of the attempt is queued or taken."""
        with self._changed:
            return key == self._current or any(job.key == key for job in self._jobs)

    def put(self, job: Job) -> None:
        """Queue the job, unless its attempt is over."""
        with self._changed:
            if job.key in self._alive and not self._stopped:
                self._jobs.append(job)
                self._changed.notify()

    def end(self, key: Key) -> bool:
        """Drop the attempt and its jobs; return True if none of its pages is being read now.

        If one is, `done` returns the attempt when it no longer is.
        """
        with self._changed:
            self._drop(key)
            if self._current == key:
                self._draining = key
            return self._current != key

    def forget(self, key: Key) -> None:
        """Drop an attempt whose end has no waiter: it was committed or refused."""
        with self._changed:
            self._drop(key)

    @property
    def is_empty(self) -> bool:
        with self._changed:
            return not self._jobs

    def take(self) -> Job | None:
        """Wait for a job and return it; None when stopped."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs) or self._stopped)
            if self._stopped:
                return None
            job = self._jobs.popleft()
            self._current = job.key
            return job

    def done(self) -> Key | None:
        """Mark the taken job as reading no page any more.

        Returns its attempt if that was ended meanwhile: it is drained now.
        """
        with self._changed:
            key, self._draining, self._current = self._draining, None, None
            return key

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _drop(self, key: Key) -> None:
        self._alive.discard(key)
        self._jobs = deque(job for job in self._jobs if job.key != key)


class Sender:
    """A sender that takes jobs until the queue stops or the channel breaks.

    The callbacks run in its thread.
    `on_sent(key, nbytes, start_s, end_s)` is called for each chunk, with times of time.perf_counter.
    """

    def __init__(
        self,
        queue: SendQueue,
        stagings: Sequence[Staging],
        channel: Outbound,
        send_fin: Callable[[Fin], None],
        on_sent: Callable[[Key, int, float, float], None],
        on_drained: Callable[[Key], None],
        compressor: Compressor | None = None,
    ) -> None:
        self._queue, self._stagings, self._channel, self._send_fin = queue, stagings, channel, send_fin
        self._on_sent, self._on_drained = on_sent, on_drained
        self._compressor = compressor
        self.nbytes = self.num_chunks = 0
        self.num_bad = self.num_stale = 0  # only the receiver counts these
        self.busy_s = 0.0
        self._has_cut = False

    def run(self) -> None:
        """Send until stopped. Raises PeerLost when the channel broke, TransferError when a device failed."""
        for staging in self._stagings:
            staging.enter()
        self._channel.flush()  # lets the channel do now what it does before its first message
        while job := self._queue.take():
            start = time.perf_counter()
            self._do(job)
            if drained := self._queue.done():
                self._on_drained(drained)
            if self._queue.is_empty:
                self._channel.flush()
            self.busy_s += time.perf_counter() - start

    def stop(self) -> None:
        self._queue.stop()

    def _do(self, job: Job) -> None:
        if isinstance(job, FinJob):
            self._send_fin(job.fin)
            return
        start = time.perf_counter()
        nbytes = self._send_chunk(job)
        if nbytes is not None:
            self.num_chunks += 1
            self.nbytes += nbytes
            self._on_sent(job.key, nbytes, start, time.perf_counter())

    def _send_chunk(self, job: ChunkJob) -> int | None:
        """Send the chunk; return its bytes, or None if its attempt ended on the way."""
        staging = self._stagings[job.header.group]
        units, unit_nbytes = staging.units(job.pages), staging.unit_nbytes
        header = staging.begin(job.header)
        for span in plan.split(len(units), staging.units_per_message):
            if not self._queue.is_alive(job.key):
                self._has_cut |= span.first > 0
                return None
            slot = self._channel.acquire()
            checksum = staging.pack(units[span.first : span.last], slot.payload, header.checksum)
            piece = KVSegment(header, span.first * unit_nbytes, span.num_units * unit_nbytes, self._has_cut)
            if self._compressor is None:
                header = self._send_piece(slot, piece, checksum)
            else:
                header = self._send_compressed(self._compressor, slot, piece, checksum)
            self._has_cut = False
        return header.nbytes

    def _send_piece(self, slot: Slot, piece: KVSegment, checksum: int) -> ChunkHeader:
        """Send a segment whose bytes, or their payload, are in the slot; return its header with the checksum."""
        header = msgspec.structs.replace(piece.header, checksum=checksum)
        write_meta(msgspec.structs.replace(piece, header=header), slot.meta)
        self._channel.send(slot, piece.wire_nbytes)
        return header

    def _send_compressed(self, compressor: Compressor, slot: Slot, piece: KVSegment, checksum: int) -> ChunkHeader:
        """Send a segment at the level that pays; the checksum becomes that of what the receiver will decode."""
        staging = self._stagings[piece.header.group]
        pages, first = slot.payload[: piece.nbytes], piece.offset // staging.unit_nbytes
        level, payload = compressor.compress(piece.header, first, pages, piece.header.nbytes - piece.offset)
        if level:
            decoded = staging.extend(piece.header.checksum, pages, piece.nbytes)
            checksum = checksum if decoded is None else decoded
            pages[: len(payload)] = np.frombuffer(payload, dtype=np.uint8)
            piece = msgspec.structs.replace(piece, level=level, coded_nbytes=len(payload))
        header = self._send_piece(slot, piece, checksum)
        compressor.sent(piece.wire_nbytes)
        return header


def check_sendable(header: ChunkHeader) -> None:
    """Raise ValueError now, in the caller's thread, if the header would not fit in front of a segment."""
    full = msgspec.structs.replace(header, checksum=0xFFFF_FFFF_FFFF_FFFF, loss=max(LEVELS, key=len))
    write_meta(
        KVSegment(full, header.nbytes, header.nbytes, True, max(LEVELS, key=len), header.nbytes),
        np.zeros(META_NBYTES, dtype=np.uint8),
    )
