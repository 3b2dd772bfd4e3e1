"""Checksums of pages where they lie.

Of a chunk behind the launches that compute it, and of one that has just come.
"""

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.cuda.runtime.launch_recording import Recording, copy_async, mapped, synchronize
from kernels.reference.move import STRIDE

Sum = Callable[[Tensor, Tensor], None]
"""(pages int32 `[n]`, sums int32 `[n * planes]`), both on the device."""

Op = Callable[..., None]
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_ALIGNED_UNITS = 4


class DeviceChecksums:
    """`[pages, parts * planes]` on their way to the host, of at most `max_pages`.

    `operations`: one for each part, of each copy of the pages.

    `is_mapped`: the device reads and writes the host's memory, by no copy. A copy may hold up another stream's, and 16
    pages take 20 us longer without (H200).
    """

    def __init__(
        self,
        operations: SequenceOf[SequenceOf[Sum]],
        num_planes: int,
        max_pages: int,
        device: torch.device,
        is_mapped: bool = False,
    ) -> None:
        self._operations = [operation for of_copy in operations for operation in of_copy]
        self._num_copies, self._num_planes, self._num_pages = len(operations), num_planes, 0
        self.max_pages, units = max_pages, max_pages * num_planes
        self._is_mapped = is_mapped and device.type == "cuda"
        self.pages_host, self.pages = self._memory(max_pages, device)
        # Triton compiles anew for a pointer that no 16 bytes divide, and that would be in the middle of a handoff.
        step = -(-units // _ALIGNED_UNITS) * _ALIGNED_UNITS
        sums_host, sums = self._memory(step * len(self._operations), device)
        self.sums_host, self.sums = sums_host.split(step), sums.split(step)
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
            for host, sums in zip(self.sums_host, self.sums, strict=True):
                host[:units].copy_(sums[:units], non_blocking=True)
        if self._done is not None:
            self._done.record()

    def _memory(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The host's and the device's."""
        if self._is_mapped:
            return mapped(count, device)
        return _pinned(count, device), torch.empty(count, dtype=torch.int32, device=device)

    @property
    def is_done(self) -> bool:
        return self._done is None or self._done.query()

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
        """The operations, on the first `count` pages that the device has been told."""
        for operation, sums in zip(self._operations, self.sums, strict=True):
            operation(self.pages[:count], sums[: count * self._num_planes])

    def read(self) -> np.ndarray:
        """What has come to the host, each of its page alone.

        Where copies differ, a sum that none of them has: it is not what any page should be.
        """
        first, *others = (self._read(number) for number in range(self._num_copies))
        if not others:
            return first
        return np.where(np.all([other == first for other in others], axis=0), first, ~first)

    def read_first(self) -> np.ndarray:
        """Those of the first copy, where it alone was summed up."""
        return self._read(0)

    def _read(self, copy: int) -> np.ndarray:
        units, num_parts = self._num_pages * self._num_planes, len(self._operations) // self._num_copies
        sums_host = self.sums_host[copy * num_parts : (copy + 1) * num_parts]
        parts = [sums.numpy()[:units].view(np.uint32) ^ self._numbers[:units] for sums in sums_host]
        by_page = [part.reshape(self._num_pages, self._num_planes) for part in parts]
        return by_page[0] if len(by_page) == 1 else np.concatenate(by_page, axis=1)


class PendingChecksums:
    """The same pages summed in several ways, one behind the other."""

    def __init__(self, summings: SequenceOf[DeviceChecksums]) -> None:
        self._summings = summings

    @property
    def is_done(self) -> bool:
        return all(summing.is_done for summing in self._summings)

    def wait(self) -> np.ndarray:
        """`[pages, parts * planes]` of the first, then those of the next."""
        return np.concatenate([summing.wait() for summing in self._summings], axis=1)


class Verifier:
    """The checksums of pages that have just arrived, soon.

    Where a processor slept, launching the operation took half a millisecond (H200); recorded, it is one call. Numbers
    of pages between the buckets are filled up with the `spare` one.
    """

    def __init__(
        self, operations: SequenceOf[SequenceOf[Sum]], num_planes: int, spare: int, device: torch.device
    ) -> None:
        self._operations, self._num_planes, self._spare, self._device = operations, num_planes, spare, device
        self._checksums = DeviceChecksums(operations, num_planes, BUCKETS[-1], device)
        self._recordings: dict[int, Recording] = {}
        self._lock = threading.Lock()

    @torch.inference_mode()
    def capture(self) -> None:
        """Record operations that are kernels of ours, compiled already."""
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            self._checksums.pages.fill_(self._spare)
            for bucket in BUCKETS:
                self._checksums.run(bucket)
                synchronize(stream.cuda_stream)
                again = Recording(partial(self._checksums.run, bucket), stream.cuda_stream)
                self._recordings[bucket] = again

    def sums(self, pages: SequenceOf[int]) -> np.ndarray:
        """`[pages, parts * planes]`, after what the current stream holds. From any thread."""
        bucket = next((size for size in BUCKETS if size >= len(pages)), 0)
        if bucket not in self._recordings:
            checksums = DeviceChecksums(self._operations, self._num_planes, len(pages), self._device)
            checksums.launch(pages)
            return checksums.wait()
        with self._lock:
            return self._replay(pages, bucket)

    def _replay(self, pages: SequenceOf[int], bucket: int) -> np.ndarray:
        ours, stream = self._checksums, torch.cuda.current_stream().cuda_stream
        count = ours.name(pages)
        ours.pages_host.numpy()[count:bucket] = self._spare
        copy_async(ours.pages, ours.pages_host, 4 * bucket, stream)
        self._recordings[bucket].launch(stream)
        for host, sums in zip(ours.sums_host, ours.sums, strict=True):
            copy_async(host, sums, 4 * count * self._num_planes, stream)
        synchronize(stream)
        return ours.read()


def _pinned(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int32, pin_memory=device.type == "cuda")
