"""The receiving half of a link, with a thread of its own.

It checks segments in staging before it copies them to granted pages.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from contracts.handoff import ChunkHeader, Commit
from kv_transfer.chunks import checksum as integrity
from kv_transfer.chunks.device_pool import PageScatter
from kv_transfer.chunks.segment import KVSegment, read_meta
from kv_transfer.data_path.grant import GrantTable
from kv_transfer.data_path.sender import Key
from kv_transfer.data_path.staging import Staging
from kv_transfer.transports.base import Inbound, Slot, Taking


@dataclass(slots=True)
class ChunkAssembly:
    """A chunk whose segments are arriving.

    `units`: where it goes, see staging; None if the chunk is discarded. `sums`: of what its pages hold so far, if that
    is compared in the end.
    """

    header: ChunkHeader
    units: np.ndarray | None
    offset: int
    checksum: int
    sums: list[np.ndarray] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.header.request_id, self.header.epoch

    def continues(self, piece: KVSegment) -> bool:
        ours, theirs = self.header, piece.header
        return piece.offset == self.offset > 0 and (ours.request_id, ours.epoch, ours.index, ours.nbytes) == (
            theirs.request_id,
            theirs.epoch,
            theirs.index,
            theirs.nbytes,
        )


class Receiver:
    """A receiver that writes segments to pages until the channel breaks; the callbacks run in its thread."""

    def __init__(
        self,
        landings: GrantTable,
        staging: Staging,
        channel: Inbound,
        commit: Callable[[Commit], None],
        on_landed: Callable[[ChunkHeader], None],
        on_bad: Callable[[ChunkHeader, str], None],
        on_drained: Callable[[Key], None],
    ) -> None:
        self._grants, self._staging, self._channel = landings, staging, channel
        self._commit, self._on_landed, self._on_bad, self._on_drained = commit, on_landed, on_bad, on_drained
        self._arrival: ChunkAssembly | None = None
        self._being_written: deque[np.ndarray] = deque()  # the units of its chunk, for each segment
        self.nbytes = self.num_chunks = self.num_bad = self.num_stale = 0
        self.busy_s = 0.0

    def run(self) -> None:
        """Receive until the channel breaks.

        Raises PeerLost when the channel broke, Corrupt when sender and receiver have lost step, TransferError when a
        device failed.
        """
        self._staging.enter()
        while True:
            self._channel.receive(self._take)

    def stop(self) -> None:
        """Do nothing: `run` waits only for the channel, which is interrupted."""

    def _take(self, slot: Slot) -> Taking | None:
        start = time.perf_counter()
        taking = self._put(slot, read_meta(slot.meta))
        self.busy_s += time.perf_counter() - start
        return taking

    def _put(self, slot: Slot, piece: KVSegment) -> Taking | None:
        arrival = self._arrival
        if arrival is None or not arrival.continues(piece):
            if not piece.is_after_cut:
                self._cut_short()
            arrival = self._arrival = self._begin(piece)
        taking = None
        if arrival.units is not None:
            if reason := self._check(arrival, piece, slot):
                self._bad(arrival, piece.header, reason)
            else:
                taking = self._land(arrival, piece, slot)
        arrival.offset += piece.nbytes
        if piece.is_last:
            self._arrival = None
        return taking

    def _begin(self, piece: KVSegment) -> ChunkAssembly:
        """Decide by the header whether this chunk may be written."""
        header = piece.header
        arrival = ChunkAssembly(header, None, piece.offset, integrity.seed(header.epoch))
        landing = self._grants.find(arrival.key)
        if landing is None:
            self.num_stale += 1
            return arrival
        reason = "its first bytes are missing" if piece.offset else landing.check(header)
        units = self._staging.units(landing.pages(header)) if not reason else None
        if units is not None and any(np.isin(units, others).any() for others in self._being_written):
            reason = "pages of it are being written"
        if reason:
            self._bad(arrival, header, reason)
        else:
            arrival.units = units
        return arrival

    def _check(self, arrival: ChunkAssembly, piece: KVSegment, slot: Slot) -> str | None:
        """Return why this segment must not be written, or None."""
        unit_nbytes = self._staging.unit_nbytes
        if piece.nbytes <= 0 or piece.nbytes % unit_nbytes or piece.nbytes > len(slot.payload):
            return f"a message of {piece.nbytes} bytes; pages are {unit_nbytes}"
        if piece.offset + piece.nbytes > arrival.header.nbytes:
            return f"more bytes came than the {arrival.header.nbytes} announced"
        checksum = self._staging.extend(arrival.checksum, slot.payload, piece.nbytes)
        if checksum is not None:
            arrival.checksum = checksum
            if checksum != piece.header.checksum:
                return f"checksum differs in the bytes up to {piece.offset + piece.nbytes}"
        return None

    def _land(self, arrival: ChunkAssembly, piece: KVSegment, slot: Slot) -> Taking | None:
        assert arrival.units is not None
        if not self._grants.enter(arrival.key):
            arrival.units = None
            return None
        # No `leave` if the device fails, which ends the link.
        first, size = piece.offset // self._staging.unit_nbytes, piece.nbytes // self._staging.unit_nbytes
        unpacking = self._staging.unpack(slot.payload, arrival.units[first : first + size])
        if unpacking is not None:
            self._being_written.append(arrival.units)
            return Taking(unpacking, partial(self._finish, arrival, piece, unpacking))
        self._written(arrival, piece, None)
        return None

    def _finish(self, arrival: ChunkAssembly, piece: KVSegment, unpacking: PageScatter) -> None:
        start = time.perf_counter()
        sums = unpacking.wait()
        self._being_written.popleft()
        self._written(arrival, piece, sums)
        self.busy_s += time.perf_counter() - start

    def _written(self, arrival: ChunkAssembly, piece: KVSegment, sums: np.ndarray | None) -> None:
        """Record that the pages hold this segment.

        Other segments of its chunk, and of later chunks, may still be being copied to their pages.
        """
        reason = self._compare(arrival, piece, sums) if sums is not None else None
        if self._grants.leave(arrival.key):
            self._on_drained(arrival.key)
        elif self._grants.find(arrival.key) is None:
            return  # the attempt has ended, and another of its segments is not written yet
        elif reason:
            self._bad(arrival, piece.header, reason)
        elif piece.is_last:
            self._landed(piece.header)

    def _compare(self, arrival: ChunkAssembly, piece: KVSegment, sums: np.ndarray) -> str | None:
        """Return why the pages do not hold the chunk, or None; compared at its last segment only."""
        arrival.sums.append(sums)
        if not piece.is_last:
            return None
        found = integrity.of_pages(piece.header.epoch, np.concatenate(arrival.sums))
        return "checksum differs" if found != piece.header.checksum else None

    def _landed(self, header: ChunkHeader) -> None:
        """Count a chunk that arrived, and send Commit if it was the last, as PullReceiver does."""
        self.num_chunks += 1
        self.nbytes += header.nbytes
        if commit := self._grants.chunk_received(header):
            self._commit(commit)
        self._on_landed(header)

    def _bad(self, arrival: ChunkAssembly, header: ChunkHeader, reason: str) -> None:
        arrival.units = None
        self.num_bad += 1
        self._on_bad(header, reason)

    def _cut_short(self) -> None:
        """Report the chunk before the next one as bad if it is not whole, unless its attempt is over."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None and arrival.units is not None and self._grants.find(arrival.key):
            self._bad(arrival, arrival.header, f"only {arrival.offset} of {arrival.header.nbytes} bytes came")
