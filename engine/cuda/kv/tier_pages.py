"""The pages of a GPU as the tiers below it see them: whole blocks to page-locked memory and back.

The copy engine moves each block by one copy: no multiprocessor takes part, and nothing lies between. The pages are
summed up where they lie on the GPU, so what is compared is what the engine will read. Of several GPUs that share a
model each holds the pages of some heads: by a copy for each, a block on the host is what one GPU would have.
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch

from contracts.errors import TransferError
from engine.cuda.kv.page_checksums import DeviceChecksums
from engine.cuda.kv.part_sums import part_sums
from engine.cuda.kv.resharding import cut
from engine.cuda.kv.transfer_pool import DeviceTransferPool
from engine.cuda.runtime.bindings import ANY_DIRECTION, locked_runtime, words_of
from engine.cuda.runtime.launch_recording import Recording, synchronize
from engine.cuda.runtime.pinned_memory import pinned_bytes
from kernels.specs import MoveSpec


class TierPages:
    """The pool of a worker's GPU, or of several that share its model, for the threads of its tiers."""

    def __init__(self, pool: DeviceTransferPool) -> None:
        self._pool, self._lock = pool, threading.Lock()
        self._launched = torch.cuda.Event() if pool.device.type == "cuda" else None

    def launched(self, is_decoded: bool) -> None:
        """Note that what was launched so far, by the calling thread, writes a block that is fetched next.

        It is the engine's thread. Behind it all GPUs of a worker have met. What prompts write on one alone is noted by
        the pool, as soon as it is launched, so it need not be here.
        """
        if self._launched is not None and (is_decoded or not self._pool.notes_written):
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
        self._parts = part_sums(pool.num_shards * pool.page_nbytes, pool.num_shards)
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None
        self._sums, is_kernel = self._checksums()
        self._recording = self._record() if self._stream is not None and is_kernel else None

    def _checksums(self) -> tuple[DeviceChecksums, bool]:
        """Return those of all parts of pages, in all copies of them, and whether a kernel of ours makes them."""
        pool, starts = self._pool, self._parts.first_columns
        copies = [cut(shards, len(starts)) for shards in pool.copies]
        spec = MoveSpec(pool.num_planes, copies[0][0].width, checksum=True)
        operation = pool.registry.get("kv_sums", spec)
        sums = [
            [
                partial(operation, part.planes, offset=part.offset, first=start)
                for part, start in zip(parts, starts, strict=True)
            ]
            for parts in copies
        ]
        is_kernel = pool.registry.resolve("kv_sums", spec).impl.name == "triton"
        return DeviceChecksums(sums, pool.num_planes, self._max_blocks, pool.device, is_mapped=True), is_kernel

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
        """Launch copies of payloads into blocks, and their checksums.

        Each is uint8 `[block_nbytes]`, of all shards. Payloads stay as they are until `wait`.
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
        sums = self._sums.read()
        return self._parts.join(sums.reshape(len(sums), -1, self._pool.num_planes).transpose(0, 2, 1))

    def _copy(self, payload: np.ndarray, block: int, is_in: bool) -> None:
        """Copy a block from or to the host, the heads of each shard; into all that have them, from the first."""
        for shards in self._pool.copies if is_in else self._pool.copies[:1]:
            for index, planes in enumerate(shards):
                self._copy_shard(payload, index, planes, block, is_in)

    def _copy_shard(self, payload: np.ndarray, index: int, planes: torch.Tensor, block: int, is_in: bool) -> None:
        nbytes, num_shards = self._pool.page_nbytes, self._pool.num_shards
        if self._stream is None:
            pages = torch.from_numpy(payload.reshape(self._pool.num_planes, num_shards, nbytes))[:, index]
            ours = planes[:, block]
            (ours if is_in else pages).copy_(pages if is_in else ours)
            return
        host, host_pitch = payload.__array_interface__["data"][0] + index * nbytes, num_shards * nbytes
        ours, pitch = planes.data_ptr() + block * nbytes, planes.stride(0)
        to, to_pitch, of, of_pitch = (ours, pitch, host, host_pitch) if is_in else (host, host_pitch, ours, pitch)
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
