"""The build of the native kernels: compiled once, kept by the digest of sources, flags and machine.

`python -m kernels.cpu.build [--ahead | --into FOLDER]` builds ahead, as an image does; workers build at their start
what is not there yet. Any C++20 compiler will do: the one that CXX names, one on the PATH, or that of the wheel
`ziglang`.
"""

import argparse
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.cpu.file_lock import file_lock

SOURCES = Path(__file__).parent.parent / "csrc" / "cpu"
BUILT = Path(__file__).parent / "lib"
"""The folder in which an image or a wheel has what was built ahead."""
DEFAULT_CACHE = Path.home() / ".cache" / "tandem"
_TIMEOUT_S = 300.0
_LOCK_S = 2 * _TIMEOUT_S
"""How long another process may take to build: one to compile, one more to link."""
# No contraction: a row must give the same bits in the vector part of a loop and in what is left over.
_FLAGS = (
    *("-x", "c++", "-std=c++20", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"),
    *("-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off", "-Wno-ignored-attributes", "-Wno-psabi"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_AMX = (*_AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16")
# An old C library, so that what is built in one container runs in another.
_ZIG_TARGETS = {"x86_64": "x86_64-linux-gnu.2.28", "aarch64": "aarch64-linux-gnu.2.28"}

Say = Callable[[str], None]


class BuildError(RuntimeError):
    """No compiler is here, or none could build the kernels; the message says which and why."""


@dataclass(frozen=True)
class Unit:
    """One file to compile. `flags`: its own, beside those of all."""

    name: str
    source: str
    flags: tuple[str, ...] = ()


def units(machine: str, has_tiles: bool = True) -> tuple[Unit, ...]:
    """Return what is compiled for a machine as `platform.machine` names it.

    `has_tiles`: whether the compiler knows AMX; else that set is left out, and the library takes AVX-512 at best.
    """
    sets = [("plain", ("-DTANDEM_SET=plain", "-O3"))]
    if machine == "x86_64":
        sets += [
            ("avx2", ("-DTANDEM_SET=avx2", "-DTANDEM_AVX2", *_AVX2)),
            ("avx512", ("-DTANDEM_SET=avx512", "-DTANDEM_AVX512", *_AVX512)),
            ("amx", ("-DTANDEM_SET=amx", "-DTANDEM_AVX512", "-DTANDEM_TILES", *_AMX)),
        ]
    sets = [one for one in sets if one[0] != "amx" or has_tiles]
    return (
        Unit("library", "library.cpp", () if has_tiles else ("-DTANDEM_NO_TILES",)),
        Unit("pool", "pool.cpp"),
        Unit("board", "board.cpp"),
        *(Unit(name, "kernels.cpp", flags) for name, flags in sets),
        *(Unit("tile_probe", "tile_probe.cpp", flags) for name, flags in sets if name == "amx"),
    )


def library_name() -> str:
    """Return the file's name, with a digest of all that it is made from."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    machine = platform.machine()
    digest.update(repr((_FLAGS, units(machine), machine)).encode())
    return f"tandem-cpu-{digest.hexdigest()}.so"


def find_library(cache_dir: Path = DEFAULT_CACHE) -> Path | None:
    """Return what was built already, or None.

    The bootstrap builds into the default cache, whatever a worker's is.
    """
    name, folders = library_name(), (BUILT, cache_dir / "native", DEFAULT_CACHE / "native")
    return next((file for folder in folders if (file := folder / name).exists()), None)


def build(cache_dir: Path = DEFAULT_CACHE, say: Say = lambda line: None) -> Path:
    """Return the library, built if it is not there yet. Raises BuildError.

    Processes that want it at the same time take turns, and the first builds it for all.
    """
    found = find_library(cache_dir)
    return found if found is not None else build_into(cache_dir / "native", say)


def build_into(folder: Path, say: Say, last_flags: Sequence[str] = ()) -> Path:
    """Build the library in a folder, which is made. Raises BuildError.

    `last_flags` stand behind all others, also where it is linked: those of a sanitizer.
    """
    if platform.system() != "Linux":
        raise BuildError(f"they are built for Linux, this is {platform.system()}")
    target = folder / library_name()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / "lock", _LOCK_S):
            if not target.exists():
                _build(target, say, last_flags)
    except TimeoutError as error:
        raise BuildError(str(error)) from error
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error}") from error
    return target


def _build(target: Path, say: Say, last_flags: Sequence[str]) -> None:
    failures = []
    for compiler in compilers():
        started, name = time.monotonic(), "ziglang" if "ziglang" in compiler else compiler[0]
        say(f"building the native CPU kernels with {name}, once (up to a minute)")
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            failure = _compile(compiler, Path(scratch), target, last_flags)
        if failure is None:
            say(f"native CPU kernels built in {time.monotonic() - started:.0f} s")
            return
        failures.append(f"{name}: {failure}")
    raise BuildError("; ".join(failures) or "no C++ compiler is here: install g++ or clang, or the wheel ziglang")


def compilers() -> Iterator[list[str]]:
    """Yield the commands to try, the best first. C drivers too: nothing of the C++ library is needed."""
    if named := os.environ.get("CXX"):
        yield shlex.split(named)
        return
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            yield [path]
    target = _ZIG_TARGETS.get(platform.machine())
    if importlib.util.find_spec("ziglang") is not None and target:
        yield [sys.executable, "-m", "ziglang", "cc", "-target", target]


def _compile(compiler: Sequence[str], scratch: Path, target: Path, last_flags: Sequence[str]) -> str | None:
    """Return the first line that says what is wrong, or None."""
    parts = units(platform.machine(), _knows_tiles(compiler))
    objects = [scratch / f"{unit.name}.o" for unit in parts]
    commands = [
        [*compiler, *_FLAGS, *unit.flags, *last_flags, "-c", str(SOURCES / unit.source), "-o", str(file)]
        for unit, file in zip(parts, objects, strict=True)
    ]
    if failure := _run_all(commands):
        return failure
    linked = scratch / target.name
    libraries = ("-Wl,--as-needed", "-lpthread", "-lm")
    link = [*compiler, "-shared", *map(str, objects), "-o", str(linked), *libraries, *last_flags]
    if failure := _run_all([link]):
        return failure
    linked.replace(target)
    return None


def _knows_tiles(compiler: Sequence[str]) -> bool:
    """Return whether a compiler takes the flags of AMX; GCC 10 does not."""
    return _run_all([[*compiler, *_AMX, "-x", "c++", "-E", os.devnull]]) is None


def _run_all(commands: Sequence[Sequence[str]]) -> str | None:
    """Run commands side by side. Returns the first line of an error, or None."""
    running = []
    try:
        for command in commands:
            pipe = subprocess.PIPE
            running.append(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=pipe, text=True, errors="replace")
            )
        results = [(process.communicate(timeout=_TIMEOUT_S)[1], process.returncode) for process in running]
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    failed = [text for text, code in results if code != 0]
    return _first_error(failed[0]) if failed else None


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "it failed without a word")[:300]


def main(argv: Sequence[str] | None = None) -> int:
    """Build ahead, and say where the library is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=None, help="a folder; the user's cache if none is given")
    parser.add_argument("--ahead", action="store_true", help="into the installed package, where an image has it")
    parser.add_argument("--quiet", action="store_true", help="say nothing where they are there or cannot be built")
    args = parser.parse_args(argv)

    def say(line: str) -> None:
        print(f"tandem: {line}", flush=True)

    try:
        folder = BUILT if args.ahead else args.into
        file = build(say=say) if folder is None else build_into(folder, say)
        if not args.quiet:
            say(f"native CPU kernels: {file}")
    except BuildError as error:
        if not args.quiet:
            print(f"tandem: the native CPU kernels are not built, torch's are used: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
