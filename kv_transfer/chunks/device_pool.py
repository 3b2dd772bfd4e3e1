"""Pools in the memory of a device, as a transfer needs them. The engine's adapter of that device has them; here are no
addresses.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from contracts.ids import BlockId


class Pool(Protocol):
    """Pages, one of each block in each plane of each shard. Staged transports gather them into a buffer of the host and
    back.

    `num_parts`: of a page, over all shards, of which each has one or several: it is the number of the finer side's
    shards.
    """

    num_planes: int
    num_blocks: int
    page_nbytes: int
    block_nbytes: int

    def agreed(self, num_parts: int, sends: bool) -> None:
        """Pages are to go to a peer, or to come from one, in so many parts. Raises TransferError if shards can't be cut
        so.
        """
        ...

    def in_parts(self, sums: np.ndarray, pages: Sequence[BlockId], num_parts: int) -> np.ndarray:
        """The checksums of `pages` by so many parts, `[pages, num_parts * num_planes]`, out of all that were made of
        them when they were computed.
        """
        ...

    def gather(self, rows: np.ndarray, out: np.ndarray, num_parts: int = 1) -> None:
        """Copy the parts of pages of `rows` (see plan.row_ids) into `out`, uint8 of their total size."""
        ...

    def scatter(self, rows: np.ndarray, data: np.ndarray, num_parts: int = 1) -> None: ...


class DeviceSemaphore(Protocol):
    """A number that this device counts up for one peer, whose device may wait for it. `shared` finds it."""

    shared: bytes

    def set(self, value: int) -> None:
        """When all that was launched on the current stream is done."""
        ...


class DeferredCopy(Protocol):
    """Copies that wait for a mark by themselves. `is_void`: they did not wait to the end, so they are worth nothing.

    `busy_s`, after `wait`: how long copies and checksums took, without the time before the mark was reached.
    """

    is_void: bool

    @property
    def is_due(self) -> bool:
        """Their mark was reached: they are done soon."""
        ...

    @property
    def busy_s(self) -> float: ...

    @property
    def is_done(self) -> bool:
        """They write nothing any more."""
        ...

    def wait(self) -> np.ndarray | None:
        """Once, when the peer says that the mark was reached. Returns what `pull` does, when it does. Raises
        TransferError.
        """
        ...

    def drop(self) -> None:
        """It is done, and nobody will `wait`."""
        ...


class RemotePool(Protocol):
    """A peer's pool, mapped into this process. `detail`: what was mapped, and how, for operators.

    Pages come in parts, the shards of the finer of the two pools.
    """

    num_pages: int
    detail: str

    def pull(self, pages: Sequence[BlockId], into: Sequence[BlockId], checks: bool) -> np.ndarray | None:
        """Copy the peer's `pages` to `into`, all planes; they are there on return.

        Returns the checksums of `into` as they are then, `[pages, parts * num_planes]` uint32, if `checks`. Raises
        TransferError.
        """
        ...

    def pull_later(
        self, pages: Sequence[BlockId], into: Sequence[BlockId], checks: bool, early_planes: int, mark: int
    ) -> DeferredCopy | None:
        """The same, launched now; done once the peer's mark has come to `mark`, and for the first `early_planes` to one
        less. None where nothing waits for marks.
        """
        ...

    def expire(self) -> None:
        """Nothing waits for a mark any more: all that did is void, and done soon."""
        ...

    def rehearse(self) -> None:
        """Do what a pull does, but for the copies, with a page that belongs to nobody: a link that sleeps goes on
        sleeping. Raises TransferError.
        """
        ...

    def close(self) -> None:
        """On return nothing reads the peer's memory, and it is unmapped. Idempotent."""
        ...


class Buffer(Protocol):
    """Memory of a device that messages leave from and come to; `len` of bytes. Used by one thread at a time."""

    @property
    def address(self) -> int: ...

    def __len__(self) -> int: ...

    def put(self, data: np.ndarray) -> None:
        """Copy bytes of the host to its start; they are there on return."""
        ...


class PageScatter(Protocol):
    """Pages that are being copied out of a buffer."""

    @property
    def is_done(self) -> bool:
        """They are there, and the buffer is free. Raises TransferError if the device failed."""
        ...

    def wait(self) -> np.ndarray | None:
        """Until then. Returns the checksums of the pages as they are now, `[pages, num_parts * num_planes]` uint32, if
        they were asked for. Raises TransferError.
        """
        ...


class DevicePool(Pool, Protocol):
    """`kind`: of memory; only pools of one kind can be handed over. `checks`: chunks come with checksums of their
    pages; the transfer sets it. `scales`: what each plane was divided by before it was rounded to e4m3, if it was.
    """

    checks: bool
    scales: list[float]

    @property
    def kind(self) -> str: ...

    def expect(self, part_counts: Sequence[int]) -> None:
        """Peers may want pages in so many parts: what that takes is made now, and not in their handshakes. Before
        anything is computed or transferred. Raises TransferError as `agreed`.
        """
        ...

    def share(self) -> bytes:
        """What a peer must know to attach. Raises TransferError where the device lets nobody in."""
        ...

    def mark(self) -> DeviceSemaphore | None:
        """One for a new peer; None where the device can set none."""
        ...

    def enter(self) -> None:
        """The calling thread works with this device from now on."""
        ...

    def allocate(self, nbytes: int) -> Buffer:
        """Memory beside the pool: what the methods below take. Raises TransferError if the device has not so much."""
        ...

    def free(self, buffer: Any) -> None:
        """Nothing touches it any more: its memory is free on return."""
        ...

    def pack(self, pages: np.ndarray, into: Any, num_parts: int) -> None:
        """Copy `pages`, int32, each in its parts, all planes of each part in turn; they are there on return. Raises
        TransferError.
        """
        ...

    def unpack(self, buffer: Any, pages: np.ndarray, checks: bool, num_parts: int) -> PageScatter:
        """The other way round, launched on return; with checksums if `checks`."""
        ...

    def narrowing(self, scales: Sequence[float]) -> Any:
        """What `narrow` takes, for a peer whose pool is e4m3 with these scales; ours holds bf16."""
        ...

    def narrow(self, pages: np.ndarray, into: Any, narrowing: Any, num_parts: int) -> np.ndarray:
        """As `pack`, rounded as the peer would have rounded these values. Returns the checksums of what was packed,
        `[pages, num_parts * num_planes]` uint32.
        """
        ...

    def attach(self, shared: bytes, mark: bytes = b"") -> RemotePool:
        """`mark`: what a DeviceSemaphore of the peer's shares, if there is one. Raises TransferError if the peer's pool
        can't be read from here, or is another shape.
        """
        ...
