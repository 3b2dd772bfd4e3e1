"""The receiving half of a link, with a thread of its own.

It checks segments in staging before it copies them to granted pages.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from contracts.errors import Corrupt
from contracts.handoff import ChunkHeader, Commit
from contracts.kv_loss import EXACT, UNCHECKED, joined
from kv_transfer.chunks import checksum as integrity
from kv_transfer.chunks.device_pool import PageScatter
from kv_transfer.chunks.wire_format import KVSegment, read_meta
from kv_transfer.codecs.level import loss_of
from kv_transfer.data_path.compression import SegmentCodec
from kv_transfer.data_path.grant import GrantTable
from kv_transfer.data_path.sender import Key
from kv_transfer.data_path.staging import Staging
from kv_transfer.transports.base import Inbound, Slot, Taking


@dataclass(slots=True)
class ChunkAssembly:
    """A chunk whose segments are arriving.

    `units`: where it goes, see staging; None if the chunk is discarded. `sums`: of what its pages hold so far, if that
    is compared in the end. `loss`: of what came, see contracts.kv_loss.
    """

    header: ChunkHeader
    units: np.ndarray | None
    offset: int
    checksum: int
    sums: list[np.ndarray] = field(default_factory=list[np.ndarray])
    loss: str = EXACT

    @property
    def key(self) -> Key:
        return self.header.request_id, self.header.epoch

    def continues(self, segment: KVSegment) -> bool:
        return segment.offset == self.offset > 0 and _same_chunk(self.header, segment.header)


def _same_chunk(one: ChunkHeader, other: ChunkHeader) -> bool:
    """Return whether two segments' headers, whose checksums may differ, are of one chunk."""
    is_same_place = (one.index, one.group, one.nbytes) == (other.index, other.group, other.nbytes)
    return is_same_place and (one.request_id, one.epoch) == (other.request_id, other.epoch)


class Receiver:
    """A receiver that writes segments to pages until the channel breaks; the callbacks run in its thread."""

    def __init__(
        self,
        grants: GrantTable,
        stagings: Sequence[Staging],
        channel: Inbound,
        commit: Callable[[Commit], None],
        on_arrived: Callable[[ChunkHeader], None],
        on_bad: Callable[[ChunkHeader, str], None],
        on_drained: Callable[[Key], None],
        codec: SegmentCodec | None = None,
    ) -> None:
        self._grants, self._stagings, self._channel = grants, stagings, channel
        self._commit, self._on_arrived, self._on_bad, self._on_drained = commit, on_arrived, on_bad, on_drained
        self._codec, self._decoded = codec, np.empty(0, dtype=np.uint8)
        self._assembly: ChunkAssembly | None = None
        self._being_written: deque[tuple[int, np.ndarray]] = deque()  # a segment's group, and the units of its chunk
        self.nbytes = self.num_chunks = self.num_bad = self.num_stale = 0
        self.busy_s = 0.0

    def run(self) -> None:
        """Receive until the channel breaks.

        Raises PeerLost when the channel broke, Corrupt when sender and receiver have lost step, TransferError when a
        device failed.
        """
        for staging in self._stagings:
            staging.enter()
        while True:
            self._channel.receive(self._take)

    def stop(self) -> None:
        """Do nothing: `run` waits only for the channel, which is interrupted."""

    def _take(self, slot: Slot) -> Taking | None:
        start = time.perf_counter()
        taking = self._put(slot, read_meta(slot.meta))
        self.busy_s += time.perf_counter() - start
        return taking

    def _put(self, slot: Slot, segment: KVSegment) -> Taking | None:
        assembly = self._assembly
        if assembly is None or not assembly.continues(segment):
            if not segment.is_after_cut:
                self._cut_short()
            assembly = self._assembly = self._begin(segment)
        taking = None
        if assembly.units is not None:
            try:
                payload = self._payload(assembly, segment, slot)
                self._check(assembly, segment, payload)
            except Corrupt as error:
                self._bad(assembly, segment.header, str(error))
            else:
                taking = self._write(assembly, segment, payload)
        assembly.offset += segment.nbytes
        if segment.is_last:
            self._assembly = None
        return taking

    def _begin(self, segment: KVSegment) -> ChunkAssembly:
        """Decide by the header whether this chunk may be written."""
        header = segment.header
        assembly = ChunkAssembly(header, None, segment.offset, integrity.seed(header.epoch, header.group))
        granted = self._grants.find(assembly.key)
        if granted is None:
            self.num_stale += 1
            return assembly
        reason = "its first bytes are missing" if segment.offset else granted.check(header)
        if not reason:  # else the group may be none of the layout's
            assembly.loss = joined(header.loss, EXACT if self._stagings[header.group].checks else UNCHECKED)
        units = self._stagings[header.group].units(granted.pages(header)) if not reason else None
        if units is not None and self._is_being_written(header.group, units):
            reason = "pages of it are being written"
        if reason:
            self._bad(assembly, header, reason)
        else:
            assembly.units = units
        return assembly

    def _is_being_written(self, group: int, units: np.ndarray) -> bool:
        return any(group == other and np.isin(units, others).any() for other, others in self._being_written)

    def _payload(self, assembly: ChunkAssembly, segment: KVSegment, slot: Slot) -> Any:
        """Return the bytes of a segment, decoded. Raises Corrupt if their number or their code is wrong."""
        unit_nbytes = self._stagings[assembly.header.group].unit_nbytes
        if segment.nbytes <= 0 or segment.nbytes % unit_nbytes or segment.nbytes > len(slot.payload):
            raise Corrupt(f"a message of {segment.nbytes} bytes; pages are {unit_nbytes}")
        if segment.offset + segment.nbytes > assembly.header.nbytes:
            raise Corrupt(f"more bytes came than the {assembly.header.nbytes} announced")
        if not segment.level:
            if self._codec is not None:
                self._codec.count("", segment.nbytes, segment.nbytes, 0.0)
            return slot.payload
        if self._codec is None or segment.level not in self._codec.levels:
            raise Corrupt(f"level '{segment.level}' of compression was not agreed")
        if len(self._decoded) < segment.nbytes:
            self._decoded = np.empty(len(slot.payload), dtype=np.uint8)
        coded, decoded = slot.payload[: segment.coded_nbytes], self._decoded[: segment.nbytes]
        start = time.perf_counter()
        self._codec.decode(assembly.header, segment.offset // unit_nbytes, coded, decoded)
        self._codec.count(segment.level, segment.nbytes, segment.coded_nbytes, time.perf_counter() - start)
        assembly.loss = joined(assembly.loss, loss_of(segment.level))
        return decoded

    def _check(self, assembly: ChunkAssembly, segment: KVSegment, payload: Any) -> None:
        """Raise Corrupt if the checksum up to this segment, which is in no page yet, is not the sender's."""
        checksum = self._stagings[assembly.header.group].extend(assembly.checksum, payload, segment.nbytes)
        if checksum is not None:
            assembly.checksum = checksum
            if checksum != segment.header.checksum:
                raise Corrupt(f"checksum differs in the bytes up to {segment.offset + segment.nbytes}")

    def _write(self, assembly: ChunkAssembly, segment: KVSegment, payload: Any) -> Taking | None:
        assert assembly.units is not None
        if not self._grants.enter(assembly.key):
            assembly.units = None
            return None
        # No `leave` if the device fails, which ends the link.
        group, staging = assembly.header.group, self._stagings[assembly.header.group]
        first, size = segment.offset // staging.unit_nbytes, segment.nbytes // staging.unit_nbytes
        unpacking = staging.unpack(payload, assembly.units[first : first + size])
        if unpacking is not None:
            self._being_written.append((group, assembly.units))
            return Taking(unpacking, partial(self._finish, assembly, segment, unpacking))
        self._written(assembly, segment, None)
        return None

    def _finish(self, assembly: ChunkAssembly, segment: KVSegment, unpacking: PageScatter) -> None:
        start = time.perf_counter()
        sums = unpacking.wait()
        self._being_written.popleft()
        self._written(assembly, segment, sums)
        self.busy_s += time.perf_counter() - start

    def _written(self, assembly: ChunkAssembly, segment: KVSegment, sums: np.ndarray | None) -> None:
        """Record that the pages hold this segment.

        Other segments of its chunk, and of later chunks, may still be being copied to their pages.
        """
        reason = self._compare(assembly, segment, sums) if sums is not None else None
        if self._grants.leave(assembly.key):
            self._on_drained(assembly.key)
        elif self._grants.find(assembly.key) is None:
            return  # the attempt has ended, and another of its segments is not written yet
        elif reason:
            self._bad(assembly, segment.header, reason)
        elif segment.is_last:
            self._count_arrived(msgspec.structs.replace(segment.header, loss=assembly.loss))

    def _compare(self, assembly: ChunkAssembly, segment: KVSegment, sums: np.ndarray) -> str | None:
        """Return why the pages do not hold the chunk, or None; compared at its last segment only."""
        assembly.sums.append(sums)
        if not segment.is_last:
            return None
        found = integrity.of_pages(segment.header.epoch, np.concatenate(assembly.sums), segment.header.group)
        return "checksum differs" if found != segment.header.checksum else None

    def _count_arrived(self, header: ChunkHeader) -> None:
        """Count a chunk that arrived, and send Commit if it was the last, as PullReceiver does."""
        self.num_chunks += 1
        self.nbytes += header.nbytes
        if commit := self._grants.chunk_received(header):
            self._commit(commit)
        self._on_arrived(header)

    def _bad(self, assembly: ChunkAssembly, header: ChunkHeader, reason: str) -> None:
        assembly.units = None
        self.num_bad += 1
        self._on_bad(header, reason)

    def _cut_short(self) -> None:
        """Report the chunk before the next one as bad if it is not whole, unless its attempt is over."""
        assembly, self._assembly = self._assembly, None
        if assembly is not None and assembly.units is not None and self._grants.find(assembly.key):
            self._bad(assembly, assembly.header, f"only {assembly.offset} of {assembly.header.nbytes} bytes came")
