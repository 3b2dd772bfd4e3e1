"""The second process of a transfer, which answers on a pipe and keeps to a core of its own."""

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from bench.handoff.transfer_case import TransferCase

CORES = sorted(os.sched_getaffinity(0))
DEADLINE_S = 60.0

Target = Callable[[Connection, TransferCase, str], None]


class BenchChild:
    """A process in which `target(pipe, case, name)` runs."""

    def __init__(self, target: Target, case: TransferCase, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(CORES[-1], target, theirs, case, name), daemon=True)
        self._process.start()

    def receive(self) -> object:
        if not self.pipe.poll(DEADLINE_S):
            raise TimeoutError("the other process does not answer")
        return self.pipe.recv()

    def cpu_s(self) -> float:
        """Return the CPU seconds of both processes so far."""
        self.pipe.send("cpu")
        answer = self.receive()
        assert isinstance(answer, float)
        return answer + time.process_time()

    def close(self) -> None:
        self.pipe.send("end")
        self._process.join(DEADLINE_S)


def serve(core: int, target: Target, pipe: Connection, case: TransferCase, name: str) -> None:
    os.sched_setaffinity(0, {core})
    target(pipe, case, name)


def answer_pipe(pipe: Connection) -> None:
    while pipe.recv() != "end":
        pipe.send(time.process_time())
