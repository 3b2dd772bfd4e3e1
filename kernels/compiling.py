# pyright: reportAttributeAccessIssue=false
"""All kernels of a run compiled before it, by as many threads as there are processors. Triton by itself compiles each
where it is first launched, one after the other.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Within, a launch of a Triton kernel compiles it in the background and launches nothing; on leaving all are
    compiled. Other libraries' launches happen, on whatever their inputs hold. From one thread at a time.
    """
    launch, parse, parsing = JITFunction.run, JITFunction.parse, Lock()

    def parse_alone(kernel: JITFunction[Any]) -> Any:
        # In early releases of Python 3.11 and 3.12 two threads in `ast.parse` share a count, and fail by it.
        with parsing:
            return parse(kernel)

    def compile_only(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.parse = parse_alone
    try:
        with ThreadPoolExecutor(os.cpu_count(), "compile") as pool, AsyncCompileMode(pool):
            JITFunction.run = compile_only
            try:
                yield
            finally:
                JITFunction.run = launch
    finally:
        JITFunction.parse = parse
