"""Pages packed into contiguous memory and back by kernels: what a network takes along in one message.

Launching a kernel from Python took 150 us of the 210 that packing 64 MiB did (H200), so the launches are recorded,
for some numbers of pages; those between them are filled up with the page of nobody's.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from contracts.errors import ConfigError, TransferError
from engine.cuda.kv.page_checksums import BUCKETS, DeviceChecksums, Op, Sum
from engine.cuda.kv.resharding import HeadPart
from engine.cuda.runtime.launch_recording import Recording, synchronize
from engine.cuda.runtime.shared_memory import Memory, allocate
from kernels.registry import Registry
from kernels.specs import MoveSpec


@dataclass
class StagingOperations:
    """The operations of a buffer for one way of cutting pages.

    `checksums` of those that it can hold, which tell the device which pages these are, and recorded launches, by the
    number of pages.
    """

    checksums: DeviceChecksums
    recordings: dict[str, dict[int, Recording]] = field(default_factory=dict)


class StagingBuffer:
    """A device_pool.Buffer: memory and a stream of its own, and operations for each Packer.

    `inv_scales` `[planes]`: of what is rounded on its way into it, where recorded launches find them, the same as the
    present `narrowing`.

    Raises TransferError if there is not so much memory.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        try:
            self._memory: Memory | None = allocate(nbytes, device)
        except ConfigError as error:
            raise TransferError(f"no memory for staging: {error}") from error
        self.tensor, self.operations = self._memory.tensor, dict["Packer", StagingOperations]()
        # Of high priority: these few copies come before what the engine has launched.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
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
        self.operations.clear()
        self._memory, self.tensor = None, self.tensor.new_empty(0)

    def put(self, data: np.ndarray) -> None:
        with self.aside():
            self.tensor[: len(data)].copy_(torch.from_numpy(data))
            self.wait()

    def aside(self) -> AbstractContextManager[object]:
        """Return a context in which any thread's work runs concurrently with the engine's stream."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    @property
    def is_idle(self) -> bool:
        """Raises TransferError if something failed."""
        try:
            return self._stream is None or self._stream.query()
        except RuntimeError as error:
            raise TransferError(f"the GPU failed: {error}") from error

    def wait(self) -> None:
        """Until it is."""
        if self._stream is not None:
            synchronize(self.stream)


class StagedPageScatter:
    """kv_transfer.chunks.device_pool.PageScatter. `checksums`: those of the pages, if they were asked for."""

    def __init__(self, buffer: StagingBuffer, checksums: DeviceChecksums | None) -> None:
        self._buffer, self._checksums = buffer, checksums

    @property
    def is_done(self) -> bool:
        return self._buffer.is_idle

    def wait(self) -> np.ndarray | None:
        self._buffer.wait()
        return self._checksums.read() if self._checksums is not None else None


class Packer:
    """The copies between pages and staging.

    The pages are those of the parts of these `copies`, the last page of which is nobody's, and staging, where the parts
    of a page lie side by side: `[pages, parts, planes, width]`. The first copy is packed, all are unpacked to. Any
    thread, each with a buffer of its own. `sums`: the operations that sum the parts up, by copy. `narrows`: the values
    are bf16, and may go to a peer whose cache is e4m3.
    """

    def __init__(
        self, copies: Sequence[Sequence[HeadPart]], sums: Sequence[Sequence[Sum]], registry: Registry, narrows: bool
    ) -> None:
        self._copies, self._sums, self._registry, self._narrows = copies, sums, registry, narrows
        parts = self._parts = copies[0]
        planes, width = parts[0].planes, parts[0].width
        self._num_planes, self._device, self._spare = planes.shape[0], planes.device, planes.shape[1] - 1
        self._block_nbytes, self._spec = len(parts) * self._num_planes * width, MoveSpec(self._num_planes, width)
        self._pack, self._unpack = registry.get("kv_pack", self._spec), registry.get("kv_unpack", self._spec)
        self._narrow_nbytes, self._narrow_spec = self._block_nbytes // 2, _rounded(self._spec)
        self._recorded_whats = recordable(registry, self._spec, narrows) if planes.is_cuda else ()
        self._no_verdict = torch.zeros(1, dtype=torch.int32, device=planes.device)

    def allocate(self, nbytes: int) -> StagingBuffer:
        buffer = StagingBuffer(nbytes, self._device)
        for what in ("pack", "unpack and sum"):
            self._recorded(what, buffer)
        return buffer

    def pack(self, pages: np.ndarray, into: StagingBuffer) -> None:
        self._start("pack", pages, into)
        into.wait()

    def unpack(self, buffer: StagingBuffer, pages: np.ndarray, checks: bool) -> StagedPageScatter:
        self._start("unpack and sum" if checks else "unpack", pages, buffer)
        return StagedPageScatter(buffer, self._kit(buffer).checksums if checks else None)

    def narrow(self, pages: np.ndarray, into: StagingBuffer, inv_scales: Tensor) -> np.ndarray:
        """Pack, times `inv_scales` and rounded to e4m3.

        Returns the checksums of what was packed, `[pages, parts * planes]`.
        """
        if into.narrowing is not inv_scales:
            with into.aside():
                into.inv_scales = torch.empty_like(inv_scales) if into.inv_scales is None else into.inv_scales
                into.inv_scales.copy_(inv_scales)
            into.narrowing = inv_scales
        self._start("narrow", pages, into)
        into.wait()
        return self._kit(into).checksums.read_first()

    def run_all(self) -> None:
        """Each kernel once, on the page of nobody."""
        buffer, nobodys = StagingBuffer(self._block_nbytes, self._device), np.full(1, self._spare, dtype=np.int32)
        with buffer.aside():
            buffer.inv_scales = torch.ones(self._num_planes, device=self._device)
        for what in ("pack", "unpack and sum", *(["narrow"] if self._narrows else [])):
            self._launch(what, buffer, nobodys)
        buffer.wait()
        buffer.free()

    def _kit(self, buffer: StagingBuffer) -> StagingOperations:
        """Return our operations of a buffer.

        It serves one link after the other, which may cut pages otherwise, and all groups of layers of a link.
        """
        if kit := buffer.operations.get(self):
            return kit
        max_pages = max(len(buffer) // self._narrow_nbytes, 1)
        checksums = DeviceChecksums(self._sums, self._num_planes, max_pages, self._device, is_mapped=True)
        kit = buffer.operations[self] = StagingOperations(checksums)
        return kit

    def _start(self, what: str, pages: np.ndarray, buffer: StagingBuffer) -> None:
        kit, count = self._kit(buffer), len(pages)
        bucket = next((size for size in BUCKETS if size >= count), 0)
        if recording := self._recorded(what, buffer).get(bucket):
            kit.checksums.name(pages)
            kit.checksums.pages_host.numpy()[count:bucket] = self._spare
            recording.launch(buffer.stream)
        else:
            self._launch(what, buffer, pages)

    @torch.inference_mode()
    def _recorded(self, what: str, buffer: StagingBuffer) -> dict[int, Recording]:
        """Return the launches by the number of pages.

        Each launch runs once before: what has to be loaded is loaded then. So only what is about to be done anyway is
        recorded late: a buffer from which pages are to be unpacked holds them already.
        """
        recordings = self._kit(buffer).recordings
        if what in recordings or what not in self._recorded_whats:
            return recordings.get(what, {})
        found = recordings[what] = {}
        block_nbytes = self._narrow_nbytes if what == "narrow" else self._block_nbytes
        for bucket in [size for size in BUCKETS if size * block_nbytes <= len(buffer)]:
            self._launch(what, buffer, np.full(bucket, self._spare, dtype=np.int32))
            buffer.wait()
            with buffer.aside():
                found[bucket] = Recording(partial(self._run, what, buffer, bucket), buffer.stream)
        return found

    @torch.inference_mode()
    def _launch(self, what: str, buffer: StagingBuffer, pages: np.ndarray) -> None:
        checksums = self._kit(buffer).checksums
        with buffer.aside():
            checksums.prepare(pages)
            self._run(what.removesuffix(" and sum"), buffer, len(pages))
            if what.endswith(" and sum"):
                checksums.go()
            elif what == "narrow":
                checksums.fetch()

    def _run(self, what: str, buffer: StagingBuffer, count: int) -> None:
        """On the pages that the device has been told."""
        checksums = self._kit(buffer).checksums
        pages, run = checksums.pages[:count], {"pack": self._run_pack, "narrow": self._run_narrow}
        run.get(what, self._run_unpack)(buffer, pages)
        if what.endswith(" and sum"):
            checksums.run(count)

    def _run_pack(self, buffer: StagingBuffer, pages: Tensor) -> None:
        for part, packed in zip(self._parts, self._packed(buffer, len(pages), self._block_nbytes), strict=True):
            self._pack(part.planes, pages, packed, None, offset=part.offset)

    def _run_unpack(self, buffer: StagingBuffer, pages: Tensor) -> None:
        for parts in self._copies:
            for part, packed in zip(parts, self._packed(buffer, len(pages), self._block_nbytes), strict=True):
                self._unpack(packed, part.planes, pages, None, self._no_verdict, offset=part.offset)

    def _run_narrow(self, buffer: StagingBuffer, pages: Tensor) -> None:
        parts = zip(
            self._parts,
            self._packed(buffer, len(pages), self._narrow_nbytes),
            self._kit(buffer).checksums.sums[: len(self._parts)],
            strict=True,
        )
        for part, packed, sums in parts:
            values, ours = part.planes.view(torch.bfloat16), sums[: len(pages) * self._num_planes]
            where = {"offset": part.offset // 2, "inv_scales": buffer.inv_scales}
            self._narrow(values, pages, packed, ours, **where)

    def _packed(self, buffer: StagingBuffer, count: int, block_nbytes: int) -> Sequence[Tensor]:
        """Return where so many pages lie in the buffer, part by part."""
        flat = buffer.tensor[: count * block_nbytes]
        if len(self._parts) == 1:
            return [flat]
        return flat.view(count, len(self._parts), self._num_planes, -1).unbind(1)

    @cached_property
    def _narrow(self) -> Op:
        assert self._narrows, "only values of bf16 are rounded"
        return self._registry.get("kv_pack", self._narrow_spec)


def recordable(registry: Registry, spec: MoveSpec, narrows: bool) -> tuple[str, ...]:
    """What launches kernels of ours alone, which allocate nothing.

    Parts of a page can be too small for the one that rounds, and not for the others.
    """

    def is_ours(each: MoveSpec) -> bool:
        return registry.resolve("kv_pack", each).impl.name == "triton"

    if not is_ours(spec):
        return ()
    moved = ("pack", "unpack and sum")
    return (*moved, "narrow") if narrows and is_ours(_rounded(spec)) else moved


def _rounded(spec: MoveSpec) -> MoveSpec:
    return MoveSpec(spec.planes, spec.unit_nbytes // 2, convert=True, checksum=True)
