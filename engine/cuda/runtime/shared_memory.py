"""Memory that another process may read: a GPU's through CUDA IPC, and its twin, a host's through a memfd.

torch's own allocator cuts tensors out of larger blocks; what is exported here is one allocation of its own.
"""

import ctypes
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from contracts.errors import ConfigError, TransferError
from engine.cuda.runtime.bindings import (
    ANY_DIRECTION,
    AT_LEAST,
    HANDLE_NBYTES,
    LAZY_PEER_ACCESS,
    OUT_OF_MEMORY,
    PORTABLE_AND_MAPPED,
    THREAD_LOCAL,
    IpcHandle,
    check,
    driver,
    locked_runtime,
    runtime,
    words_of,
)

_MARKS_NBYTES = 1 << 16
_MARK = struct.Struct("<III")  # process, descriptor, index
_MEMFD = "tandem-pages"


class Memory(Protocol):
    """`tensor`: all of it, uint8, zeroed. It lives as long as a view of it."""

    tensor: Tensor

    def share(self) -> bytes:
        """What a process needs to map it; it must not end before the mapping is closed."""
        ...


@dataclass(frozen=True)
class Grid:
    """Pages of `page_nbytes` in `height` planes, whose starts are `pitch` bytes apart; of each page, `width` bytes from
    `offset` on.
    """

    height: int
    pitch: int
    page_nbytes: int
    width: int
    offset: int = 0

    def first(self, page: int, plane: int) -> int:
        """Where its bytes begin."""
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
        """Launch copies of pages, those `planes` of each, on the current stream. Both grids are of one width and
        height.

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
        """Named after the device that mapped it, wherever it lies: torch would launch on the other one, in a context of
        ours there, or copy.
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
    """Pages that follow each other on both sides, at most `longest` at a time: the first, its target, how many."""
    pairs = sorted(zip(pages, target_pages, strict=True))
    first = 0
    for end in range(1, len(pairs) + 1):
        page, target_page = pairs[first]
        count = end - first
        if end == len(pairs) or count == longest or pairs[end] != (page + count, target_page + count):
            yield page, target_page, count
            first = end


def mapped(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 in the host's memory, and the same memory as the device sees it. Both are to be kept."""
    words = _MappedWords(count, device)
    return torch.from_numpy(words.array), torch.as_tensor(words, device=device)


class _MappedWords:
    """Not from torch's allocator: which device a page-locked block belongs to there, the first one to ask decides."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            status = runtime().cudaHostAlloc(ctypes.byref(self._pointer), 4 * count, PORTABLE_AND_MAPPED)
        check(status, "the host gives no page-locked memory")
        self.array = np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(self._pointer.value or 0))
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<i4",
            "data": (self._pointer.value, False),
            "version": 2,
        }

    def __del__(self) -> None:
        runtime().cudaFreeHost(self._pointer)


def copy_async(target: Tensor, source: Tensor, nbytes: int, stream: int) -> None:
    """The first bytes of one to the other; the host's of the two is page-locked. As few instructions as will do."""
    status = locked_runtime().cudaMemcpyAsync(target.data_ptr(), source.data_ptr(), nbytes, ANY_DIRECTION, stream)
    if status:
        raise TransferError(f"checksums can't be copied: {words_of(status)}")


def synchronize(stream: int) -> None:
    """Wait, without the interpreter's lock, for all that the stream holds. Raises TransferError if something failed."""
    check(runtime().cudaStreamSynchronize(stream), "the GPU failed")


class Recording:
    """Launches on a stream, to be repeated by one call. torch's own graphs hold the generator of random numbers while
    they are captured, and other threads draw from it.
    """

    def __init__(self, launch: Callable[[], None], stream: int) -> None:
        """`launch` has run before, and allocates nothing. Raises TransferError."""
        library, graph, self._exec = locked_runtime(), ctypes.c_void_p(), ctypes.c_void_p()
        check(library.cudaStreamBeginCapture(stream, THREAD_LOCAL), "launches can't be recorded")
        try:
            launch()
        finally:
            status = library.cudaStreamEndCapture(stream, ctypes.byref(graph))
        check(status, "launches can't be recorded")
        status = library.cudaGraphInstantiate(ctypes.byref(self._exec), graph, 0)
        library.cudaGraphDestroy(graph)
        check(status, "launches can't be recorded")

    def launch(self, stream: int) -> None:
        check(locked_runtime().cudaGraphLaunch(self._exec, stream), "what was recorded can't be launched")

    def __del__(self) -> None:
        if self._exec:
            runtime().cudaGraphExecDestroy(self._exec)


class StreamSemaphores:
    """Numbers in the host's memory, one for each peer, that the device sets: what a peer waits for, by its own device.

    A peer may write its number too, to let its device go on when we are gone. So none is given to two peers.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda, self._num_given = device.type == "cuda", 0
        self._memory = HostMemory(_MARKS_NBYTES)
        self._words = self._memory.tensor.view(torch.int32).numpy()
        if self._is_cuda:
            _register(self._words.ctypes.data, device)

    def next(self) -> "StreamSemaphore | None":
        """None if all are given."""
        if self._num_given == len(self._words):
            return None
        index, self._num_given = self._num_given, self._num_given + 1
        shared = _MARK.pack(os.getpid(), self._memory.fileno(), index)
        return StreamSemaphore(self._words[index : index + 1], shared, self._is_cuda)

    def close(self) -> None:
        self._memory.close()


class StreamSemaphore:
    """kv_transfer.chunks.device_pool.DeviceSemaphore."""

    def __init__(self, word: np.ndarray, shared: bytes, is_cuda: bool) -> None:
        self._word, self.shared, self._is_cuda = word, shared, is_cuda

    def set(self, value: int) -> None:
        if not self._is_cuda:
            self._word[0] = value
            return
        stream = torch.cuda.current_stream().cuda_stream
        if status := driver().cuStreamWriteValue32_v2(stream, self._word.ctypes.data, value, 0):
            raise TransferError(f"a mark can't be set: error {status} of the driver")


class PeerSemaphore:
    """A peer's, mapped here."""

    def __init__(self, shared: bytes, device: torch.device) -> None:
        try:
            pid, fd, index = _MARK.unpack(shared)
            path = f"/proc/{pid}/fd/{fd}"
            if not os.readlink(path).startswith(f"/memfd:{_MEMFD} "):
                raise ValueError(f"{path} is none of ours")
            with open(path, "r+b") as file:
                words = np.frombuffer(mmap.mmap(file.fileno(), _MARKS_NBYTES), np.int32)
        except (OSError, ValueError, struct.error) as error:
            raise TransferError(f"the peer's marks can't be opened: {error}") from error
        if index >= len(words):
            raise TransferError(f"mark {index} of {len(words)}")
        self._words, self._word, self._is_cuda = words, words[index : index + 1], device.type == "cuda"
        if self._is_cuda:
            _register(words.ctypes.data, device)

    @property
    def value(self) -> int:
        return int(self._word[0])

    def wait(self, value: int) -> None:
        """Of the device: what is launched on the current stream from now on waits until the mark has come so far."""
        stream = torch.cuda.current_stream().cuda_stream
        if status := driver().cuStreamWaitValue32_v2(stream, self._word.ctypes.data, value, AT_LEAST):
            raise TransferError(f"a mark can't be waited for: error {status} of the driver")

    def raise_to(self, value: int) -> None:
        """It has come so far, whoever says so."""
        if self._word[0] < value:
            self._word[0] = value

    def close(self) -> None:
        """Nothing may wait for it. Idempotent."""
        if self._is_cuda:
            runtime().cudaHostUnregister(ctypes.c_void_p(self._words.ctypes.data))
            self._is_cuda = False


def _register(address: int, device: torch.device) -> None:
    """Let the device read and write this memory of the host's. Raises TransferError."""
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        status = runtime().cudaHostRegister(ctypes.c_void_p(address), _MARKS_NBYTES, PORTABLE_AND_MAPPED)
    if status:
        runtime().cudaGetLastError()
        raise TransferError(f"the GPU can't reach the host's memory: {words_of(status)}")


class HostMemory:
    """The twin: a memfd that the peer finds under this process's descriptors."""

    def __init__(self, nbytes: int) -> None:
        self._fd: int | None = os.memfd_create(_MEMFD, os.MFD_CLOEXEC)
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
