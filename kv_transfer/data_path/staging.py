"""The copies between pages and the payloads of a channel's slots, by the host or a device's kernels.

A chunk is a row of units, in the order of its bytes; a message carries whole units.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from contracts.handoff import ChunkHeader
from contracts.ids import BlockId, Epoch
from contracts.layout import KVLayout
from kv_transfer.chunks import checksum as integrity
from kv_transfer.chunks import chunk_plan as plan
from kv_transfer.chunks.device_pool import DevicePool, PageScatter, Pool
from kv_transfer.connection import layout_negotiation as conversion
from kv_transfer.connection.handshake_frames import Terms
from kv_transfer.transports.base import Channel, DeviceChannel, Ring
from process.timer_slack import set_timer_slack


class Staging(Protocol):
    """The staging of one group at one end of a channel, used by its data thread.

    `checks`: whether what lies in the pages in the end was compared with its checksum.

    The methods raise TransferError if a device fails.
    """

    unit_nbytes: int
    units_per_message: int
    checks: bool

    def enter(self) -> None:
        """Make the calling thread the one that moves data from now on."""
        ...

    def units(self, pages: Sequence[BlockId]) -> np.ndarray:
        """Return the units of a chunk with these pages."""
        ...

    def begin(self, header: ChunkHeader) -> ChunkHeader:
        """Return the header with which a chunk's segments start, before anything is packed."""
        ...

    def pack(self, units: np.ndarray, payload: Any, checksum: int) -> int:
        """Copy `units` to the start of the payload; return the checksum to send with these bytes.

        Their pages may change afterwards.
        """
        ...

    def extend(self, checksum: int, payload: Any, nbytes: int) -> int | None:
        """Return the checksum up to these bytes, which are in no page yet; None if it is not compared now."""
        ...

    def unpack(self, payload: Any, units: np.ndarray) -> PageScatter | None:
        """Copy the payload to the pages, on return or when the returned copy is done.

        If the copy has checksums, they are to be compared by checksum.of_pages when the chunk is whole.
        """
        ...


def sender_stagings(
    channel: Channel, pools: Sequence[Pool], groups: Sequence[int], ring: Ring, ours: Terms, theirs: Terms
) -> tuple[Staging, ...]:
    """Return the sender's staging of each of these groups.

    It rounds if the peer's number format is narrower.
    """
    if isinstance(channel, DeviceChannel) and conversion.narrows(ours.layout, theirs.layout):
        num_parts = conversion.num_parts(ours.layout, theirs.layout)
        scales = theirs.plane_scales
        return (NarrowingStaging(channel.pool, channel.slot_nbytes, theirs.layout.model_part, scales, num_parts),)
    return stagings_of(channel, pools, groups, ring, receiver=theirs, sender=ours)


def stagings_of(
    channel: Channel, pools: Sequence[Pool], groups: Sequence[int], ring: Ring, receiver: Terms, sender: Terms
) -> tuple[Staging, ...]:
    """Return the staging of each of these groups, at an end that does not round.

    `pools`: of all groups of this end. A device's checksums are made when KV is computed, so its sender decides whether
    there are any.
    """
    num_parts = conversion.num_parts(sender.layout, receiver.layout)
    if isinstance(channel, DeviceChannel):
        slot_nbytes = channel.slot_nbytes
        there = [channel.pools[group] for group in groups]
        return tuple(DeviceStaging(pool, slot_nbytes, sender.checksum, num_parts) for pool in there)
    checks = receiver.checksum or sender.checksum
    return tuple(HostStaging(pools[group], ring.slot_nbytes, checks, num_parts) for group in groups)


class HostStaging:
    """The staging whose units are parts of pages of one plane: part by part, and in each plane by plane.

    Checksums run over the bytes in the slots, while those are in the caches: corrupt bytes never reach a page.
    """

    def __init__(self, pool: Pool, slot_nbytes: int, checks: bool, num_parts: int = 1) -> None:
        self._pool, self.checks, self._num_parts = pool, checks, num_parts
        self.unit_nbytes = pool.block_nbytes // pool.num_planes // num_parts
        self.units_per_message = slot_nbytes // self.unit_nbytes

    def enter(self) -> None:
        """Do nothing: any thread can copy."""

    def units(self, pages: Sequence[BlockId]) -> np.ndarray:
        return plan.row_ids(pages, self._num_parts * self._pool.num_planes, self._pool.num_blocks)

    def begin(self, header: ChunkHeader) -> ChunkHeader:
        return msgspec.structs.replace(header, checksum=integrity.seed(header.epoch, header.group))

    def pack(self, units: np.ndarray, payload: np.ndarray, checksum: int) -> int:
        bytes_ = payload[: len(units) * self.unit_nbytes]
        self._pool.gather(units, bytes_, self._num_parts)
        return integrity.extend(checksum, bytes_) if self.checks else checksum

    def extend(self, checksum: int, payload: np.ndarray, nbytes: int) -> int | None:
        return integrity.extend(checksum, payload[:nbytes]) if self.checks else None

    def unpack(self, payload: np.ndarray, units: np.ndarray) -> None:
        self._pool.scatter(units, payload[: len(units) * self.unit_nbytes], self._num_parts)


class DeviceStaging:
    """The staging whose units are blocks in token order, with all planes of each part of a block in turn.

    The payloads are in the device's memory, and the host touches none of it. The checksum is the one that was made when
    the pages were computed, compared with what decode's pages hold in the end: it covers the whole way, packing
    included.
    """

    def __init__(self, pool: DevicePool, slot_nbytes: int, checks: bool, num_parts: int) -> None:
        self._pool, self.checks, self._num_parts = pool, checks, num_parts
        self.unit_nbytes = pool.block_nbytes
        self.units_per_message = slot_nbytes // self.unit_nbytes

    def enter(self) -> None:
        self._pool.enter()
        set_timer_slack()

    def units(self, pages: Sequence[BlockId]) -> np.ndarray:
        return np.asarray(pages, dtype=np.int32)

    def begin(self, header: ChunkHeader) -> ChunkHeader:
        return header

    def pack(self, units: np.ndarray, payload: Any, checksum: int) -> int:
        self._pool.pack(units, payload, self._num_parts)
        return checksum

    def extend(self, checksum: int, payload: Any, nbytes: int) -> int | None:
        return None

    def unpack(self, payload: Any, units: np.ndarray) -> PageScatter:
        return self._pool.unpack(payload, units, self.checks, self._num_parts)


class NarrowingStaging(DeviceStaging):
    """The staging of a sender whose peer has pages of the narrower `layout`.

    Each plane is divided by the peer's scale and rounded as it is packed. The checksum covers what was packed, and is
    known when all of the chunk is.
    """

    def __init__(
        self, pool: DevicePool, slot_nbytes: int, layout: KVLayout, scales: Sequence[float], num_parts: int
    ) -> None:
        super().__init__(pool, slot_nbytes, True, num_parts)
        self._scales = scales
        self.unit_nbytes = layout.block_nbytes
        self.units_per_message = slot_nbytes // self.unit_nbytes
        self._narrowing: Any = None
        self._sums: list[np.ndarray] = []
        self._epoch = Epoch(0)

    def enter(self) -> None:
        super().enter()
        self._narrowing = self._pool.narrowing(self._scales)

    def begin(self, header: ChunkHeader) -> ChunkHeader:
        self._epoch, self._sums = header.epoch, []
        return header

    def pack(self, units: np.ndarray, payload: Any, checksum: int) -> int:
        self._sums.append(self._pool.narrow(units, payload, self._narrowing, self._num_parts))
        return integrity.of_pages(self._epoch, np.concatenate(self._sums))
