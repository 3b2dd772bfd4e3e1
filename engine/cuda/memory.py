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
_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal: what other threads do meanwhile is theirs
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
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
        self._device = device
        with torch.cuda.device(device):
            status = _runtime().cudaIpcOpenMemHandle(ctypes.byref(self._pointer), handle, _LAZY_PEER_ACCESS)
        if status:
            _runtime().cudaGetLastError()
            raise TransferError(f"the peer's GPU memory can't be opened: {_words(status)}")

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
        copy, height = _locked_runtime().cudaMemcpy2DAsync, len(planes)
        source = self._pointer.value + grid.first(0, planes.start)
        destination = target.data_ptr() + target_grid.first(0, planes.start)
        step, target_step = grid.page_nbytes, target_grid.page_nbytes
        stream = torch.cuda.current_stream().cuda_stream
        longest = len(pages) if grid.width == step and target_grid.width == target_step else 1
        for page, target_page, count in runs(pages, target_pages, longest):
            to, of, width = destination + target_page * target_step, source + page * step, count * grid.width
            status = copy(to, target_grid.pitch, of, grid.pitch, width, height, _ANY_DIRECTION, stream)
            if status:
                raise TransferError(f"a page can't be copied: {_words(status)}")

    def close(self) -> None:
        if self._pointer is not None:
            _runtime().cudaIpcCloseMemHandle(self._pointer)
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
            status = _runtime().cudaHostAlloc(ctypes.byref(self._pointer), 4 * count, _PORTABLE_AND_MAPPED)
        if status:
            raise TransferError(f"the host gives no page-locked memory: {_words(status)}")
        self.array = np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(self._pointer.value or 0))
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<i4",
            "data": (self._pointer.value, False),
            "version": 2,
        }

    def __del__(self) -> None:
        _runtime().cudaFreeHost(self._pointer)


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


class Recording:
    """Launches on a stream, to be repeated by one call. torch's own graphs hold the generator of random numbers while
    they are captured, and other threads draw from it.
    """

    def __init__(self, launch: Callable[[], None], stream: int) -> None:
        """`launch` has run before, and allocates nothing. Raises TransferError."""
        runtime, graph, self._exec = _locked_runtime(), ctypes.c_void_p(), ctypes.c_void_p()
        _check(runtime.cudaStreamBeginCapture(stream, _THREAD_LOCAL), "launches can't be recorded")
        try:
            launch()
        finally:
            status = runtime.cudaStreamEndCapture(stream, ctypes.byref(graph))
        _check(status, "launches can't be recorded")
        status = runtime.cudaGraphInstantiate(ctypes.byref(self._exec), graph, 0)
        runtime.cudaGraphDestroy(graph)
        _check(status, "launches can't be recorded")

    def launch(self, stream: int) -> None:
        _check(_locked_runtime().cudaGraphLaunch(self._exec, stream), "what was recorded can't be launched")

    def __del__(self) -> None:
        if self._exec:
            _runtime().cudaGraphExecDestroy(self._exec)


def _check(status: int, what: str) -> None:
    if status:
        raise TransferError(f"{what}: {_words(status)}")


class Marks:
    """Numbers in the host's memory, one for each peer, that the device sets: what a peer waits for, by its own device.

    A peer may write its number too, to let its device go on when we are gone. So none is given to two peers.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda, self._num_given = device.type == "cuda", 0
        self._memory = HostMemory(_MARKS_NBYTES)
        self._words = self._memory.tensor.view(torch.int32).numpy()
        if self._is_cuda:
            _register(self._words.ctypes.data, device)

    def next(self) -> "Mark | None":
        """None if all are given."""
        if self._num_given == len(self._words):
            return None
        index, self._num_given = self._num_given, self._num_given + 1
        shared = _MARK.pack(os.getpid(), self._memory.fileno(), index)
        return Mark(self._words[index : index + 1], shared, self._is_cuda)

    def close(self) -> None:
        self._memory.close()


class Mark:
    """kv_transfer.device.Mark."""

    def __init__(self, word: np.ndarray, shared: bytes, is_cuda: bool) -> None:
        self._word, self.shared, self._is_cuda = word, shared, is_cuda

    def set(self, value: int) -> None:
        if not self._is_cuda:
            self._word[0] = value
            return
        stream = torch.cuda.current_stream().cuda_stream
        if status := _driver().cuStreamWriteValue32_v2(stream, self._word.ctypes.data, value, 0):
            raise TransferError(f"a mark can't be set: error {status} of the driver")


class RemoteMark:
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
        if status := _driver().cuStreamWaitValue32_v2(stream, self._word.ctypes.data, value, _AT_LEAST):
            raise TransferError(f"a mark can't be waited for: error {status} of the driver")

    def raise_to(self, value: int) -> None:
        """It has come so far, whoever says so."""
        if self._word[0] < value:
            self._word[0] = value

    def close(self) -> None:
        """Nothing may wait for it. Idempotent."""
        if self._is_cuda:
            _runtime().cudaHostUnregister(ctypes.c_void_p(self._words.ctypes.data))
            self._is_cuda = False


def _register(address: int, device: torch.device) -> None:
    """Let the device read and write this memory of the host's. Raises TransferError."""
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        status = _runtime().cudaHostRegister(ctypes.c_void_p(address), _MARKS_NBYTES, _PORTABLE_AND_MAPPED)
    if status:
        _runtime().cudaGetLastError()
        raise TransferError(f"the GPU can't reach the host's memory: {_words(status)}")


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


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_NBYTES),)


@cache
def _runtime() -> Any:
    return _typed(ctypes.CDLL(_library()))


@cache
def _locked_runtime() -> Any:
    return _typed(ctypes.PyDLL(_library()))


@cache
def _driver() -> Any:
    """It has what the runtime has not: a stream that writes a word, or waits for one."""
    library, pointer = ctypes.PyDLL("libcuda.so.1"), ctypes.c_void_p
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(library, name).argtypes = (pointer, pointer, ctypes.c_uint32, ctypes.c_uint)
    return library


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
    library.cudaHostAlloc.argtypes = (ctypes.POINTER(pointer), size, ctypes.c_uint)
    library.cudaFreeHost.argtypes = (pointer,)
    library.cudaHostRegister.argtypes = (pointer, size, ctypes.c_uint)
    library.cudaHostUnregister.argtypes = (pointer,)
    library.cudaStreamSynchronize.argtypes = (pointer,)
    library.cudaStreamBeginCapture.argtypes = (pointer, ctypes.c_int)
    library.cudaStreamEndCapture.argtypes = (pointer, ctypes.POINTER(pointer))
    library.cudaGraphInstantiate.argtypes = (ctypes.POINTER(pointer), pointer, ctypes.c_ulonglong)
    library.cudaGraphLaunch.argtypes = (pointer, pointer)
    library.cudaGraphDestroy.argtypes = library.cudaGraphExecDestroy.argtypes = (pointer,)
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def _words(status: int) -> str:
    return _runtime().cudaGetErrorString(status).decode()
