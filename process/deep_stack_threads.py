"""Threads for work that a library does by recursion, as deep as a client's input makes it."""

import threading
from concurrent.futures import ThreadPoolExecutor

STACK_NBYTES = 512 << 20
"""llguidance follows `$ref`s and rules by recursion, at about 10 KB a level, and a stack that is used up ends the
process: 1000 objects that refer one to the next did so within the 8 MiB that threads are given. Only what is used is
ever memory.
"""


class DeepThreads(ThreadPoolExecutor):
    """All are started at once: when a request's work comes, there may be none left to start. Made by one thread, since
    a stack's size is said for all threads that are started meanwhile. Raises RuntimeError if there are not as many.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        super().__init__(num_threads, name)
        are_all_there, usual_nbytes = threading.Event(), threading.stack_size(STACK_NBYTES)
        try:
            for _ in range(num_threads):
                self.submit(are_all_there.wait)  # nobody is idle, so it takes another one
        finally:
            threading.stack_size(usual_nbytes)
            are_all_there.set()
