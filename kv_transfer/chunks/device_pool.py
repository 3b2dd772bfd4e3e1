"""The interfaces of KV pools in a device's memory, as a transfer needs them.

The engine's adapter of that device implements them; no addresses appear here.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from contracts.ids import BlockId


class Pool(Protocol):
    """A pool of one group's pages: one of each block in each plane of each shard.

    Staged transports gather pages into a host buffer and scatter them back. `num_parts`: parts of a page, over all
    shards, of which each has one or several: it is the number of shards of the side that has more.
    """

    num_planes: int
    num_blocks: int
    page_nbytes: int
    block_nbytes: int

    def agreed(self, num_parts: int, sends: bool) -> None:
        """Prepare to send pages to a peer, or to receive them, in this many parts.

        Raises TransferError if shards can't be cut so.
        """
        ...

    def in_parts(self, sums: np.ndarray, pages: Sequence[BlockId], num_parts: int) -> np.ndarray:
        """Return the checksums of `pages` by parts, `[pages, num_parts * num_planes]`.

        `sums`: all checksums that were made of the pages when they were computed.
        """
        ...

    def gather(self, rows: np.ndarray, out: np.ndarray, num_parts: int = 1) -> None:
        """Copy the parts of pages of `rows` (see chunk_plan.row_ids) into `out`, uint8 of their total size."""
        ...

    def scatter(self, rows: np.ndarray, data: np.ndarray, num_parts: int = 1) -> None: ...


class DeviceSemaphore(Protocol):
    """A counter that this device raises for one peer, whose device may wait for it.

    `shared`: what the peer needs to find it.
    """

    shared: bytes

    def set(self, value: int) -> None:
        """Set the value when all that was launched on the current stream is done."""
        ...


class DeferredCopy(Protocol):
    """Copies that wait for a mark by themselves.

    `is_void`: they did not wait to the end, so their result is worthless. `busy_s`, valid after `wait`: seconds that
    copies and checksums took, without the time before the mark was reached.
    """

    is_void: bool

    @property
    def is_due(self) -> bool:
        """Return whether their mark was reached, so that they are done soon."""
        ...

    @property
    def busy_s(self) -> float: ...

    @property
    def is_done(self) -> bool:
        """Return whether they write nothing any more."""
        ...

    def wait(self) -> np.ndarray | None:
        """Wait for the copies and return what `RemotePool.pull` returns. Raises TransferError.

        Called once, when the peer reports that the mark was reached.
        """
        ...

    def drop(self) -> None:
        """Release copies that are done and whose result is not wanted."""
        ...


class RemotePool(Protocol):
    """A peer's pool, mapped into this process.

    `detail`: what was mapped, and how, for operators. Pages are copied in parts, the shards of the pool that has more
    of them.
    """

    num_pages: int
    detail: str

    def pull(self, pages: Sequence[BlockId], into: Sequence[BlockId], checks: bool) -> np.ndarray | None:
        """Copy the peer's `pages` to `into`, all planes; they are there on return.

        Returns the checksums of `into` as they are then, uint32 `[pages, parts * num_planes]`, if `checks`. Raises
        TransferError.
        """
        ...

    def pull_later(
        self, pages: Sequence[BlockId], into: Sequence[BlockId], checks: bool, early_planes: int, mark: int
    ) -> DeferredCopy | None:
        """Launch the same copies now, to run once the peer's mark has reached `mark`.

        The first `early_planes` wait for `mark - 1` only. Returns None where the device can't wait for marks.
        """
        ...

    def expire(self) -> None:
        """Stop every wait for a mark: the copies that waited are void, and done soon."""
        ...

    def close(self) -> None:
        """Unmap the peer's memory; nothing reads it any more on return. Idempotent."""
        ...


class Buffer(Protocol):
    """A piece of device memory that messages are sent from and received into.

    `len` gives its bytes. It is used by one thread at a time.
    """

    @property
    def address(self) -> int: ...

    def __len__(self) -> int: ...

    def put(self, data: np.ndarray) -> None:
        """Copy bytes of the host to its start; they are there on return."""
        ...


class PageScatter(Protocol):
    """A copy of pages out of a buffer that is under way."""

    @property
    def is_done(self) -> bool:
        """Return whether the pages are there and the buffer is free.

        Raises TransferError if the device failed.
        """
        ...

    def wait(self) -> np.ndarray | None:
        """Wait until the pages are there. Raises TransferError.

        Returns the checksums of the pages as they are now, uint32 `[pages, num_parts * num_planes]`, if they were
        requested.
        """
        ...


class DevicePool(Pool, Protocol):
    """A pool of one group in a device's memory; those of all groups are on one device.

    `kind`: of memory; handoffs need pools of one kind. `checks`: chunks come with checksums of their pages; the
    transfer sets it. `scales`: what each plane was divided by before it was rounded to e4m3; empty if it was not.
    """

    checks: bool
    scales: list[float]

    @property
    def kind(self) -> str: ...

    def expect(self, part_counts: Sequence[int]) -> None:
        """Prepare for peers that want pages in these numbers of parts, ahead of their handshakes.

        Called before anything is computed or transferred. Raises TransferError as `agreed` does.
        """
        ...

    def share(self) -> bytes:
        """Return what a peer needs to attach. Raises TransferError where the device can't be shared."""
        ...

    def mark(self) -> DeviceSemaphore | None:
        """Return a semaphore for a new peer, or None where the device can set none."""
        ...

    def enter(self) -> None:
        """Make the calling thread ready to work with this device."""
        ...

    def allocate(self, nbytes: int) -> Buffer:
        """Allocate memory outside the pool for the methods below. Raises TransferError if it does not suffice."""
        ...

    def free(self, buffer: Any) -> None:
        """Free a buffer that nothing uses any more; its memory is free on return."""
        ...

    def pack(self, pages: np.ndarray, into: Any, num_parts: int) -> None:
        """Copy `pages`, int32, to the buffer; they are there on return. Raises TransferError.

        The order is page by page, part by part, and all planes of each part in turn.
        """
        ...

    def unpack(self, buffer: Any, pages: np.ndarray, checks: bool, num_parts: int) -> PageScatter:
        """Launch the copies out of the buffer into `pages`, with checksums if `checks`."""
        ...

    def narrowing(self, scales: Sequence[float]) -> Any:
        """Return what `narrow` takes for a peer whose pool is e4m3 with these scales; this pool holds bf16."""
        ...

    def narrow(self, pages: np.ndarray, into: Any, narrowing: Any, num_parts: int) -> np.ndarray:
        """Pack the pages as `pack` does, rounded as the peer would have rounded these values.

        Returns the checksums of what was packed, uint32 `[pages, num_parts * num_planes]`.
        """
        ...

    def attach(self, shared: bytes, mark: bytes = b"") -> RemotePool:
        """Map a peer's pool. Raises TransferError if it can't be read from here, or has another shape.

        `mark`: `shared` of the DeviceSemaphore that the peer made for this node, if it made one.
        """
        ...
