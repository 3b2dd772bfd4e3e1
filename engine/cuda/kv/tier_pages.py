"""The pages of a GPU as the tiers below it see them: whole blocks to page-locked memory and back.

The copy engine moves each block by one copy: no multiprocessor takes part, and nothing lies between. The pages are
summed up where they lie on the GPU, so what is compared is what the engine will read.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch

from contracts.errors import ConfigError, TransferError
from engine.cuda.kv.transfer_pool import DeviceTransferPool
from engine.cuda.runtime.bindings import ANY_DIRECTION, locked_runtime, words_of
from engine.cuda.runtime.launch_recording import Recording, synchronize
from engine.cuda.runtime.pinned_memory import pinned_bytes


class TierPages:
    """The pool of one GPU, for the threads of its tiers.

    Raises ConfigError for one that several GPUs share.
    """

    def __init__(self, pool: DeviceTransferPool) -> None:
        if pool.num_shards * pool.num_copies != 1:
            raise ConfigError(
                "kv_host_gib, kv_disk and kv_store keep the KV of one GPU: leave them out for a tensor_parallel of "
                f"{pool.num_shards * pool.num_copies}"
            )
        self._pool, self._lock = pool, threading.Lock()
        self._launched = torch.cuda.Event() if pool.device.type == "cuda" else None

    def launched(self, is_decoded: bool) -> None:
        """Note that what the calling thread, the engine's, has launched so far writes a block that is fetched next.

        One that `is_decoded` only: what prompts write is noted by the pool, as soon as it is launched.
        """
        if self._launched is not None and is_decoded:
            self._launched.record()

    @property
    def num_planes(self) -> int:
        return self._pool.num_planes

    def pinned(self, nbytes: int) -> memoryview:
        """Return memory that copies are fast from and to. Raises ConfigError if there is not so much."""
        return pinned_bytes(nbytes, self._pool.device).data

    def enter(self) -> None:
        """Let the calling thread work with this device."""
        self._pool.enter()

    def lane(self, max_blocks: int) -> "PageLane":
        """Return a way for at most so many blocks at a time, for the calling thread. Raises TransferError."""
        with self._lock, torch.inference_mode():
            return PageLane(self._pool, max_blocks, self._launched)


class PageLane:
    """A stream of its own, on which blocks are copied and summed up; one use at a time, by one thread.

    `fill` and `fetch` launch, `wait` ends it. They raise TransferError if the device fails. `launched`: what `fetch`
    waits for on the device.
    """

    def __init__(self, pool: DeviceTransferPool, max_blocks: int, launched: torch.cuda.Event | None) -> None:
        self._pool, self._max_blocks, self._launched = pool, max_blocks, launched
        self._planes = pool.memory.tensor.view(pool.num_planes, pool.num_blocks + 1, pool.page_nbytes)
        cut = pool.cut_into(1)
        self._sums = cut.checksums_of_landed(max_blocks)
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None
        self._recording = self._record() if self._stream is not None and cut.is_kernel else None

    def _record(self) -> Recording:
        """Launching the kernel by Triton takes the interpreter ten times as long as one recorded call."""
        with self._aside():
            self._sums.name([self._pool.num_blocks] * self._max_blocks)
            self._sums.run(self._max_blocks)
            self._synchronize()
            assert self._stream is not None
            return Recording(partial(self._sums.run, self._max_blocks), self._stream.cuda_stream)

    @torch.inference_mode()
    def fill(self, payloads: Sequence[np.ndarray], blocks: Sequence[int]) -> None:
        """Launch copies of payloads, uint8 `[block_nbytes]` each, into blocks, and their checksums.

        Payloads stay as they are until `wait`.
        """
        with self._aside():
            for payload, block in zip(payloads, blocks, strict=True):
                self._copy(payload, block, is_in=True)
            self._sum(blocks)

    @torch.inference_mode()
    def fetch(self, blocks: Sequence[int], into: Sequence[np.ndarray]) -> None:
        """Launch copies of blocks to the host, and their checksums, behind what computes them."""
        with self._aside():
            if self._stream is not None and self._launched is not None:
                self._pool.wait_written(self._stream)
                self._stream.wait_event(self._launched)
            for block, target in zip(blocks, into, strict=True):
                self._copy(target, block, is_in=False)
            self._sum(blocks)

    def wait(self) -> np.ndarray:
        """Wait for the copies; return the checksums of their pages on the device, uint32 `[blocks, planes]`."""
        self._synchronize()
        return self._sums.read()

    def _copy(self, payload: np.ndarray, block: int, is_in: bool) -> None:
        if self._stream is None:
            pages = torch.from_numpy(payload.reshape(self._pool.num_planes, -1))
            ours = self._planes[:, block]
            (ours if is_in else pages).copy_(pages if is_in else ours)
            return
        nbytes, host = self._pool.page_nbytes, payload.__array_interface__["data"][0]
        ours, pitch = self._planes.data_ptr() + block * nbytes, self._planes.stride(0)
        to, to_pitch, of, of_pitch = (ours, pitch, host, nbytes) if is_in else (host, nbytes, ours, pitch)
        stream = self._stream.cuda_stream
        # The interpreter's lock is kept: to give it up and get it back takes longer than the launch.
        status = locked_runtime().cudaMemcpy2DAsync(
            to, to_pitch, of, of_pitch, nbytes, self._pool.num_planes, ANY_DIRECTION, stream
        )
        if status:
            raise TransferError(f"a block can't be copied between host and GPU: {words_of(status)}")

    def _sum(self, blocks: Sequence[int]) -> None:
        if self._recording is None or self._stream is None:
            self._sums.launch(blocks)
            return
        count = self._sums.name(blocks)
        self._sums.pages_host.numpy()[count : self._max_blocks] = self._pool.num_blocks
        self._recording.launch(self._stream.cuda_stream)

    def _synchronize(self) -> None:
        if self._stream is not None:
            synchronize(self._stream.cuda_stream)

    def _aside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()
