"""Launches on a stream outside of torch's graphs and allocators: recorded, copied and waited for."""

import ctypes
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from contracts.errors import TransferError
from engine.cuda.runtime.bindings import (
    ANY_DIRECTION,
    PORTABLE_AND_MAPPED,
    THREAD_LOCAL,
    check,
    locked_runtime,
    runtime,
    words_of,
)


def mapped(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 in the host's memory, and the same memory as the device sees it. Both are to be kept."""
    words = _MappedWords(count, device)
    return torch.from_numpy(words.array), torch.as_tensor(words, device=device)


class _MappedWords:
    """Words of the host's memory that a device sees.

    Not from torch's allocator: which device a page-locked block belongs to there, the first one to ask decides.
    """

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
    """The first bytes of one to the other; the host's of the two is page-locked.

    As few instructions as will do.
    """
    status = locked_runtime().cudaMemcpyAsync(target.data_ptr(), source.data_ptr(), nbytes, ANY_DIRECTION, stream)
    if status:
        raise TransferError(f"checksums can't be copied: {words_of(status)}")


def synchronize(stream: int) -> None:
    """Wait, without the interpreter's lock, for all that the stream holds.

    Raises TransferError if something failed.
    """
    check(runtime().cudaStreamSynchronize(stream), "the GPU failed")


class Recording:
    """Launches on a stream, to be repeated by one call.

    torch's own graphs hold the generator of random numbers while they are captured, and other threads draw from it.
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
