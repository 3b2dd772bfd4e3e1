# pyright: reportPrivateImportUsage=false
"""Operations that torch itself runs well on the device.

FP8 products through cuBLASLt, and a gather-based attention.
"""

import torch
from torch import Tensor

from kernels.specs import GemmSpec

ONES: dict[torch.device, Tensor] = {}


def gemm_fp8(spec: GemmSpec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor) -> None:
    """Row-wise, per-tensor or block-128 scales.

    `deferred` multiplies without scales, which is faster than row-wise. Of block-128 scales tokens come by fours, see
    specs.GemmSpec.
    """
    out = out.view(a.shape[0], spec.n)
    if spec.deferred:
        one = unit(a.device)
        torch._scaled_mm(a, w.t(), scale_a=one, scale_b=one, out_dtype=out.dtype, use_fast_accum=True, out=out)
    elif spec.recipe == "block128":
        # the kernel wants the scales of a with tokens contiguous, which is how the library stores them
        torch._scaled_mm(a, w.t(), scale_a=a_scale.t(), scale_b=w_scale.t(), out_dtype=out.dtype, out=out)
    elif spec.recipe == "tensor":
        torch._scaled_mm(a, w.t(), scale_a=a_scale, scale_b=w_scale, out_dtype=out.dtype, use_fast_accum=True, out=out)
    else:
        torch._scaled_mm(
            a,
            w.t(),
            scale_a=a_scale[:, None],
            scale_b=w_scale[None, :],
            out_dtype=out.dtype,
            use_fast_accum=True,
            out=out,
        )


def unit(device: torch.device) -> Tensor:
    """A scale of one, made once per device so that nothing is allocated inside a captured graph."""
    if device not in ONES:
        ONES[device] = torch.ones((), device=device)
    return ONES[device]
