"""The threads for libraries that recurse as deeply as a client's input makes them."""

import threading
from concurrent.futures import ThreadPoolExecutor

STACK_NBYTES = 512 << 20
"""llguidance follows `$ref`s and rules by recursion, at about 10 KB a level, and a stack that is used up ends the
process: 1000 objects that refer one to the next did so within the 8 MiB that threads are given. Only what is used is
ever memory.
"""


class DeepThreads(ThreadPoolExecutor):
    """A pool of threads with large stacks, all of which are started at once.

    When a request's work comes, it may be too late to start one. The pool is made by one thread, since the stack size
    applies to all threads that are started meanwhile. Raises RuntimeError if not all can be started.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, name)
        are_all_there, usual_nbytes = threading.Event(), threading.stack_size(STACK_NBYTES)
        try:
            for _ in range(num_threads):
                self.submit(are_all_there.wait)  # no thread is idle, so the pool starts another one
        finally:
            threading.stack_size(usual_nbytes)
            are_all_there.set()
