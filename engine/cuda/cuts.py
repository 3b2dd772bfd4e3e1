"""The cache's shards in parts, with all that is done with the parts of a page ready to be launched."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from engine.cuda.checksums import Checksums, Verifier
from engine.cuda.parts import cut
from engine.cuda.staging import Packer
from kernels.registry import Registry
from kernels.specs import MoveSpec


class Cut:
    """`shards` `[num_planes, num_blocks + 1, page_nbytes]` each, in so many parts. `narrows`: see staging.Packer.

    Raises TransferError if shards can't be cut so.
    """

    def __init__(self, shards: Sequence[Tensor], num_parts: int, registry: Registry, narrows: bool) -> None:
        self.parts = cut(shards, num_parts)
        self._num_planes, num_pages, _ = shards[0].shape
        self._device = shards[0].device
        spec = MoveSpec(self._num_planes, self.parts[0].width, checksum=True)
        operation = registry.get("kv_sums", spec)
        self._is_kernel = registry.resolve("kv_sums", spec).impl.name == "triton"
        self._sums = [partial(operation, part.planes, offset=part.offset) for part in self.parts]
        self.verifier = Verifier(self._sums, self._num_planes, num_pages - 1, self._device)
        self.packer = Packer(self.parts, self._sums, registry, narrows)

    def checksums_of(self, max_pages: int, is_mapped: bool = False) -> Checksums:
        """Of pages that will be named."""
        return Checksums(self._sums, self._num_planes, max_pages, self._device, is_mapped)

    def run_all(self) -> None:
        """The kernels of checksums and of packing, each one for all numbers of pages: to compile and to load them."""
        self.packer.run_all()
        checksums = self.checksums_of(1)
        checksums.launch([0])
        checksums.wait()

    def warm_up(self) -> None:
        """What has to be compiled, loaded and recorded is, when pages come."""
        self.run_all()
        if self._is_kernel:
            self.verifier.capture()
