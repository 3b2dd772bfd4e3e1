"""The native CPU kernels under a compiler's sanitizers.

`python -m tools.sanitize [memory|threads] [pytest's arguments]`

The library is built with AddressSanitizer and UndefinedBehaviorSanitizer (`memory`), or with ThreadSanitizer, into
build/sanitized, and the kernels' tests run with it and the sanitizer's runtime in their process. First a product is
asked for that reads past the end of its rows, or two threads that write one place: a sanitizer that finds nothing there
is not at work. Needs g++ or clang++ with its runtimes.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.cpu.build import BuildError, build_into, compilers

_ROOT = Path(__file__).parent.parent
_BUILT = _ROOT / "build" / "sanitized"
_FAULT_S, _TESTS_S = 300.0, 3600.0
_FLAGS = ("-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1")
# Without -s what a sanitizer says as it ends the process is lost with it.
_TESTS = (
    "-q",
    "-s",
    "-p",
    "no:cacheprovider",
    "-n",
    "0",
    "tests/kernels/test_native.py",
    "tests/kernels/test_native_fuzz.py",
    "tests/kernels/test_board.py",
)
_TOO_FEW_ROWS = """
import numpy as np
from kernels.cpu.native import load_kernels
kernels = load_kernels()
matrix = kernels.pack(0, np.ones((16, 512), np.float32).view(np.uint8))
x, y = np.ones((1, 512), np.float32), np.empty((4, 16), np.float32)
kernels._linear(matrix.struct, x.ctypes.data, 4, y.ctypes.data)
"""
_TWO_WRITERS = """
import threading
import numpy as np
from kernels.cpu.native import load_kernels
kernels, out = load_kernels(), np.empty((1, 4096), np.float32)
row = np.ones(4096, np.float32).view(np.uint8)
def widen(): [kernels._widen(0, row.ctypes.data, 4096, out.ctypes.data) for _ in range(2000)]
threads = [threading.Thread(target=widen) for _ in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
"""


@dataclass(frozen=True)
class Sanitizer:
    """`runtimes`: the libraries to load first; `fault`: a program that it must find fault with."""

    flag: str
    runtimes: tuple[str, ...]
    fault: str
    found: str


SANITIZERS = {
    "memory": Sanitizer(
        "-fsanitize=address,undefined", ("libasan.so", "libubsan.so"), _TOO_FEW_ROWS, "heap-buffer-overflow"
    ),
    "threads": Sanitizer("-fsanitize=thread", ("libtsan.so",), _TWO_WRITERS, "data race"),
}


def main(arguments: Sequence[str]) -> int:
    """Return the exit status of the tests, or 1 where there is no sanitizer."""
    name, *others = arguments or ("memory",)
    if name not in SANITIZERS:
        print(__doc__, file=sys.stderr)
        return 2
    sanitizer, home = SANITIZERS[name], home_of(name)
    try:
        build_into(home / ".cache" / "tandem" / "native", print, (sanitizer.flag, *_FLAGS))
    except BuildError as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 1
    environment = environment_of(sanitizer, home)
    if not finds_fault(sanitizer, environment):
        print(f"sanitize: {sanitizer.flag} does not find what is wrong on purpose", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "pytest", *(others or _TESTS)]
    return subprocess.run(command, env=environment, cwd=_ROOT, timeout=_TESTS_S).returncode


def home_of(name: str) -> Path:
    """Return the folder of a sanitizer's build.

    It is another for other flags, of which the library's name says nothing.
    """
    flags = repr((SANITIZERS[name].flag, *_FLAGS)).encode()
    return _BUILT / f"{name}-{hashlib.blake2b(flags, digest_size=4).hexdigest()}"


def environment_of(sanitizer: Sanitizer, home: Path) -> dict[str, str]:
    """Return an environment in which the kernels are those in the cache of `home`, under a sanitizer."""
    compiler = next(compilers())
    runtimes = [
        subprocess.run(
            [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True, timeout=_FAULT_S
        ).stdout.strip()
        for name in sanitizer.runtimes
    ]
    # Python frees little before it ends, and has an allocator of its own, which would hide what is read past an end.
    options = {
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
        "OPENBLAS_NUM_THREADS": "1",  # numpy's own threads, of which ThreadSanitizer does not see how they take turns
    }
    return {**os.environ, **options, "PYTHONMALLOC": "malloc", "HOME": str(home), "LD_PRELOAD": " ".join(runtimes)}


def finds_fault(sanitizer: Sanitizer, environment: dict[str, str]) -> bool:
    """Return whether the sanitizer ends a program that is at fault."""
    command = [sys.executable, "-c", sanitizer.fault]
    done = subprocess.run(
        command, env=environment, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=_FAULT_S
    )
    return done.returncode != 0 and sanitizer.found in done.stderr


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
