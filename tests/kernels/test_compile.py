"""Every kernel compiles for every architecture it may run on, with the right instructions and without spills."""

import pytest

from tests.kernels.aot import SMEM_LIMIT, build, missing, spill_nbytes
from tests.kernels.compile_cases import CASES

PAIRS = [pytest.param(case, cc, id=f"{case.name}-sm{cc}") for case in CASES for cc in case.archs]


@pytest.mark.parametrize(("case", "cc"), PAIRS)
def test_compiles_with_the_right_instructions(case, cc, tmp_path):
    compiled = build(case, cc)
    assert f".target sm_{cc}" in compiled.asm["ptx"]
    assert not missing(compiled, case.ptx.get(cc, ()))
    assert compiled.metadata.shared <= SMEM_LIMIT[cc]
    assert spill_nbytes(compiled, cc, tmp_path) == 0


def test_every_kernel_of_the_library_is_compiled():
    """A kernel added without a compile case fails here."""
    from kernels.triton import (
        all_reduce,
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
        all_reduce,
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
