"""The cache's shards in parts, with all that is done with the parts of a page ready to be launched."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from engine.cuda.kv.page_checksums import DeviceChecksums, Verifier
from engine.cuda.kv.resharding import cut
from engine.cuda.kv.staging import Packer
from kernels.registry import Registry
from kernels.specs import MoveSpec


class Resharding:
    """`copies`: of the cache, of which all are written and the first is read.

    `[num_planes, num_blocks + 1, page_nbytes]` each shard of them, in so many parts. `narrows`: see staging.Packer.

    Raises TransferError if shards can't be cut so.
    """

    def __init__(self, copies: Sequence[Sequence[Tensor]], num_parts: int, registry: Registry, narrows: bool) -> None:
        self.copies = [cut(shards, num_parts) for shards in copies]
        self.parts = self.copies[0]
        self._num_planes, num_pages, _ = self.parts[0].planes.shape
        self._device = self.parts[0].planes.device
        spec = MoveSpec(self._num_planes, self.parts[0].width, checksum=True)
        operation = registry.get("kv_sums", spec)
        self.is_kernel = registry.resolve("kv_sums", spec).impl.name == "triton"
        self._sums = [[partial(operation, part.planes, offset=part.offset) for part in parts] for parts in self.copies]
        self.verifier = Verifier(self._sums, self._num_planes, num_pages - 1, self._device)
        self.packer = Packer(self.copies, self._sums, registry, narrows)

    def checksums_of(self, max_pages: int) -> DeviceChecksums:
        """Return the checksums of pages that will be named, as they are read."""
        return DeviceChecksums(self._sums[:1], self._num_planes, max_pages, self._device)

    def checksums_of_landed(self, max_pages: int) -> DeviceChecksums:
        """Return the checksums of pages that will be named, in all copies."""
        return DeviceChecksums(self._sums, self._num_planes, max_pages, self._device, is_mapped=True)

    def run_all(self) -> None:
        """The kernels of checksums and of packing, each one for all numbers of pages.

        To compile and to load them.
        """
        self.packer.run_all()
        checksums = self.checksums_of(1)
        checksums.launch([0])
        checksums.wait()

    def warm_up(self) -> None:
        """What has to be compiled, loaded and recorded is, when pages come."""
        self.run_all()
        if self.is_kernel:
            self.verifier.capture()
