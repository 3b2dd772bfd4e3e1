"""The cache as a transfer to another process sees it.

Pages that the peer's copy engine reads, and their checksums.

Two devices meet here, without their hosts. Prefill's stream sets a mark behind a chunk's KV; decode's transfer stream,
which was given the copies before, waits for it. A chunk's checksums are made on a stream of their own, beside what the
engine's stream holds behind the KV: the last attention, the head and the draw.
"""

import logging
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import msgspec
import numpy as np
import torch
from torch import Tensor

from contracts.errors import TransferError
from contracts.layout import KVLayout
from engine.cuda.kv.deferred_copies import CopyStreams
from engine.cuda.kv.page_checksums import DeviceChecksums, PendingChecksums
from engine.cuda.kv.part_kernels import Resharding
from engine.cuda.kv.peer_pool import PeerPool, PoolExport, attach_all, device_name
from engine.cuda.kv.resharding import HeadPart
from engine.cuda.kv.staging import StagedPageScatter, StagingBuffer
from engine.cuda.runtime.semaphores import StreamSemaphore, StreamSemaphores
from engine.cuda.runtime.shared_memory import Memory
from kernels.registry import Registry

_log = logging.getLogger(__name__)


class DeviceTransferPool:
    """The kv_transfer.chunks.device_pool.DevicePool of a group of workers.

    It lies over the memories of a group of workers, `[num_planes, num_blocks + 1, page_nbytes]` each: ours, and those
    of our followers, of whom these are the words of Memory.share, in the order of the heads. Where there are more of
    them than shards, neighbours hold the same one: the first of them is what peers get, and what comes is written to
    each.

    `copies`: the planes of each shard, in each set of GPUs that hold all shards. `checks`: chunks that are handed over
    get checksums. `scales`: what each plane's values were divided by before they were rounded to e4m3; none of a cache
    that is not rounded. All work is done by our device, which reaches the other ones' memory. Raises TransferError if a
    follower's can't be mapped.
    """

    def __init__(
        self,
        memory: Memory,
        layout: KVLayout,
        num_blocks: int,
        registry: Registry,
        scales: SequenceOf[float] = (),
        followers: SequenceOf[bytes] = (),
    ) -> None:
        num_copies, rest = divmod(1 + len(followers), layout.tp_size)
        assert rest == 0, f"{layout.tp_size} shards, {len(followers)} followers"
        self.memory, self.scales, self._ranks = memory, list(scales), list(followers)
        group = layout.only_group
        self.num_planes, self.num_blocks = group.num_planes, num_blocks
        self.page_nbytes, self.block_nbytes = group.page_nbytes(layout.tp_size), group.block_nbytes
        self.device = memory.tensor.device
        self.checks = True
        self._staging = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # Of a team nobody knows when all have written before they meet again.
        self._summing = torch.cuda.Stream(self.device) if self._staging is not None and not followers else None
        self._written = torch.cuda.Event() if self._summing is not None else None
        self._sharing = torch.cuda.Stream(self.device) if self._summing is not None else None
        self._mappings = attach_all(followers, self.device)
        tensors = [memory.tensor, *(mapping.tensor(len(memory.tensor)) for mapping in self._mappings)]
        held = [tensor.view(self.num_planes, num_blocks + 1, self.page_nbytes) for tensor in tensors]
        self.copies = [held[first::num_copies] for first in range(num_copies)]
        self._shards = self.copies[0]
        self.registry, self._narrows = registry, group.dtype == "bfloat16"
        self._reshardings: dict[int, Resharding] = {}
        self._summed = [self.num_shards]  # the numbers of parts that chunks are summed up in; only ever longer
        self._lock = threading.Lock()
        self._own = self.cut_into(self.num_shards, warms=False)
        self.copy_streams = CopyStreams(self.device) if self.device.type == "cuda" else None
        self._marks: StreamSemaphores | None = None

    @property
    def kind(self) -> str:
        return self.device.type

    @property
    def num_shards(self) -> int:
        """Those that differ."""
        return len(self._shards)

    @property
    def num_copies(self) -> int:
        """GPUs that hold the same shard."""
        return len(self.copies)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Planes, shards, bytes of a shard's page."""
        return self.num_planes, self.num_shards, self.page_nbytes

    def expect(self, part_counts: SequenceOf[int]) -> None:
        """Peers may want pages in so many parts: what that takes is compiled now, and not in their handshakes.

        Before anything else launches kernels of ours. Raises TransferError as `cut_into`.
        """
        start = time.perf_counter()
        fresh = {count: self._resharding(count) for count in part_counts if count not in self._reshardings}
        self._warm_up(list(fresh.values()))
        self._reshardings |= fresh
        if fresh:
            _log.info("pages in %s parts: ready in %.1f s", ", ".join(map(str, fresh)), time.perf_counter() - start)

    def cut_into(self, num_parts: int, warms: bool = True) -> Resharding:
        """Compiles what is needed for it, if that was not expected.

        Raises TransferError if it can't be cut so.
        """
        with self._lock:
            if num_parts not in self._reshardings:
                fresh = self._resharding(num_parts)
                if warms:
                    self.enter()
                    fresh.warm_up()
                self._reshardings[num_parts] = fresh
            return self._reshardings[num_parts]

    def agreed(self, num_parts: int, sends: bool) -> None:
        """Pages go to a peer, or come from one, in so many parts."""
        self.cut_into(num_parts)
        with self._lock:
            if sends and num_parts not in self._summed:
                self._summed.append(num_parts)

    def share(self) -> bytes:
        """Raises TransferError where the device does not let others in."""
        memories = [self.memory.share(), *self._ranks][:: self.num_copies]
        num_pages = self.num_blocks + 1
        sharing = PoolExport(memories, device_name(self.device), self.num_planes, num_pages, self.page_nbytes)
        return msgspec.msgpack.encode(sharing)

    def mark(self) -> StreamSemaphore | None:
        """One of its own for each peer."""
        try:
            with self._lock:
                self._marks = self._marks or StreamSemaphores(self.device)
                return self._marks.next()
        except TransferError as error:
            _log.warning("chunks are told of after they are computed, not before: %s", error)
            return None

    def close(self) -> None:
        """Give up the marks and the followers' memory.

        Nothing is launched any more: nobody finds the marks from now on, and the followers' memory is unmapped.
        Idempotent.
        """
        if self._marks is not None:
            self._marks.close()
        for mapping in self._mappings:
            mapping.close()

    def attach(self, shared: bytes, mark: bytes = b"") -> PeerPool:
        """A peer's pool, from what its `share` said. Raises TransferError if it can't be read from here."""
        try:
            sharing = msgspec.msgpack.decode(shared, type=PoolExport)
        except msgspec.DecodeError as error:
            raise TransferError(f"the peer does not say where its pages are: {error}") from error
        return PeerPool(self, sharing, mark)

    def checksums(self, pages: SequenceOf[int]) -> DeviceChecksums | PendingChecksums:
        """Launched on the current stream, behind what writes these pages.

        By shard; where a peer's shards are finer, by those too.
        """
        if len(self._summed) == 1:
            return self._launched(self._own, pages)
        return PendingChecksums(
            [self._launched(self._reshardings[num_parts], pages) for num_parts in list(self._summed)]
        )

    @property
    def notes_written(self) -> bool:
        """Return whether `wait_written` waits: of a team nobody knows."""
        return self._written is not None

    def written(self) -> None:
        """Record that the current stream's work so far writes the pages `checksums_aside` sums next."""
        if self._written is not None:
            self._written.record()

    def wait_written(self, stream: torch.cuda.Stream) -> None:
        """Let a stream go on once all is there that prompts write by the last `written`. From any thread."""
        if self._written is not None:
            stream.wait_event(self._written)

    def checksums_aside(self, pages: SequenceOf[int]) -> DeviceChecksums | PendingChecksums:
        """Return the sums of pages, queued after the last `written` and concurrent with what came since."""
        if self._summing is None or self._written is None:
            return self.checksums(pages)
        # Their memory is that stream's too: it is nobody else's before the device has used it.
        with torch.cuda.stream(self._summing):
            self._summing.wait_event(self._written)
            return self.checksums(pages)

    def checksums_behind(self, pages: SequenceOf[int]) -> DeviceChecksums | PendingChecksums:
        """Return the sums of pages once all is computed that was launched so far, concurrent with what comes."""
        if self._sharing is None:
            return self.checksums(pages)
        self._sharing.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._sharing):
            return self.checksums(pages)

    def in_parts(self, sums: np.ndarray, pages: SequenceOf[int], num_parts: int) -> np.ndarray:
        """Those of what `checksums` gave of `pages` that are by so many parts.

        What was not known to be wanted when it was launched is summed up now.
        """
        ways = list(self._summed)
        first = sum(ways[: ways.index(num_parts)]) * self.num_planes
        last = first + num_parts * self.num_planes
        if sums.shape[1] >= last:
            return sums[:, first:last]
        with self._aside():
            return self._launched(self._reshardings[num_parts], pages).wait()

    def enter(self) -> None:
        """The calling thread works with this device from now on."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def allocate(self, nbytes: int) -> StagingBuffer:
        return self._own.packer.allocate(nbytes)

    def free(self, buffer: StagingBuffer) -> None:
        buffer.free()

    def pack(self, pages: np.ndarray, into: StagingBuffer, num_parts: int) -> None:
        """Copy `pages` to its start, each in its parts, all planes of each part in turn.

        They are there on return.
        """
        self.cut_into(num_parts).packer.pack(pages, into)

    def unpack(self, buffer: StagingBuffer, pages: np.ndarray, checks: bool, num_parts: int) -> StagedPageScatter:
        """The other way round, launched on return; with checksums of `pages` if `checks`."""
        return self.cut_into(num_parts).packer.unpack(buffer, pages, checks)

    def narrowing(self, scales: SequenceOf[float]) -> Tensor:
        """What `narrow` takes, for a peer with these scales.

        As the kernel that writes e4m3 caches has them: inverted in double precision, then rounded.
        """
        return torch.tensor([1.0 / scale for scale in scales], dtype=torch.float32, device=self.device)

    def narrow(self, pages: np.ndarray, into: StagingBuffer, narrowing: Tensor, num_parts: int) -> np.ndarray:
        """Pack, each plane divided by the peer's scale and rounded to e4m3."""
        return self.cut_into(num_parts).packer.narrow(pages, into, narrowing)

    def warm_up(self) -> None:
        """Compile the kernels of checksums and of packing, one for all numbers of pages.

        Before anything else launches kernels of ours.
        """
        self._warm_up([self._own])

    @torch.inference_mode()
    def gather(self, rows: np.ndarray, out: np.ndarray, num_parts: int = 1) -> None:
        """Copy parts of pages into `out` on the host.

        `rows` as kv_transfer.chunks.chunk_plan.row_ids counts them.
        """
        parts = self.cut_into(num_parts).parts
        with self._aside():
            for part, index, chosen in self._by_part(rows, parts):
                found = part.rows.index_select(0, index)
                torch.from_numpy(out.reshape(-1, part.width)[chosen]).copy_(found)

    @torch.inference_mode()
    def scatter(self, rows: np.ndarray, data: np.ndarray, num_parts: int = 1) -> None:
        copies = self.cut_into(num_parts).copies
        with self._aside():
            for part, index, chosen in chain.from_iterable(self._by_part(rows, parts) for parts in copies):
                pages = torch.from_numpy(data.reshape(-1, part.width)[chosen]).to(self.device)
                part.rows.index_copy_(0, index, pages)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def _resharding(self, num_parts: int) -> Resharding:
        return Resharding(self.copies, num_parts, self.registry, self._narrows)

    def _warm_up(self, cuts: SequenceOf[Resharding]) -> None:
        self.enter()
        if self.device.type == "cuda":
            from kernels.compiling import compiled_ahead  # imports Triton, which a CPU does without

            with compiled_ahead():
                for each in cuts:
                    each.run_all()
        for each in cuts:
            each.warm_up()

    def _launched(self, cut: Resharding, pages: SequenceOf[int]) -> DeviceChecksums:
        sums = cut.checksums_of(len(pages))
        sums.launch(pages)
        return sums

    def _by_part(self, rows: np.ndarray, parts: SequenceOf[HeadPart]) -> Iterator[tuple[HeadPart, Tensor, slice]]:
        """Each part that is among `rows`, which of its rows, and where among all: they come part by part.

        Each plane has a page more than blocks.
        """
        numbers, inner = np.divmod(rows, self.num_planes * self.num_blocks)
        index = inner + inner // self.num_blocks
        for number, part in enumerate(parts):
            first, last = np.searchsorted(numbers, (number, number + 1)).tolist()
            if first < last:
                yield part, torch.from_numpy(index[first:last]).to(self.device), slice(first, last)

    def _aside(self) -> AbstractContextManager[object]:
        """Return a context in which any thread's work runs concurrently with the engine's stream."""
        return torch.cuda.stream(self._staging) if self._staging is not None else nullcontext()
