"""Which kernels Triton would compile, by what is launched: on a machine without a GPU, where nothing is computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels.caps import Caps

HOPPER = Caps("cuda", cc=90, name="H200", sm_count=132, torch=(2, 11), triton=(3, 6))


class Launches:
    """`kinds`: the kernels, with what Triton tells them apart by."""

    def __init__(self) -> None:
        self.kinds: set[tuple[str, str, str]] = set()
        self._backend = make_backend(GPUTarget("cuda", HOPPER.cc, 32))
        self._binders: dict[JITFunction[Any], Any] = {}

    def note(self, kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        _, kind, chosen = self._binders[kernel](*args, **options)
        self.kinds.add((kernel.__name__, str(kind), str(sorted(chosen.items()))))


def attends_to_nothing(*_: object, **__: object) -> None:
    """Compute nothing, as the kernels whose launches are noted."""


@contextmanager
def noted_launches() -> Iterator[Launches]:
    """Engines made here take an H200's kernels, and only note what they would launch."""
    launches = Launches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernels.caps.detect", lambda _: HOPPER)
        patch.setattr("kernels.torch_cuda.gemm_fp8", lambda *_: None)
        patch.setattr(JITFunction, "run", lambda *args, **options: launches.note(*args, **options))
        patch.setattr("engine.cuda.kv.page_checksums.Verifier.capture", lambda _: None)
        yield launches
