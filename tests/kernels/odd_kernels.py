"""Kernels that do not compile, or that no other process finds by their name."""

import time
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.compiler import ASTSource


@triton.jit
def wrong_kernel(count):
    tl.device_print("count", count + unknown_name)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


def make_kernel() -> Any:
    @triton.jit
    def nameless_kernel(count):
        tl.device_print("count", count)

    return nameless_kernel


class Slow(ASTSource):
    """A kernel that takes a minute, and the file `began` once it has begun."""

    def __init__(self, began: Path) -> None:
        super().__init__(wrong_kernel, {})
        self._began = began

    def make_ir(self, *_: Any) -> None:
        self._began.touch()
        time.sleep(60)


class Noise:
    """No kernel at all, which says so where it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("noise",)
