"""Compile kernels for GPUs that are not here, and read what the compiler made of them."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SMEM_LIMIT = {90: 232448, 100: 232448, 103: 232448, 120: 101376}


@dataclass(frozen=True)
class Case:
    """One kernel with its argument types, constants and the instructions it must contain on each architecture."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    ptx: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # patterns by architecture
    archs: tuple[int, ...] = (90, 100, 103, 120)


def source_of(case: Case) -> ASTSource:
    """What Triton compiles."""
    names = case.kernel.arg_names
    unknown = set(names) - set(case.types) - set(case.constants) - {"num_warps"}
    assert not unknown, f"{case.name}: no type for {sorted(unknown)}"
    signature = {n: case.types.get(n, "constexpr") for n in names}
    constants = {(names.index(n),): v for n, v in case.constants.items() if n in names}
    if "num_warps" in names:
        constants[(names.index("num_warps"),)] = case.options.get("num_warps", 4)
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in case.aligned}
    source = GluonASTSource if isinstance(case.kernel, GluonJITFunction) else ASTSource
    return source(case.kernel, signature, constants, attrs)


def build(case: Case, cc: int) -> Any:
    """Compile one case for one compute capability; no driver is needed."""
    return triton.compile(source_of(case), target=GPUTarget("cuda", cc, 32), options=dict(case.options))


def missing(compiled: Any, patterns: tuple[str, ...]) -> list[str]:
    return [pattern for pattern in patterns if not re.search(pattern, compiled.asm["ptx"])]


def stack_nbytes(compiled: Any, scratch: Path) -> int:
    """Return the stack of a thread, to which registers are spilled, in the program that a launch loads."""
    program = scratch / "kernel.cubin"
    program.write_bytes(compiled.asm["cubin"])
    command = [str(NVIDIA / "cuobjdump"), "-res-usage", str(program)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"STACK:(\d+)", report)
    return int(found)
