"""Threads for work that a library does by recursion, as deep as a client's input makes it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

STACK_NBYTES = 512 << 20
"""llguidance follows `$ref`s and rules by recursion, at about 10 KB a level, and a stack that is used up ends the
process: 1000 objects that refer one to the next did so within the 8 MiB that threads are given. Only what is used is
ever memory.
"""


class DeepThreads(ThreadPoolExecutor):
    """Submitted to from one thread, since a stack's size is said for all threads that are started meanwhile."""

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        usual_nbytes = threading.stack_size(STACK_NBYTES)
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            threading.stack_size(usual_nbytes)
