"""Pools in the memory of a device, as a transfer needs them. The engine's adapter of that device has them; here are no
addresses.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from contracts.ids import BlockId


class Pool(Protocol):
    """Pages, one of each block in each plane. Staged transports gather them into a buffer of the host and back."""

    num_planes: int
    num_blocks: int
    page_nbytes: int

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy the pages of `rows` (see plan.row_ids) into `out`, uint8 of their total size."""
        ...

    def scatter(self, rows: np.ndarray, data: np.ndarray) -> None: ...


class RemotePool(Protocol):
    """A peer's pool, mapped into this process. `detail`: what was mapped, and how, for operators."""

    num_pages: int
    detail: str

    def pull(self, pages: Sequence[BlockId], into: Sequence[BlockId], checks: bool) -> np.ndarray | None:
        """Copy the peer's `pages` to `into`, all planes; they are there on return.

        Returns the checksums of `into` as they are then, `[pages, num_planes]` uint32, if `checks`. Raises
        TransferError.
        """
        ...

    def rehearse(self) -> None:
        """Do what a pull does, with pages that belong to nobody. Raises TransferError."""
        ...

    def close(self) -> None:
        """On return nothing reads the peer's memory, and it is unmapped. Idempotent."""
        ...


class DevicePool(Pool, Protocol):
    """`kind`: of memory; only pools of one kind can be handed over. `checks`: chunks come with checksums of their
    pages; the transfer sets it.
    """

    checks: bool

    @property
    def kind(self) -> str: ...

    def share(self) -> bytes:
        """What a peer must know to attach. Raises TransferError where the device lets nobody in."""
        ...

    def attach(self, shared: bytes) -> RemotePool:
        """Raises TransferError if the peer's pool can't be read from here, or is another shape."""
        ...
