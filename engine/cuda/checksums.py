"""Checksums of pages where they lie: of a chunk behind the launches that compute it, and of one that has just come."""

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from engine.cuda.memory import copy_async, mapped, synchronize
from kernels.reference.move import STRIDE

Sum = Callable[[Tensor, Tensor], None]
"""(pages int32 `[n]`, sums int32 `[n * planes]`), both on the device."""

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


class Checksums:
    """`[pages, planes]` on their way to the host, of at most `max_pages`.

    `is_mapped`: the device reads and writes the host's memory, by no copy. A copy may hold up another stream's, and 16
    pages take 20 us longer without (H200).
    """

    def __init__(
        self, operation: Sum, num_planes: int, max_pages: int, device: torch.device, is_mapped: bool = False
    ) -> None:
        self._operation, self._num_planes, self._num_pages = operation, num_planes, 0
        self.max_pages, units = max_pages, max_pages * num_planes
        self._is_mapped = is_mapped and device.type == "cuda"
        self.pages_host, self.pages = self._memory(max_pages, device)
        self.sums_host, self.sums = self._memory(units, device)
        # The operation counts the units of a launch into their checksums; this takes it out again.
        self._numbers = np.arange(units, dtype=np.uint32) * np.uint32(STRIDE)
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def launch(self, pages: SequenceOf[int]) -> None:
        """On the current stream, behind what writes these pages."""
        self.prepare(pages)
        self.go()

    @torch.inference_mode()
    def prepare(self, pages: SequenceOf[int] | np.ndarray) -> None:
        """Tell the device which pages, before what writes them is launched."""
        count = self.name(pages)
        if not self._is_mapped:
            self.pages[:count].copy_(self.pages_host[:count], non_blocking=True)

    @torch.inference_mode()
    def go(self) -> None:
        """Launch the operation on the pages of `prepare`."""
        self.run(self._num_pages)
        self.fetch()

    @torch.inference_mode()
    def fetch(self) -> None:
        """Launch what takes the sums to the host."""
        units = self._num_pages * self._num_planes
        if not self._is_mapped:
            self.sums_host[:units].copy_(self.sums[:units], non_blocking=True)
        if self._done is not None:
            self._done.record()

    def _memory(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The host's and the device's."""
        if self._is_mapped:
            return mapped(count, device)
        return _pinned(count, device), torch.empty(count, dtype=torch.int32, device=device)

    def wait(self) -> np.ndarray:
        if self._done is not None:
            self._done.synchronize()
        return self.read()

    def name(self, pages: SequenceOf[int] | np.ndarray) -> int:
        """Write down, on the host, which pages the next ones are. Returns how many."""
        self._num_pages = len(pages)
        self.pages_host.numpy()[: self._num_pages] = pages
        return self._num_pages

    def run(self, count: int) -> None:
        """The operation, on the first `count` pages that the device has been told."""
        self._operation(self.pages[:count], self.sums[: count * self._num_planes])

    def read(self) -> np.ndarray:
        """What has come to the host, each of its page alone."""
        units = self._num_pages * self._num_planes
        sums = self.sums_host.numpy()[:units].view(np.uint32)
        return (sums ^ self._numbers[:units]).reshape(self._num_pages, self._num_planes)


class Verifier:
    """Checksums of pages that have just landed, soon: where a processor slept, launching the operation took half a
    millisecond (H200); a captured graph of it is one call. Numbers of pages between the buckets are filled up with the
    `spare` one.
    """

    def __init__(self, operation: Sum, num_planes: int, spare: int, device: torch.device) -> None:
        self._operation, self._num_planes, self._spare, self._device = operation, num_planes, spare, device
        self._checksums = Checksums(operation, num_planes, BUCKETS[-1], device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._lock = threading.Lock()

    @torch.inference_mode()
    def capture(self) -> None:
        """Of an operation that is a kernel of ours, compiled already."""
        self._checksums.pages.fill_(self._spare)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            for bucket in BUCKETS:
                self._checksums.run(bucket)
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin()
                self._checksums.run(bucket)
                graph.capture_end()
                self._graphs[bucket] = graph
        torch.cuda.synchronize()

    def sums(self, pages: SequenceOf[int]) -> np.ndarray:
        """`[pages, planes]`, after what the current stream holds. From any thread."""
        bucket = next((size for size in BUCKETS if size >= len(pages)), 0)
        if bucket not in self._graphs:
            checksums = Checksums(self._operation, self._num_planes, len(pages), self._device)
            checksums.launch(pages)
            return checksums.wait()
        with self._lock:
            return self._replay(pages, bucket)

    def _replay(self, pages: SequenceOf[int], bucket: int) -> np.ndarray:
        ours, stream = self._checksums, torch.cuda.current_stream().cuda_stream
        count = ours.name(pages)
        ours.pages_host.numpy()[count:bucket] = self._spare
        copy_async(ours.pages, ours.pages_host, 4 * bucket, stream)
        self._graphs[bucket].replay()
        copy_async(ours.sums_host, ours.sums, 4 * count * self._num_planes, stream)
        synchronize(stream)
        return ours.read()


def _pinned(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")
