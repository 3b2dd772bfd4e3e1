"""Kernels that do not compile, or that no other process finds by their name."""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def wrong_kernel(count):
    tl.device_print("count", count + unknown_name)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


def make_kernel() -> Any:
    @triton.jit
    def nameless_kernel(count):
        tl.device_print("count", count)

    return nameless_kernel
