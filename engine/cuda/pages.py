"""The cache as a transfer to another process sees it: pages that the peer's copy engine reads, and their checksums.

Two streams meet here. A chunk's checksums are launched behind the chunk on the engine's own; pages are pulled on a
stream of the transfer's, and are complete when `pull` returns.
"""

import threading
import time
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from contracts.errors import TransferError
from contracts.layout import KVLayout
from engine.cuda.checksums import Checksums, Verifier
from engine.cuda.memory import Grid, Memory, attach, synchronize
from kernels.registry import Registry
from kernels.specs import MoveSpec

_NUM_PROBES = 16


class Sharing(msgspec.Struct, frozen=True):
    """A pool in words: `memory` opens it, `device` is its GPU's name, `num_pages` those of one plane."""

    memory: bytes
    device: str
    num_planes: int
    num_pages: int
    page_nbytes: int


class DevicePages:
    """kv_transfer.device.DevicePool over the cache's memory, `[num_planes, num_blocks + 1, page_nbytes]`.

    `checks`: chunks that are handed over get checksums.
    """

    def __init__(self, memory: Memory, layout: KVLayout, num_blocks: int, registry: Registry) -> None:
        self.memory = memory
        self.num_planes, self.num_blocks, self.page_nbytes = layout.num_planes, num_blocks, layout.page_nbytes
        self.device = memory.tensor.device
        self.checks = True
        self._staging = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._planes = memory.tensor.view(self.num_planes, num_blocks + 1, self.page_nbytes)
        spec = MoveSpec(self.num_planes, self.page_nbytes, checksum=True)
        self._sum = partial(registry.get("kv_sums", spec), self._planes)
        self._is_kernel = registry.resolve("kv_sums", spec).impl.name == "triton"
        self.verifier = Verifier(self._sum, self.num_planes, num_blocks, self.device)

    @property
    def kind(self) -> str:
        return self.device.type

    @property
    def grid(self) -> Grid:
        return Grid(self.page_nbytes, self.num_planes, self._planes.stride(0))

    def share(self) -> bytes:
        """Raises TransferError where the device does not let others in."""
        sharing = Sharing(
            self.memory.share(), _name(self.device), self.num_planes, self._planes.shape[1], self.page_nbytes
        )
        return msgspec.msgpack.encode(sharing)

    def attach(self, shared: bytes) -> "RemotePages":
        """A peer's pool, from what its `share` said. Raises TransferError if it can't be read from here."""
        try:
            sharing = msgspec.msgpack.decode(shared, type=Sharing)
        except msgspec.DecodeError as error:
            raise TransferError(f"the peer does not say where its pages are: {error}") from error
        return RemotePages(self, sharing)

    def checksums(self, pages: SequenceOf[int]) -> Checksums:
        """Launched on the current stream, behind what writes these pages."""
        sums = Checksums(self._sum, self.num_planes, len(pages), self.device)
        sums.launch(pages)
        return sums

    def warm_up(self) -> None:
        """Compile what there is for numbers of units that are multiples of 16 and that are not."""
        for count in (1, 4, 16):
            self.checksums(range(min(count, self.num_blocks))).wait()
        if self._is_kernel:
            self.verifier.capture()

    @torch.inference_mode()
    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy pages into `out` on the host; `rows` as kv_transfer.plan.row_ids counts them."""
        with self._aside():
            found = self._planes.view(-1, self.page_nbytes).index_select(0, self._index(rows))
            torch.from_numpy(out.reshape(-1, self.page_nbytes)).copy_(found)

    @torch.inference_mode()
    def scatter(self, rows: np.ndarray, data: np.ndarray) -> None:
        with self._aside():
            pages = torch.from_numpy(data.reshape(-1, self.page_nbytes)).to(self.device)
            self._planes.view(-1, self.page_nbytes).index_copy_(0, self._index(rows), pages)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def _index(self, rows: np.ndarray) -> Tensor:
        """Each plane has a page more than blocks."""
        return torch.from_numpy(rows + rows // self.num_blocks).to(self.device)

    def _aside(self) -> AbstractContextManager[object]:
        """Beside the engine's stream, for any thread."""
        return torch.cuda.stream(self._staging) if self._staging is not None else nullcontext()


class RemotePages:
    """A peer's pool, mapped here. One thread pulls at a time."""

    def __init__(self, ours: DevicePages, sharing: Sharing) -> None:
        self._grid = Grid(sharing.page_nbytes, sharing.num_planes, sharing.page_nbytes * sharing.num_pages)
        if (self._grid.width, self._grid.height) != (ours.grid.width, ours.grid.height):
            raise TransferError(f"the peer's pages are {self._grid}, ours {ours.grid}")
        self._ours, self.num_pages = ours, sharing.num_pages
        # Of high priority: the checksums come before what decode has launched.
        self._stream = torch.cuda.Stream(ours.device, priority=-1) if ours.device.type == "cuda" else None
        self._thread = 0
        self._mapping = attach(sharing.memory, ours.device)
        where = "on one GPU" if sharing.device == _name(ours.device) else "between two GPUs"
        self.detail = f"pulled {where}, {self._probe() / 1e9:.0f} GB/s"

    def pull(self, pages: SequenceOf[int], into: SequenceOf[int], checks: bool) -> np.ndarray | None:
        """Copy the peer's `pages` to `into`; they are there on return. Returns their checksums if `checks`.

        The calling thread keeps this pool's stream as its own. Raises TransferError.
        """
        ours = self._ours
        if self._stream is not None and self._thread != threading.get_ident():
            torch.cuda.set_stream(self._stream)
            self._thread = threading.get_ident()
        self._mapping.copy_pages(self._grid, pages, ours.memory.tensor, ours.grid, into)
        if checks:
            return ours.verifier.sums(into)
        if self._stream is not None:
            synchronize(self._stream.cuda_stream)
        return None

    def rehearse(self) -> None:
        """Pull what belongs to nobody: the next pull finds the caches as it needs them."""
        self.pull([self.num_pages - 1], [self._ours.num_blocks], True)

    def close(self) -> None:
        """Waits for what was launched. Idempotent."""
        if self._stream is not None:
            self._stream.synchronize()
        self._mapping.close()

    def _probe(self) -> float:
        """Bytes a second of the way that is really taken, between the pages that belong to nobody. Opens it, too."""
        spare = [self.num_pages - 1] * _NUM_PROBES
        into = [self._ours.num_blocks] * _NUM_PROBES
        took_s = []
        for _ in range(4):  # the first one pays for what is opened
            begin = time.perf_counter()
            self.pull(spare, into, False)
            took_s.append(time.perf_counter() - begin)
        return _NUM_PROBES * self._grid.width * self._grid.height / min(took_s)


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "host"
