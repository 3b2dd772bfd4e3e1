# pyright: reportAttributeAccessIssue=false
"""All kernels of a run compiled before it, by as many threads as there are processors. Triton by itself compiles each
where it is first launched, one after the other.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from threading import Lock
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction


def _silent(done: int, total: int) -> None:
    """Progress that nobody watches."""


@contextmanager
def compiled_ahead(progress: Callable[[int, int], None] = _silent) -> Iterator[None]:
    """Within, a launch of a Triton kernel compiles it in the background and launches nothing; on leaving all are
    compiled. Other libraries' launches happen, on whatever their inputs hold. From one thread at a time.

    `progress`: told on leaving, when it is known how many kernels there are, of each that is compiled.
    """
    launch = JITFunction.run

    def compile_only(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    with parsed_alone(), ThreadPoolExecutor(os.cpu_count(), "compile") as pool, AsyncCompileMode(pool) as mode:
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch
        for done, _ in enumerate(as_completed(mode.raw_futures), 1):
            progress(done, len(mode.raw_futures))


@contextmanager
def parsed_alone() -> Iterator[None]:
    """Within, threads may compile beside each other: in early releases of Python 3.11 and 3.12 two in `ast.parse` share
    a count, and fail by it.
    """
    parse, parsing = JITFunction.parse, Lock()

    def parse_alone(kernel: JITFunction[Any]) -> Any:
        with parsing:
            return parse(kernel)

    JITFunction.parse = parse_alone
    try:
        yield
    finally:
        JITFunction.parse = parse
