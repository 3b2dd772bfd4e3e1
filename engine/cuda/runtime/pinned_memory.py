"""Page-locked memory of the host in large pieces, which a GPU copies from and to without another copy."""

import ctypes
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from contracts.errors import ConfigError
from engine.cuda.runtime.bindings import PORTABLE_AND_MAPPED, runtime, words_of

_NUM_THREADS = 8
_PIECE_NBYTES = 64 << 20


def pinned_bytes(nbytes: int, device: torch.device) -> np.ndarray:
    """Return uint8 `[nbytes]` that begins on a page; plain memory where the device is a CPU.

    Raises ConfigError if there is not so much. Not by cudaHostAlloc: it fills pages by one thread, and torch's
    allocator takes the next power of two.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    pieces = [array[start : start + _PIECE_NBYTES] for start in range(0, nbytes, _PIECE_NBYTES)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:  # the system fills pages as they are touched
        list(pool.map(lambda piece: piece.fill(1), pieces))
    if device.type == "cuda":
        pointer = ctypes.c_void_p(array.ctypes.data)
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # the context exists
            status = runtime().cudaHostRegister(pointer, nbytes, PORTABLE_AND_MAPPED)
        if status:
            runtime().cudaGetLastError()
            raise ConfigError(f"{nbytes / 2**30:.2f} GiB of memory can't be page-locked: {words_of(status)}")
        weakref.finalize(array, _unlock, pointer, memory).atexit = False  # the process takes it along
    return array


def _unlock(pointer: ctypes.c_void_p, memory: mmap.mmap) -> None:
    """Unregister memory that is still mapped."""
    assert not memory.closed
    runtime().cudaHostUnregister(pointer)
