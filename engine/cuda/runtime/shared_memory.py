"""Memory that another process may read.

A GPU's through CUDA IPC, and its twin, a host's through a memfd.

torch's own allocator cuts tensors out of larger blocks; what is exported here is one allocation of its own.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from contracts.errors import ConfigError, TransferError
from engine.cuda.runtime.bindings import (
    ANY_DIRECTION,
    HANDLE_NBYTES,
    LAZY_PEER_ACCESS,
    OUT_OF_MEMORY,
    IpcHandle,
    check,
    locked_runtime,
    runtime,
    words_of,
)

MEMFD_NAME = "tandem-pages"


class Memory(Protocol):
    """`tensor`: all of it, uint8, zeroed. It lives as long as a view of it."""

    tensor: Tensor

    def share(self) -> bytes:
        """What a process needs to map it; it must not end before the mapping is closed."""
        ...


@dataclass(frozen=True)
class Grid:
    """Pages of `page_nbytes` in `height` planes, whose starts are `pitch` bytes apart.

    Of each page, `width` bytes from `offset` on.
    """

    height: int
    pitch: int
    page_nbytes: int
    width: int
    offset: int = 0

    def first(self, page: int, plane: int) -> int:
        """Return where its bytes begin."""
        return plane * self.pitch + page * self.page_nbytes + self.offset


class Mapping(Protocol):
    """Another process's memory."""

    def tensor(self, nbytes: int) -> Tensor:
        """So much of it, uint8, as if it were of the device that mapped it. Not to be used after `close`."""
        ...

    def copy_pages(
        self,
        grid: Grid,
        pages: SequenceOf[int],
        target: Tensor,
        target_grid: Grid,
        target_pages: SequenceOf[int],
        planes: range,
    ) -> None:
        """Launch copies of pages, those `planes` of each, on the current stream.

        Both grids are of one width and height.

        Raises TransferError.
        """
        ...

    def close(self) -> None:
        """No copy may be under way. Idempotent."""
        ...


def allocate(nbytes: int, device: torch.device) -> Memory:
    """Raises ConfigError if there is not so much."""
    return CudaMemory(nbytes, device) if device.type == "cuda" else HostMemory(nbytes)


def attach(shared: bytes, device: torch.device) -> Mapping:
    """Map what `share` told of. Raises TransferError if that can't be done from here."""
    return CudaMapping(shared, device) if device.type == "cuda" else HostMapping(shared)


class CudaMemory:
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.tensor = torch.as_tensor(_Allocation(cuda_allocated(nbytes, device), nbytes), device=device)
        self.tensor.zero_()

    def share(self) -> bytes:
        handle = ctypes.create_string_buffer(HANDLE_NBYTES)
        status = runtime().cudaIpcGetMemHandle(handle, ctypes.c_void_p(self.tensor.data_ptr()))
        check(status, "the GPU's memory can't be exported")
        return handle.raw


def cuda_allocated(nbytes: int, device: torch.device) -> ctypes.c_void_p:
    """Raises ConfigError if the GPU has not so much, with what torch keeps of what it once needed."""
    pointer, library = ctypes.c_void_p(), runtime()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the context exists
        status = library.cudaMalloc(ctypes.byref(pointer), nbytes)
        if status == OUT_OF_MEMORY:
            library.cudaGetLastError()
            torch.cuda.empty_cache()
            status = library.cudaMalloc(ctypes.byref(pointer), nbytes)
    if status == OUT_OF_MEMORY:
        library.cudaGetLastError()
        free, _ = torch.cuda.mem_get_info(device)
        raise ConfigError(f"{nbytes / 2**30:.2f} GiB are wanted, and the GPU has {free / 2**30:.2f} free")
    if status:
        raise ConfigError(f"the GPU gives no memory: {words_of(status)}")
    return pointer


class _Allocation:
    """A tensor over it keeps it."""

    def __init__(self, pointer: ctypes.c_void_p, nbytes: int) -> None:
        self._pointer = pointer
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer.value, False),
            "version": 2,
        }

    def __del__(self) -> None:
        runtime().cudaFree(self._pointer)


class CudaMapping:
    """Opened on the device that will copy, with access to the peer's GPU where they are two."""

    def __init__(self, shared: bytes, device: torch.device) -> None:
        if len(shared) != HANDLE_NBYTES:
            raise TransferError(f"a CUDA IPC handle has {HANDLE_NBYTES} bytes; the peer sent {len(shared)}")
        self._pointer: ctypes.c_void_p | None = ctypes.c_void_p()
        handle = IpcHandle.from_buffer_copy(shared)
        self._device = device
        with torch.cuda.device(device):
            status = runtime().cudaIpcOpenMemHandle(ctypes.byref(self._pointer), handle, LAZY_PEER_ACCESS)
        if status:
            runtime().cudaGetLastError()
            raise TransferError(f"the peer's GPU memory can't be opened: {words_of(status)}")

    def tensor(self, nbytes: int) -> Tensor:
        """Return it as of the device that mapped it, wherever it lies.

        Torch would launch on the other one, in a context of ours there, or copy.
        """
        assert self._pointer is not None and self._pointer.value is not None
        storage = torch._C._construct_storage_from_data_pointer(self._pointer.value, self._device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def copy_pages(
        self,
        grid: Grid,
        pages: SequenceOf[int],
        target: Tensor,
        target_grid: Grid,
        target_pages: SequenceOf[int],
        planes: range,
    ) -> None:
        """One copy for neighbours of all these planes, by the copy engine: no multiprocessor takes part."""
        assert self._pointer is not None and self._pointer.value is not None
        # The interpreter's lock is kept: giving it up and getting it back for each copy took longer than the launches.
        copy, height = locked_runtime().cudaMemcpy2DAsync, len(planes)
        source = self._pointer.value + grid.first(0, planes.start)
        destination = target.data_ptr() + target_grid.first(0, planes.start)
        step, target_step = grid.page_nbytes, target_grid.page_nbytes
        stream = torch.cuda.current_stream().cuda_stream
        longest = len(pages) if grid.width == step and target_grid.width == target_step else 1
        for page, target_page, count in runs(pages, target_pages, longest):
            to, of, width = destination + target_page * target_step, source + page * step, count * grid.width
            status = copy(to, target_grid.pitch, of, grid.pitch, width, height, ANY_DIRECTION, stream)
            if status:
                raise TransferError(f"a page can't be copied: {words_of(status)}")

    def close(self) -> None:
        if self._pointer is not None:
            runtime().cudaIpcCloseMemHandle(self._pointer)
            self._pointer = None


def runs(pages: SequenceOf[int], target_pages: SequenceOf[int], longest: int) -> Iterator[tuple[int, int, int]]:
    """Yield pages that follow each other on both sides, at most `longest` at a time.

    The first, its target, how many.
    """
    pairs = sorted(zip(pages, target_pages, strict=True))
    first = 0
    for end in range(1, len(pairs) + 1):
        page, target_page = pairs[first]
        count = end - first
        if end == len(pairs) or count == longest or pairs[end] != (page + count, target_page + count):
            yield page, target_page, count
            first = end


class HostMemory:
    """The twin: a memfd that the peer finds under this process's descriptors."""

    def __init__(self, nbytes: int) -> None:
        self._fd: int | None = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        self.tensor = torch.from_file(f"/proc/self/fd/{self._fd}", shared=True, size=nbytes, dtype=torch.uint8)

    def share(self) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._fd}".encode()

    def fileno(self) -> int:
        assert self._fd is not None
        return self._fd

    def close(self) -> None:
        """Nobody can map it from now on. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    __del__ = close


class HostMapping:
    def __init__(self, shared: bytes) -> None:
        self._path = shared.decode(errors="replace")
        try:
            with open(self._path, "r+b") as file:
                self._bytes: np.ndarray | None = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        except (OSError, ValueError) as error:
            raise TransferError(f"the peer's memory can't be opened: {error}") from error

    def tensor(self, nbytes: int) -> Tensor:
        return torch.from_file(self._path, shared=True, size=nbytes, dtype=torch.uint8)

    def copy_pages(
        self,
        grid: Grid,
        pages: SequenceOf[int],
        target: Tensor,
        target_grid: Grid,
        target_pages: SequenceOf[int],
        planes: range,
    ) -> None:
        assert self._bytes is not None
        chosen = slice(planes.start, planes.stop)
        source, into = _by_plane(self._bytes, grid)[chosen], _by_plane(target.numpy(), target_grid)[chosen]
        for page, target_page in zip(pages, target_pages, strict=True):
            of, to = grid.first(page, 0), target_grid.first(target_page, 0)
            into[:, to : to + grid.width] = source[:, of : of + grid.width]

    def close(self) -> None:
        self._bytes = None


def _by_plane(memory: np.ndarray, grid: Grid) -> np.ndarray:
    return memory[: grid.height * grid.pitch].reshape(grid.height, grid.pitch)
