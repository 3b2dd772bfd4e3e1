"""Launches that the layers of a batch share, chosen once.

For each launch Triton binds the arguments, specializes the kernel to them and looks it up, and before that tiles and
parts are chosen: with the graphs beside it 0.17 to 0.21 ms a layer of a prompt beside answers, where this makes it 0.09
(bench/results/2026-11-29-engine-gpu-mixed-step-parts-h200.md), so that steps of few rows were as long as the host took
for them. The layers of a pass differ in their keys, values and scales alone, so all but the first launch what the first
has chosen.
"""

from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


class BatchLaunches:
    """The kernels that the first layer of a batch launched, and what else was worked out for it."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._kernels: dict[int, tuple[Callable[..., None], tuple[Any, ...]]] = {}
        self._known: dict[str, Any] = {}

    def of(self, *key: Any) -> "BatchLaunches":
        """Forget all if `key` is another than before.

        It holds what decides how a layer is launched, and by what Triton tells kernels apart: shapes, addresses of what
        the layers share, and whether those of what they do not share are multiples of 16.
        """
        if key != self._key:
            self._key = key
            self._kernels.clear()
            self._known.clear()
        return self

    def once(self, name: str, make: Callable[[], _T]) -> _T:
        """Return what `make` gave at its first call under this name."""
        if name not in self._known:
            self._known[name] = make()
        return self._known[name]

    def launch(self, kernel: Any, grid: tuple[int, int, int], args: tuple[Any, ...], **meta: Any) -> None:
        """Launch a Triton kernel; `meta`: its constants, by name, and options of the compiler.

        `grid`, `meta` and the whole numbers among `args` are the same for all layers.
        """
        known = self._kernels.get(id(kernel))
        if known is not None:
            run, constants = known
            run(*args, *constants)
            return
        compiled = kernel[grid](*args, **meta)
        if compiled is not None:  # an interpreter compiles nothing
            constants = tuple(meta[name] for name in kernel.arg_names[len(args) :])
            self._kernels[id(kernel)] = compiled[grid], constants


class BatchLauncher:
    """What gives each batch its BatchLaunches: see kernels.registry.Registry.preparer."""

    def __init__(self, spec: object) -> None:
        self.spec = spec

    def __call__(self, *batch: object) -> BatchLaunches:
        return BatchLaunches()
