# pyright: reportAttributeAccessIssue=false
"""All kernels of a run compiled before it, beside each other.

Triton by itself compiles each where it is first launched, one after the other.
"""

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from threading import Lock, Thread
from typing import Any

from psutil import Process
from triton import AsyncCompileMode
from triton.compiler import compile as triton_compile
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.compile_server import frame, is_cached

_log = logging.getLogger(__name__)

_SERVER = [sys.executable, "-m", "kernels.compile_server", str(Process().create_time())]
_MAX_COMPILING = 16
"""At once. More take less time, and a few hundred MiB of memory each."""
_COMPILE_TIMEOUT_S, _CLOSE_TIMEOUT_S = 120.0, 5.0


def _silent(done: int, total: int) -> None:
    """Progress that nobody watches."""


@contextmanager
def compiled_ahead(progress: Callable[[int, int], None] = _silent, in_processes: bool = False) -> Iterator[None]:
    """Within, a launch of a Triton kernel compiles it in the background and launches nothing.

    On leaving all are compiled. Other libraries' launches happen, on whatever their inputs hold. From one thread at a
    time.

    `progress`: told on leaving, when it is known how many kernels there are, of each that is compiled. `in_processes`:
    those that Triton's cache lacks are compiled by processes, which take three seconds to be there and do not keep each
    other waiting; else by threads.
    """
    launch, num_threads = JITFunction.run, min(len(os.sched_getaffinity(0)), _MAX_COMPILING)
    server, lent = CompileServerClient(), set[JITFunction[Any]]()

    def compile_only(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if in_processes and kernel not in lent:
            lent.add(kernel)
            _ = kernel.device_caches[driver.active.get_current_device()]  # which sets what compiles it
            kernel.compile = server.compile
        launch(kernel, *args, grid=grid, warmup=True, **options)
        # Not what it gives: kernels.triton.relaunch would launch that for the next layers.

    with closing(server), parsed_alone(), ThreadPoolExecutor(num_threads, "compile") as pool:
        JITFunction.run = compile_only
        try:
            with AsyncCompileMode(pool) as mode:
                yield
                for done, _ in enumerate(as_completed(mode.raw_futures), 1):
                    progress(done, len(mode.raw_futures))
        finally:
            JITFunction.run = launch
            for kernel in lent:
                kernel.compile = triton_compile


class CompileServerClient:
    """kernels.compile_server, started when a kernel is not in Triton's cache.

    What it can't do is done here.

    It ends with its input, so with this process, and is not leashed to the thread that happens to start it.
    """

    def __init__(self) -> None:
        self._lock, self._has_ended = Lock(), False
        self._asked: list[Future[None]] = []  # by a job's number
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, source: Any, target: Any, options: dict[str, Any], _env_vars: Any = None) -> Any:
        """triton.compile, any thread."""
        if not is_cached(source, target, options):
            self._compile_there(source, target, options)
        return triton_compile(source, target=target, options=options, _env_vars=_env_vars)

    def close(self) -> None:
        """Nobody waits for it any more."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # of what it did not read before it ended
            process.stdin.close()
        try:
            process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._listener.join()
        process.stdout.close()

    def _compile_there(self, source: Any, target: Any, options: dict[str, Any]) -> None:
        """Returns when the kernel is in the cache, or will not be by that way."""
        try:
            self._ask(source, target, options).result(_COMPILE_TIMEOUT_S)
        except TimeoutError:
            _log.warning("%s is compiled in this process: no other one did in %.0f s", source.name, _COMPILE_TIMEOUT_S)
        except (pickle.PicklingError, TypeError, AttributeError, OSError) as error:
            _log.info("%s is compiled in this process: %s", source.name, error)

    def _ask(self, source: Any, target: Any, options: dict[str, Any]) -> Future[None]:
        """Raises as `frame`, and OSError if the server can't be started, or has ended."""
        with self._lock:
            if self._has_ended:
                raise BrokenPipeError("the process that compiles has ended")
            job, answered = frame(len(self._asked), source, target, options), Future[None]()
            self._asked.append(answered)
            self._tell(job)
        return answered

    def _tell(self, job: bytes) -> None:
        if self._process is None:
            path = os.pathsep.join(folder for folder in sys.path if folder)
            self._process = subprocess.Popen(
                _SERVER,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": path},
            )
            self._listener = Thread(target=self._listen, args=(self._process,), name="compile-server", daemon=True)
            self._listener.start()
        assert self._process.stdin is not None
        self._process.stdin.write(job)
        self._process.stdin.flush()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                number, _ = line.split()
                self._asked[int(number)].set_result(None)
        finally:
            with self._lock:
                self._has_ended = True
            for answered in self._asked:
                if not answered.done():
                    answered.set_result(None)


@contextmanager
def parsed_alone() -> Iterator[None]:
    """Let threads compile beside each other within.

    In early releases of Python 3.11 and 3.12 two in `ast.parse` share a count, and fail by it.
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
