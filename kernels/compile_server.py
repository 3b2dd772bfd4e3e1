"""A process that compiles Triton kernels into Triton's cache on disk, each in a fork of itself.

Python's part of a compilation holds the interpreter: 106 kernels took the threads of one process 20 to 36 s, and forks
13 to 16. Forks of a process that has imported Triton start at once, and share nothing.

`python -m kernels.compile_server SINCE` reads jobs from its standard input and answers on its standard output,
`<number> <status>` a line, status 0 for a kernel that is in the cache now. It ends with its input. SINCE, seconds since
1970: when the process that asks was started. A kernel whose source is newer is left to that process, which may have
read an older one, and has named what it wants by that.
"""

import importlib
import os
import pickle
import selectors
import signal
import struct
import sys
from hashlib import sha256
from io import BytesIO, FileIO
from typing import Any

import triton
from triton.compiler import make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction, get_cache_invalidating_env_vars

_HEAD = struct.Struct("<QQ")  # a job's number, and its length in bytes


class JobPickler(pickle.Pickler):
    """A kernel goes as its name, as a function does, and with what Triton's cache knows it by.

    That depends on the kernels before it (which of its callees' globals count). Raises pickle.PicklingError for one
    that is not found.
    """

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, JITFunction):
            return NotImplemented
        module, name = obj.fn.__module__, obj.fn.__qualname__
        if getattr(sys.modules.get(module), name, None) is not obj:
            raise pickle.PicklingError(f"{module}.{name} is not found by its name")
        return _kernel, (module, name, obj.cache_key)


def _kernel(module: str, name: str, cache_key: str) -> Any:
    kernel = getattr(importlib.import_module(module), name)
    kernel.hash = cache_key
    return kernel


def frame(number: int, source: Any, target: Any, options: dict[str, Any]) -> bytes:
    """A job: what triton.compile takes.

    Raises pickle.PicklingError, TypeError or AttributeError for what has no name that another process could find.
    """
    job = BytesIO()
    JobPickler(job).dump((source, target, options))
    return _HEAD.pack(number, len(job.getvalue())) + job.getvalue()


def is_cached(source: Any, target: Any, options: dict[str, Any]) -> bool:
    """Whether triton.compile would find it."""
    backend = make_backend(target)
    parsed = backend.parse_options(options | source.parse_options())
    key = get_cache_key(source, backend, parsed, get_cache_invalidating_env_vars())
    file = f"{source.name[:150]}.json"
    group = get_cache_manager(sha256(key.encode()).hexdigest()).get_group(file) or {}
    return file in group


class Imported:
    """Modules whose files are older than `since_s`."""

    def __init__(self, since_s: float) -> None:
        self._since_s, self._known = since_s, set[str]()

    def require(self, package: str) -> None:
        """Raises RuntimeError for a module of this package that is not."""
        names = {name for name in sys.modules if name.partition(".")[0] == package}
        for name in names - self._known:
            file = sys.modules[name].__file__
            if file and os.stat(file).st_mtime >= self._since_s:
                raise RuntimeError(f"{file} has changed")
            self._known.add(name)


class CompileServer:
    """`jobs` and `answers`: where to read from and to write to, file descriptors."""

    def __init__(self, jobs: int, answers: int, imported: Imported) -> None:
        self._jobs, self._answers, self._imported = FileIO(jobs), answers, imported
        self._numbers = dict[int, int]()  # of what is compiled, by process id

    def run(self) -> None:
        """Until the input ends, and with it what is still compiled."""
        ended, on_end = os.pipe()
        os.set_blocking(on_end, False)
        signal.set_wakeup_fd(on_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            for readable in (self._jobs, ended):
                selector.register(readable, selectors.EVENT_READ)
            while True:
                found = {key.fileobj for key, _ in selector.select()}
                if ended in found:
                    os.read(ended, 1 << 16)
                    self._answer_ended()
                if self._jobs in found and not self._begin():
                    break
        for pid in self._numbers:  # nobody waits for these
            os.kill(pid, signal.SIGKILL)

    def _begin(self) -> bool:
        """The next job; False at the end of all."""
        head = self._read(_HEAD.size)
        if not head:
            return False
        number, nbytes = _HEAD.unpack(head)
        data = self._read(nbytes)
        try:
            job = pickle.loads(data)
            self._imported.require(job[0].fn.__module__.partition(".")[0])
            is_cached(*job)  # so that no fork imports, or hashes, what all of them need: Triton itself, say
        except Exception as error:
            print(f"a kernel can't be compiled beside the others: {error!r}", file=sys.stderr)
            self._answer(number, 1)
            return True
        if pid := os.fork():
            self._numbers[pid] = number
        else:
            _compile(*job)
        return True

    def _answer_ended(self) -> None:
        while self._numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._answer(self._numbers.pop(pid), status)

    def _answer(self, number: int, status: int) -> None:
        os.write(self._answers, b"%d %d\n" % (number, status))

    def _read(self, nbytes: int) -> bytes:
        """All of it, or nothing at the end of the input."""
        data = b""
        while len(data) < nbytes:
            more = self._jobs.read(nbytes - len(data))
            if not more:
                return b""
            data += more
        return data


def _compile(source: Any, target: Any, options: dict[str, Any]) -> None:
    """In a fork, which ends.

    Why a kernel does not compile is found out by whoever asked, in its own process.
    """
    os.close(0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        triton.compile(source, target=target, options=options)
    except BaseException:
        os._exit(1)
    os._exit(0)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group: whoever asks decides
        signal.signal(number, signal.SIG_IGN)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a kernel's module prints is no answer
    CompileServer(0, answers, Imported(float(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
