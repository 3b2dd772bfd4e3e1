"""Pages packed into contiguous memory and back by kernels: what a network takes along in one message.

Launching a kernel from Python took 150 us of the 210 that packing 64 MiB did (H200), so the launches are recorded,
for some numbers of pages; those between them are filled up with the page of nobody's.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from contracts.errors import ConfigError, TransferError
from engine.cuda.checksums import BUCKETS, Checksums, Sum
from engine.cuda.memory import Memory, Recording, allocate, synchronize
from kernels.registry import Registry
from kernels.specs import MoveSpec


class StagingBuffer:
    """kv_transfer.device.Buffer: memory of its own, a stream of its own, and `checksums` of the pages that it can hold,
    which tell the device which pages these are. `inv_scales` `[planes]`: of what is rounded on its way into it, where
    recorded launches find them, the same as the present `narrowing`.

    Raises TransferError if there is not so much memory.
    """

    def __init__(self, nbytes: int, checksums: Checksums, device: torch.device) -> None:
        try:
            self._memory: Memory | None = allocate(nbytes, device)
        except ConfigError as error:
            raise TransferError(f"no memory for staging: {error}") from error
        self.tensor, self.checksums = self._memory.tensor, checksums
        # Of high priority: these few copies come before what the engine has launched.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.recordings: dict[tuple[str, int], Recording] = {}
        self.inv_scales: Tensor | None = None
        self.narrowing: Tensor | None = None

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def stream(self) -> int:
        return self._stream.cuda_stream if self._stream is not None else 0

    def __len__(self) -> int:
        return len(self.tensor)

    def free(self) -> None:
        """Nothing touches it any more. Idempotent."""
        self.recordings.clear()
        self._memory, self.tensor = None, self.tensor.new_empty(0)

    def put(self, data: np.ndarray) -> None:
        with self.aside():
            self.tensor[: len(data)].copy_(torch.from_numpy(data))
            self.wait()

    def aside(self) -> AbstractContextManager[object]:
        """Beside the engine's stream, for any thread."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def wait(self) -> None:
        if self._stream is not None:
            synchronize(self.stream)


class Packer:
    """Between `planes` `[num_planes, num_blocks + 1, page_nbytes]`, the last page of which is nobody's, and staging.
    Any thread, each with a buffer of its own. `narrows`: the values are bf16, and may go to a peer whose cache is e4m3.
    """

    def __init__(self, planes: Tensor, sum_: Sum, registry: Registry, narrows: bool) -> None:
        self._planes, self._sum = planes, sum_
        self._num_planes, page_nbytes = planes.shape[0], planes.shape[2]
        self._block_nbytes, spec = self._num_planes * page_nbytes, MoveSpec(self._num_planes, page_nbytes)
        self._pack, self._unpack = registry.get("kv_pack", spec), registry.get("kv_unpack", spec)
        self._narrow_nbytes, self._narrow = self._block_nbytes // 2, None
        if narrows:
            self._narrow = registry.get("kv_pack", MoveSpec(self._num_planes, page_nbytes // 2, True, True))
        self._is_recorded = planes.is_cuda and registry.resolve("kv_pack", spec).impl.name == "triton"
        self._no_verdict = torch.zeros(1, dtype=torch.int32, device=planes.device)

    def lend(self, nbytes: int) -> StagingBuffer:
        device, max_pages = self._planes.device, max(nbytes // self._narrow_nbytes, 1)
        checksums = Checksums(self._sum, self._num_planes, max_pages, device, is_mapped=True)
        buffer = StagingBuffer(nbytes, checksums, device)
        if self._is_recorded:
            self._record(buffer, ("pack", "unpack and sum"), self._block_nbytes)
        return buffer

    def pack(self, pages: np.ndarray, into: StagingBuffer) -> None:
        self._go("pack", pages, into)

    def unpack(self, buffer: StagingBuffer, pages: np.ndarray, checks: bool) -> np.ndarray | None:
        self._go("unpack and sum" if checks else "unpack", pages, buffer)
        return buffer.checksums.read() if checks else None

    def narrow(self, pages: np.ndarray, into: StagingBuffer, inv_scales: Tensor) -> np.ndarray:
        """As `pack`, times `inv_scales` and rounded to e4m3. Returns the checksums of what was packed,
        `[pages, planes]`.
        """
        if into.inv_scales is None:
            into.inv_scales = inv_scales.clone()
            if self._is_recorded:
                self._record(into, ("narrow",), self._narrow_nbytes)
        if into.narrowing is not inv_scales:
            with into.aside():
                into.inv_scales.copy_(inv_scales)
            into.narrowing = inv_scales
        self._go("narrow", pages, into)
        return into.checksums.read()

    def warm_up(self) -> None:
        """Compile the kernels, each one for all numbers of pages."""
        buffer, nobodys = self.lend(self._block_nbytes), np.full(1, self._spare, dtype=np.int32)
        buffer.inv_scales = torch.ones(self._num_planes, device=self._planes.device)
        for what in ("pack", "unpack and sum", *(["narrow"] if self._narrow else [])):
            self._launch(what, buffer, nobodys)
        buffer.wait()
        buffer.free()

    @property
    def _spare(self) -> int:
        return self._planes.shape[1] - 1

    def _go(self, what: str, pages: np.ndarray, buffer: StagingBuffer) -> None:
        """Done on return."""
        count = len(pages)
        bucket = next((size for size in BUCKETS if size >= count), 0)
        if recording := buffer.recordings.get((what, bucket)):
            buffer.checksums.name(pages)
            buffer.checksums.pages_host.numpy()[count:bucket] = self._spare
            recording.launch(buffer.stream)
        else:
            self._launch(what, buffer, pages)
        buffer.wait()

    @torch.inference_mode()
    def _record(self, buffer: StagingBuffer, whats: Sequence[str], block_nbytes: int) -> None:
        """Each launch runs once before: what has to be loaded is loaded then."""
        for bucket in [size for size in BUCKETS if size * block_nbytes <= len(buffer)]:
            pages = np.full(bucket, self._spare, dtype=np.int32)
            for what in whats:
                self._launch(what, buffer, pages)
                buffer.wait()
                with buffer.aside():
                    again = Recording(lambda what=what, bucket=bucket: self._run(what, buffer, bucket), buffer.stream)
                buffer.recordings[what, bucket] = again

    @torch.inference_mode()
    def _launch(self, what: str, buffer: StagingBuffer, pages: np.ndarray) -> None:
        with buffer.aside():
            buffer.checksums.prepare(pages)
            self._run(what.removesuffix(" and sum"), buffer, len(pages))
            if what.endswith(" and sum"):
                buffer.checksums.go()
            elif what == "narrow":
                buffer.checksums.fetch()

    def _run(self, what: str, buffer: StagingBuffer, count: int) -> None:
        """On the pages that the device has been told."""
        pages, part = buffer.checksums.pages[:count], buffer.tensor[: count * self._block_nbytes]
        if what == "narrow":
            values, sums = self._planes.view(torch.bfloat16), buffer.checksums.sums[: count * self._num_planes]
            rounded = buffer.tensor[: count * self._narrow_nbytes]
            assert self._narrow is not None, "only values of bf16 are rounded"
            self._narrow(values, pages, rounded, sums, inv_scales=buffer.inv_scales)
            return
        if what == "pack":
            self._pack(self._planes, pages, part, None)
            return
        self._unpack(part, self._planes, pages, None, self._no_verdict)
        if what.endswith(" and sum"):
            buffer.checksums.run(count)
