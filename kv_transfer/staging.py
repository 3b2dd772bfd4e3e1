"""Between pages and the payloads of a channel's slots: by the host's hands, or by a device's kernels.

A chunk is a row of units, in the order of its bytes; a message carries whole units.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from contracts.handoff import ChunkHeader
from contracts.ids import BlockId, Epoch
from contracts.layout import KVLayout
from kv_transfer import integrity, plan
from kv_transfer.device import DevicePool, Pool
from kv_transfer.frames import Terms
from kv_transfer.transports.base import Channel, DeviceChannel, Ring


class Staging(Protocol):
    """One end of one channel, used by its data thread. Raises TransferError where a device fails."""

    unit_nbytes: int
    units_per_message: int

    def enter(self) -> None:
        """The calling thread is the one that moves data from now on."""
        ...

    def units(self, pages: Sequence[BlockId]) -> np.ndarray:
        """Those of a chunk."""
        ...

    def begin(self, header: ChunkHeader) -> ChunkHeader:
        """Of what the peer gets, before anything is packed."""
        ...

    def pack(self, units: np.ndarray, payload: Any, checksum: int) -> int:
        """Copy `units` to the start of the payload; their pages may change afterwards. Returns the checksum to say with
        these bytes.
        """
        ...

    def extend(self, checksum: int, payload: Any, nbytes: int) -> int | None:
        """The checksum up to these bytes, which came and are not in any page yet; None if nothing is to be compared
        now.
        """
        ...

    def unpack(self, payload: Any, units: np.ndarray) -> np.ndarray | None:
        """The pages hold it on return. Returns what they hold by integrity.of_pages, if that is to be compared when the
        chunk is whole.
        """
        ...


def sender_staging(channel: Channel, pool: Pool, ring: Ring, ours: Terms, theirs: Terms) -> Staging:
    """Rounds where the layouts differ, see conversion."""
    if isinstance(channel, DeviceChannel) and ours.layout != theirs.layout:
        return NarrowingStaging(channel.pool, channel.slot_nbytes, theirs.layout, theirs.plane_scales)
    return staging_of(channel, pool, ring, receiver=theirs.checksum, sender=ours.checksum)


def staging_of(channel: Channel, pool: Pool, ring: Ring, receiver: bool, sender: bool) -> Staging:
    """`receiver`, `sender`: who wants checksums. A device's are made where KV is computed, so its
    sender decides.
    """
    if isinstance(channel, DeviceChannel):
        return DeviceStaging(channel.pool, channel.slot_nbytes, sender)
    return HostStaging(pool, ring.slot_nbytes, receiver or sender)


class HostStaging:
    """Units are pages of one plane, plane by plane. Checksums run over the bytes in the slots, while they are warm in
    the caches: nothing that is wrong reaches a page.
    """

    def __init__(self, pool: Pool, slot_nbytes: int, checks: bool) -> None:
        self._pool, self._checks = pool, checks
        self.unit_nbytes = pool.page_nbytes
        self.units_per_message = slot_nbytes // self.unit_nbytes

    def enter(self) -> None:
        """Any thread can."""

    def units(self, pages: Sequence[BlockId]) -> np.ndarray:
        return plan.row_ids(pages, self._pool.num_planes, self._pool.num_blocks)

    def begin(self, header: ChunkHeader) -> ChunkHeader:
        return msgspec.structs.replace(header, checksum=integrity.seed(header.epoch))

    def pack(self, units: np.ndarray, payload: np.ndarray, checksum: int) -> int:
        bytes_ = payload[: len(units) * self.unit_nbytes]
        self._pool.gather(units, bytes_)
        return integrity.extend(checksum, bytes_) if self._checks else checksum

    def extend(self, checksum: int, payload: np.ndarray, nbytes: int) -> int | None:
        return integrity.extend(checksum, payload[:nbytes]) if self._checks else None

    def unpack(self, payload: np.ndarray, units: np.ndarray) -> None:
        self._pool.scatter(units, payload[: len(units) * self.unit_nbytes])


class DeviceStaging:
    """Units are blocks, all planes of each, in token order; the payloads are a device's memory and the host touches
    none of it. The checksum is the one that was taken where the pages were computed, compared with what decode's pages
    hold in the end: the whole way is covered, packing included.
    """

    def __init__(self, pool: DevicePool, slot_nbytes: int, checks: bool) -> None:
        self._pool, self._checks = pool, checks
        self.unit_nbytes = pool.num_planes * pool.page_nbytes
        self.units_per_message = slot_nbytes // self.unit_nbytes

    def enter(self) -> None:
        self._pool.enter()

    def units(self, pages: Sequence[BlockId]) -> np.ndarray:
        return np.asarray(pages, dtype=np.int32)

    def begin(self, header: ChunkHeader) -> ChunkHeader:
        return header

    def pack(self, units: np.ndarray, payload: Any, checksum: int) -> int:
        self._pool.pack(units, payload)
        return checksum

    def extend(self, checksum: int, payload: Any, nbytes: int) -> int | None:
        return None

    def unpack(self, payload: Any, units: np.ndarray) -> np.ndarray | None:
        return self._pool.unpack(payload, units, self._checks)


class NarrowingStaging(DeviceStaging):
    """The sender's, whose peer has pages of this other `layout`: each plane is divided by the peer's scale and rounded
    as it is packed. The checksum is of what was packed, and so known when all is.
    """

    def __init__(self, pool: DevicePool, slot_nbytes: int, layout: KVLayout, scales: Sequence[float]) -> None:
        super().__init__(pool, slot_nbytes, checks=True)
        self._layout, self._scales = layout, scales
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
        nbytes = plan.chunk_nbytes(self._layout, header.num_tokens)
        return msgspec.structs.replace(header, layout_id=self._layout.layout_id, nbytes=nbytes)

    def pack(self, units: np.ndarray, payload: Any, checksum: int) -> int:
        self._sums.append(self._pool.narrow(units, payload, self._narrowing))
        return integrity.of_pages(self._epoch, np.concatenate(self._sums))
