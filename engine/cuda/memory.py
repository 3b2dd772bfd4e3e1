"""Memory that another process may read: a GPU's through CUDA IPC, and its twin, a host's through a memfd.

torch's own allocator cuts tensors out of larger blocks; what is exported here is one allocation of its own.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from contracts.errors import ConfigError, TransferError

MAX_PITCH_NBYTES = (1 << 31) - 1
"""cudaMemcpy2DAsync takes no larger distance between rows (cudaDeviceProp.memPitch)."""
_HANDLE_NBYTES = 64  # cudaIpcMemHandle_t
_LAZY_PEER_ACCESS, _OUT_OF_MEMORY = 1, 2
_ANY_DIRECTION = 4  # cudaMemcpyDefault


class Memory(Protocol):
    """`tensor`: all of it, uint8, zeroed. It lives as long as a view of it."""

    tensor: Tensor

    def share(self) -> bytes:
        """What a process needs to map it; it must not end before the mapping is closed."""
        ...


@dataclass(frozen=True)
class Grid:
    """Pages of `width` bytes in `height` planes, whose starts are `pitch` bytes apart."""

    width: int
    height: int
    pitch: int


class Mapping(Protocol):
    """Another process's memory."""

    def copy_pages(
        self, grid: Grid, pages: SequenceOf[int], target: Tensor, target_grid: Grid, target_pages: SequenceOf[int]
    ) -> None:
        """Launch copies of whole pages, all planes each, on the current stream. Both grids are of one width and height.

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
        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # the context exists
            status = _runtime().cudaMalloc(ctypes.byref(pointer), nbytes)
        if status == _OUT_OF_MEMORY:
            _runtime().cudaGetLastError()
            free, _ = torch.cuda.mem_get_info(device)
            wanted = f"the KV cache takes {nbytes / 2**30:.1f} GiB"
            raise ConfigError(f"{wanted}; the GPU has {free / 2**30:.1f} free: lower kv_cache_mib, or free the GPU")
        if status:
            raise ConfigError(f"the GPU gives no memory: {_words(status)}")
        self.tensor = torch.as_tensor(_Allocation(pointer, nbytes), device=device)
        self.tensor.zero_()

    def share(self) -> bytes:
        handle = ctypes.create_string_buffer(_HANDLE_NBYTES)
        status = _runtime().cudaIpcGetMemHandle(handle, ctypes.c_void_p(self.tensor.data_ptr()))
        if status:
            raise TransferError(f"the GPU's memory can't be exported: {_words(status)}")
        return handle.raw


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
        _runtime().cudaFree(self._pointer)


class CudaMapping:
    """Opened on the device that will copy, with access to the peer's GPU where they are two."""

    def __init__(self, shared: bytes, device: torch.device) -> None:
        if len(shared) != _HANDLE_NBYTES:
            raise TransferError(f"a CUDA IPC handle has {_HANDLE_NBYTES} bytes; the peer sent {len(shared)}")
        self._pointer: ctypes.c_void_p | None = ctypes.c_void_p()
        handle = _Handle.from_buffer_copy(shared)
        with torch.cuda.device(device):
            status = _runtime().cudaIpcOpenMemHandle(ctypes.byref(self._pointer), handle, _LAZY_PEER_ACCESS)
        if status:
            _runtime().cudaGetLastError()
            raise TransferError(f"the peer's GPU memory can't be opened: {_words(status)}")

    def copy_pages(
        self, grid: Grid, pages: SequenceOf[int], target: Tensor, target_grid: Grid, target_pages: SequenceOf[int]
    ) -> None:
        """One copy for a page of all planes, by the copy engine: no multiprocessor takes part."""
        assert self._pointer is not None and self._pointer.value is not None
        # The interpreter's lock is kept: giving it up and getting it back for each page took longer than the launches.
        copy, width, height = _locked_runtime().cudaMemcpy2DAsync, grid.width, grid.height
        source, destination = self._pointer.value, target.data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        for page, target_page in zip(pages, target_pages, strict=True):
            to, of = destination + target_page * width, source + page * width
            status = copy(to, target_grid.pitch, of, grid.pitch, width, height, _ANY_DIRECTION, stream)
            if status:
                raise TransferError(f"a page can't be copied: {_words(status)}")

    def close(self) -> None:
        if self._pointer is not None:
            _runtime().cudaIpcCloseMemHandle(self._pointer)
            self._pointer = None


def copy_async(target: Tensor, source: Tensor, nbytes: int, stream: int) -> None:
    """The first bytes of one to the other; the host's of the two is page-locked. As few instructions as will do."""
    status = _locked_runtime().cudaMemcpyAsync(target.data_ptr(), source.data_ptr(), nbytes, _ANY_DIRECTION, stream)
    if status:
        raise TransferError(f"checksums can't be copied: {_words(status)}")


def synchronize(stream: int) -> None:
    """Wait, without the interpreter's lock, for all that the stream holds. Raises TransferError if something failed."""
    status = _runtime().cudaStreamSynchronize(stream)
    if status:
        raise TransferError(f"the GPU failed: {_words(status)}")


class HostMemory:
    """The twin: a memfd that the peer finds under this process's descriptors."""

    def __init__(self, nbytes: int) -> None:
        self._fd: int | None = os.memfd_create("tandem-pages", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        self.tensor = torch.from_file(f"/proc/self/fd/{self._fd}", shared=True, size=nbytes, dtype=torch.uint8)

    def share(self) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._fd}".encode()

    def close(self) -> None:
        """Nobody can map it from now on. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    __del__ = close


class HostMapping:
    def __init__(self, shared: bytes) -> None:
        try:
            with open(shared.decode(), "r+b") as file:
                self._bytes: np.ndarray | None = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        except (OSError, ValueError) as error:
            raise TransferError(f"the peer's memory can't be opened: {error}") from error

    def copy_pages(
        self, grid: Grid, pages: SequenceOf[int], target: Tensor, target_grid: Grid, target_pages: SequenceOf[int]
    ) -> None:
        assert self._bytes is not None
        source, into = _by_plane(self._bytes, grid), _by_plane(target.numpy(), target_grid)
        for page, target_page in zip(pages, target_pages, strict=True):
            of, to = page * grid.width, target_page * grid.width
            into[:, to : to + grid.width] = source[:, of : of + grid.width]

    def close(self) -> None:
        self._bytes = None


def _by_plane(memory: np.ndarray, grid: Grid) -> np.ndarray:
    return memory[: grid.height * grid.pitch].reshape(grid.height, grid.pitch)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_NBYTES),)


@cache
def _runtime() -> Any:
    return _typed(ctypes.CDLL(_library()))


@cache
def _locked_runtime() -> Any:
    return _typed(ctypes.PyDLL(_library()))


def _library() -> str:
    """The one that torch has loaded."""
    return f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"


def _typed(library: Any) -> Any:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.cudaMalloc.argtypes = (ctypes.POINTER(pointer), size)
    library.cudaFree.argtypes = library.cudaIpcCloseMemHandle.argtypes = (pointer,)
    library.cudaIpcGetMemHandle.argtypes = (pointer, pointer)
    library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(pointer), _Handle, ctypes.c_uint)
    library.cudaMemcpy2DAsync.argtypes = (pointer, size, pointer, size, size, size, ctypes.c_int, pointer)
    library.cudaMemcpyAsync.argtypes = (pointer, pointer, size, ctypes.c_int, pointer)
    library.cudaStreamSynchronize.argtypes = (pointer,)
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _words(status: int) -> str:
    return _runtime().cudaGetErrorString(status).decode()
