"""The cache as a transfer to another process sees it: pages that the peer's copy engine reads, and their checksums.

Two streams meet here. A chunk's checksums are launched behind the chunk on the engine's own; pages are pulled on a
stream of the transfer's, and are complete when `pull` returns.
"""

import time
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext

import msgspec
import numpy as np
import torch
from torch import Tensor

from contracts.errors import TransferError
from contracts.layout import KVLayout
from engine.cuda.memory import Grid, Memory, attach
from kernels.reference.move import STRIDE
from kernels.registry import Registry
from kernels.specs import MoveSpec

_NUM_PROBES, _MANY_PAGES = 16, 128


class Sharing(msgspec.Struct, frozen=True):
    """A pool in words: `memory` opens it, `device` is its GPU's name, `num_pages` those of one plane."""

    memory: bytes
    device: str
    num_planes: int
    num_pages: int
    page_nbytes: int


class Checksums:
    """`[pages, planes]` on their way to the host. The buffers are of the pages' device and of the host."""

    def __init__(self, pool: "DevicePages", max_pages: int) -> None:
        device, units = pool.device, max_pages * pool.num_planes
        self._pool, self._num_pages, self.max_pages = pool, 0, max_pages
        self._pages, self._pages_host = (
            torch.empty(max_pages, dtype=torch.int32, device=device),
            _pinned(max_pages, device),
        )
        self._sums, self._sums_host = torch.empty(units, dtype=torch.int32, device=device), _pinned(units, device)
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    @torch.inference_mode()
    def launch(self, pages: SequenceOf[int]) -> None:
        """On the current stream, behind what writes these pages."""
        self._num_pages = count = len(pages)
        units = count * self._pool.num_planes
        self._pages_host.numpy()[:count] = pages
        self._pages[:count].copy_(self._pages_host[:count], non_blocking=True)
        self._pool.sum(self._pages[:count], self._sums[:units])
        self._sums_host[:units].copy_(self._sums[:units], non_blocking=True)
        if self._done is not None:
            self._done.record()

    def wait(self) -> np.ndarray:
        """Each of its page alone: the operation counts the units of a launch into them, which is taken out again."""
        if self._done is not None:
            self._done.synchronize()
        sums = self._sums_host.numpy()[: self._num_pages * self._pool.num_planes].view(np.uint32)
        return (sums ^ np.arange(len(sums), dtype=np.uint32) * np.uint32(STRIDE)).reshape(self._num_pages, -1)


def _pinned(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")


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
        self._sum = registry.get("kv_sums", MoveSpec(self.num_planes, self.page_nbytes, checksum=True))

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
        sums = Checksums(self, len(pages))
        sums.launch(pages)
        return sums

    def sum(self, pages: Tensor, sums: Tensor) -> None:
        """The operation itself: `pages` int32 on the device, `sums` `[pages * planes]`."""
        self._sum(self._planes, pages, sums)

    def warm_up(self) -> None:
        """Compile what there is for numbers of units that are multiples of 16 and that are not."""
        for count in (1, 4, 16):
            self.checksums(range(min(count, self.num_blocks))).wait()

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
    """A peer's pool, mapped here. One thread pulls."""

    def __init__(self, ours: DevicePages, sharing: Sharing) -> None:
        self._grid = Grid(sharing.page_nbytes, sharing.num_planes, sharing.page_nbytes * sharing.num_pages)
        if (self._grid.width, self._grid.height) != (ours.grid.width, ours.grid.height):
            raise TransferError(f"the peer's pages are {self._grid}, ours {ours.grid}")
        self._ours, self.num_pages = ours, sharing.num_pages
        self._stream = torch.cuda.Stream(ours.device, priority=-1) if ours.device.type == "cuda" else None
        self._sums = Checksums(ours, _MANY_PAGES)
        self._mapping = attach(sharing.memory, ours.device)
        where = "on one GPU" if sharing.device == _name(ours.device) else "between two GPUs"
        self.detail = f"pulled {where}, {self._probe() / 1e9:.0f} GB/s"

    def _probe(self) -> float:
        """Bytes a second of the way that is really taken, between the pages that belong to nobody. Opens it, too."""
        spare = [self.num_pages - 1] * _NUM_PROBES
        into = [self._ours.num_blocks] * _NUM_PROBES
        took_s = []
        for _ in range(4):  # the first one pays for what is opened
            begin = time.perf_counter()
            self.pull(spare, into, True)
            took_s.append(time.perf_counter() - begin)
        return _NUM_PROBES * self._grid.width * self._grid.height / min(took_s)

    @torch.inference_mode()
    def pull(self, pages: SequenceOf[int], into: SequenceOf[int], checks: bool) -> np.ndarray | None:
        """Copy the peer's `pages` to `into`; they are there on return. Returns their checksums if `checks`.

        Raises TransferError.
        """
        ours = self._ours
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            self._mapping.copy_pages(self._grid, pages, ours.memory.tensor, ours.grid, into)
            if checks:
                if len(into) > self._sums.max_pages:
                    self._sums = Checksums(ours, len(into))
                self._sums.launch(into)
                return self._sums.wait()
            if self._stream is not None:
                self._stream.synchronize()
        return None

    def close(self) -> None:
        """Waits for what was launched. Idempotent."""
        if self._stream is not None:
            self._stream.synchronize()
        self._mapping.close()


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "host"
