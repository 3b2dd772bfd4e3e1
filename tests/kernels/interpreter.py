"""Make Triton's interpreter round as the hardware does (bugs of 3.6.0, two of them still in 3.7.1).

1. fp32 to bf16 truncates, and fp32 to e4m3 drops the carry of the mantissa. 2. `tl.dot` on bf16 multiplies the bit
patterns. 3. `range(lo, hi)` with loaded bounds fails on NumPy 2.4 and later (3.6.0 only).
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as ti

TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
SIGNED = {8: np.uint8, 16: np.int16, 32: np.int32, 64: np.int64}
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
VIEW = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
FP8 = (tl.float8e4nv, tl.float8e5)
convert_before = ti._convert_float
lang_before = ti._patch_lang_tensor


def patch() -> None:
    """Call once, before any kernel runs."""
    ti._convert_float = convert
    ti.InterpreterBuilder.create_dot = create_dot  # type: ignore[method-assign]
    ti._patch_lang_tensor = patch_tensor


def convert(data: Any, src: Any, dst: Any, rounding_mode: Any = None) -> Any:
    src, dst = src.scalar, dst.scalar
    toward_zero = getattr(ti._ir.ROUNDING_MODE, "RTZ", None)
    if src not in TORCH or dst not in TORCH or (rounding_mode is not None and rounding_mode == toward_zero):
        return convert_before(data, src, dst, rounding_mode)
    raw = np.frombuffer(np.ascontiguousarray(data).tobytes(), dtype=SIGNED[src.primitive_bitwidth]).copy()
    x = torch.from_numpy(raw).view(TORCH[src])
    if dst in FP8 and src not in FP8:
        limit = torch.finfo(TORCH[dst]).max  # cvt.rn.satfinite
        x = x.float().clamp(-limit, limit)
    bits = dst.primitive_bitwidth
    return x.to(TORCH[dst]).view(VIEW[bits]).numpy().view(UNSIGNED[bits]).reshape(np.shape(data))


def as_fp32(handle: Any) -> Any:
    kind = handle.dtype.scalar
    if kind == tl.bfloat16 or (kind.is_floating() and kind.primitive_bitwidth == 8):
        return convert(handle.data, kind, tl.float32).view(np.float32)
    return handle.data.astype(np.float32) if kind.is_floating() else handle.data


def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    return ti.TensorHandle((np.matmul(as_fp32(a), as_fp32(b)) + d.data).astype(d.data.dtype), d.dtype.scalar)


def patch_tensor(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    result = lang_before(tensor, *args, **kwargs)
    scope = args[0] if args else kwargs.get("scope")
    if scope is not None and hasattr(scope, "set_attr"):
        scope.set_attr(tensor, "__index__", index)
    else:
        tensor.__index__ = index
    return result


def index(self: Any) -> int:
    return int(np.asarray(self.handle.data).reshape(-1)[0])
