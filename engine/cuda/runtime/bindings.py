"""CUDA's runtime and driver where torch does not wrap them.

Functions by ctypes, constants, errors in words.
"""

import ctypes
from functools import cache
from typing import Any

import torch

from contracts.errors import TransferError

MAX_PITCH_NBYTES = (1 << 31) - 1
"""cudaMemcpy2DAsync takes no larger distance between rows (cudaDeviceProp.memPitch)."""
HANDLE_NBYTES = 64  # cudaIpcMemHandle_t
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
ANY_DIRECTION = 4  # cudaMemcpyDefault
PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal: what other threads do meanwhile is theirs
AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


class IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_NBYTES),)


def check(status: int, what: str) -> None:
    """Raises TransferError, with `what` and the runtime's words, unless all is well."""
    if status:
        raise TransferError(f"{what}: {words_of(status)}")


def words_of(status: int) -> str:
    return runtime().cudaGetErrorString(status).decode()


@cache
def runtime() -> Any:
    return _typed(ctypes.CDLL(_library()))


@cache
def locked_runtime() -> Any:
    """The same, called without giving up the interpreter's lock.

    For calls that take less time than getting it back.
    """
    return _typed(ctypes.PyDLL(_library()))


@cache
def driver() -> Any:
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
    library.cudaIpcOpenMemHandle.argtypes = (ctypes.POINTER(pointer), IpcHandle, ctypes.c_uint)
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
