"""Every kernel compiles for every architecture it may run on, with the right instructions and without spills."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels.aot import SMEM_LIMIT, Case, build, missing, stack_nbytes
from tests.kernels.compile_cases import CASES

pytestmark = pytest.mark.slow

ALIKE = {100: 90, 103: 100}


def pairs() -> Iterator[tuple[Case, int]]:
    """Yield what to compile.

    Where an architecture is to hold the same instructions as one whose registers and memory it has, too, one case of a
    kernel shows that it compiles there.
    """
    there: set[tuple[int, int]] = set()
    for case in CASES:
        for cc in case.archs:
            alike, key = ALIKE.get(cc), (id(case.kernel), cc)
            if alike not in case.archs or key not in there or case.ptx.get(cc) != case.ptx.get(alike):
                yield case, cc
            there.add(key)


PAIRS = [pytest.param(case, cc, id=f"{case.name}-sm{cc}") for case, cc in pairs()]
SPILLED = {
    "attn_decode_gpt_oss_bulk": {120: 8},
    "attn_prefill_gpt_oss": {100: 8, 103: 8},
    "w4_16_100": {100: 8},
    "w4_16_103": {103: 8},
    "w4_crowded_120": {120: 16},
}
"""Bytes of stack. As ptxas by itself gives out registers there are none, but Triton asks it for another way
(`--regAllocOptLevel=2`)."""


@pytest.mark.parametrize(("case", "cc"), PAIRS)
def test_compiles_with_the_right_instructions(case, cc, tmp_path):
    compiled = build(case, cc)
    assert f".target sm_{cc}" in compiled.asm["ptx"]
    assert not missing(compiled, case.ptx.get(cc, ()))
    assert compiled.metadata.shared <= SMEM_LIMIT[cc]
    assert stack_nbytes(compiled, tmp_path) == SPILLED.get(case.name, {}).get(cc, 0)


def test_registers_that_are_spilled_are_found(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "silu_row")
    assert stack_nbytes(build(replace(case, options={**case.options, "maxnreg": 32}), 90), tmp_path) > 0


def test_every_kernel_of_the_library_is_compiled():
    """A kernel added without a compile case fails here."""
    from kernels.triton import (
        attn_decode,
        attn_prefill,
        attn_stream,
        gemm_blackwell,
        gemm_hopper,
        gemm_portable,
        gemm_w4,
        gemm_w8,
        moe,
        moe_hopper,
        moe_mx,
        moe_sort,
        move,
        norm,
        prefill_parts,
        rope,
        sampling,
    )

    modules = (
        attn_decode,
        attn_prefill,
        attn_stream,
        gemm_blackwell,
        gemm_hopper,
        gemm_portable,
        gemm_w4,
        gemm_w8,
        moe,
        moe_hopper,
        moe_mx,
        moe_sort,
        move,
        norm,
        prefill_parts,
        rope,
        sampling,
    )
    kernels = {value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")}
    assert kernels == {case.kernel for case in CASES if case.kernel in kernels}
    assert all(hasattr(kernel, "arg_names") for kernel in kernels)
