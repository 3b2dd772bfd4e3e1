"""Numbers that a device sets and a peer's device waits for, in memory of the host that both map."""

import ctypes
import mmap
import os
import struct

import numpy as np
import torch

from contracts.errors import TransferError
from engine.cuda.runtime.bindings import (
    AT_LEAST,
    PORTABLE_AND_MAPPED,
    driver,
    runtime,
    words_of,
)
from engine.cuda.runtime.shared_memory import MEMFD_NAME, HostMemory

_MARKS_NBYTES = 1 << 16
_MARK = struct.Struct("<III")  # process, descriptor, index


class StreamSemaphores:
    """Numbers in the host's memory, one for each peer, that the device sets.

    What a peer waits for, by its own device.

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
            if not os.readlink(path).startswith(f"/memfd:{MEMFD_NAME} "):
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
        """Let the device wait until the mark has come so far.

        What is launched on the current stream from now on comes after.
        """
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
