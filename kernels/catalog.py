"""Every implementation of every operation, and when it may be used."""

from collections.abc import Callable
from typing import Any

from kernels.caps import Caps
from kernels.registry import Impl, Registry, Supports
from kernels.specs import (
    AttnSpec,
    FusedAttnSpec,
    GateUpSpec,
    GemmSpec,
    MLASpec,
    MoESpec,
    MoveSpec,
    NormSpec,
    QuantSpec,
    SiluSpec,
    W4Spec,
)

Check = Callable[[Caps, Any], str | None]


def registry(caps: Caps, **settings: Any) -> Registry:
    """All implementations over these capabilities; settings are Registry's plans, override and excluded."""
    return Registry(IMPLS, caps, **settings)


def ops() -> list[str]:
    return sorted({impl.op for impl in IMPLS})


def all_of(*checks: Check) -> Supports:
    """The first reason against, or None."""

    def supports(caps: Caps, spec: Any) -> str | None:
        return next((reason for check in checks if (reason := check(caps, spec))), None)

    return supports


def always(caps: Caps, spec: Any) -> str | None:
    return None


def cuda(caps: Caps, spec: Any) -> str | None:
    return None if caps.device == "cuda" else "needs a CUDA device"


def triton(caps: Caps, spec: Any) -> str | None:
    if reason := cuda(caps, spec):
        return reason
    if caps.triton is None:
        return "triton is not installed"
    return None if caps.cc >= 90 else f"compiled for compute capability 9.0 and above, not {caps.cc / 10}"


def hopper(caps: Caps, spec: Any) -> str | None:
    return None if caps.cc == 90 else "uses wgmma, which only compute capability 9.0 has"


def tcgen05(caps: Caps, spec: Any) -> str | None:
    return None if caps.cc in (100, 103) else "uses tcgen05, which only compute capability 10.x has"


def skinny_rows(caps: Caps, spec: GemmSpec) -> str | None:
    if not spec.skinny:
        return "meant for few tokens"
    if spec.deferred:
        return "applies its scales itself"
    if spec.recipe == "tensor":
        return "has no tensor scales"
    step = 64 if spec.recipe == "row" else 128
    return None if spec.n % 64 == 0 and spec.k % step == 0 else f"wants n in steps of 64 and k in steps of {step}"


def tcgen05_rows(caps: Caps, spec: GemmSpec) -> str | None:
    if spec.recipe != "row":
        return "rescales at the end only"
    return None if spec.n % 128 == 0 else "wants n in steps of 128"


def wide_rows(caps: Caps, spec: GemmSpec) -> str | None:
    if spec.parts > 1 or spec.deferred or spec.recipe == "group":
        return "writes one finished product"
    return None if spec.k % 128 == 0 or spec.recipe != "block128" else "wants k in steps of 128"


def cublas(caps: Caps, spec: GemmSpec) -> str | None:
    if spec.parts > 1:
        return "does not split along k"
    if spec.recipe == "group":
        return "has no group scales with row scales"
    if spec.recipe == "block128":
        return cublas_blocks(caps, spec)
    return None if spec.n % 16 == 0 and spec.k % 16 == 0 else "wants n and k in steps of 16"


def cublas_blocks(caps: Caps, spec: GemmSpec) -> str | None:
    if caps.cc != 90:
        return "cuBLASLt has 128-block scales on compute capability 9.0 only"
    if spec.skinny:
        return "wants tokens in steps of 4"
    return None if spec.n % 16 == 0 and spec.k % 512 == 0 else "wants n in steps of 16 and k in steps of 512"


def whole_groups(caps: Caps, spec: QuantSpec | SiluSpec | NormSpec) -> str | None:
    width = spec.hidden if isinstance(spec, NormSpec) else spec.width
    return None if spec.quant != "group" or width % 128 == 0 else "wants width in steps of 128 for group scales"


def gate_up_rows(caps: Caps, spec: GateUpSpec) -> str | None:
    if spec.quant == "token":
        return "an epilogue sees a part of the row, not its maximum"
    return None if spec.n % 256 == 0 and spec.k % 128 == 0 else "wants n in steps of 256 and k in steps of 128"


def pow2_heads(caps: Caps, spec: AttnSpec | FusedAttnSpec | MLASpec) -> str | None:
    dim = getattr(spec, "head_dim", 64)
    return (
        None
        if dim in (32, 64, 128, 256) and spec.page >= 16
        else "wants a head size that is a power of two, page 16 or more"
    )


def half_only(caps: Caps, spec: AttnSpec) -> str | None:
    return None if spec.kv in ("e4m3", "bf16") else "keeps e4m3 or bf16 caches"


def fused_group(caps: Caps, spec: FusedAttnSpec) -> str | None:
    if spec.quant == "token":
        return "a CTA sees one KV head, not the whole token"
    return None if spec.q_heads // spec.kv_heads <= 16 else "wants at most 16 query heads per KV head"


def w4_tiles(caps: Caps, spec: W4Spec) -> str | None:
    return None if spec.n % 64 == 0 and spec.k % 128 == 0 else "wants n in steps of 64 and k in steps of 128"


def move_blocks(caps: Caps, spec: MoveSpec) -> str | None:
    return None if spec.unit_nbytes % 4096 == 0 else "wants units in steps of 4096 bytes"


def expert_tiles(caps: Caps, spec: MoESpec) -> str | None:
    if spec.weights == "fp32":
        return "multiplies no float32"
    return None if spec.inter % 64 == 0 and spec.hidden % 64 == 0 else "wants hidden and inter in steps of 64"


def flashinfer(caps: Caps, spec: Any) -> str | None:
    if reason := cuda(caps, spec):
        return reason
    if caps.flashinfer is None:
        return "flashinfer is not installed"
    if caps.flashinfer < (0, 6, 13):
        return "flashinfer is older than 0.6.13"
    return None if caps.flashinfer_jit else "flashinfer cannot compile: no nvcc and no prebuilt modules"


def cubins(caps: Caps, spec: Any) -> str | None:
    return None if caps.flashinfer_cubins else "flashinfer-cubin is not installed"


def flashinfer_decode(caps: Caps, spec: AttnSpec) -> str | None:
    if spec.q_len > 1 or spec.lse:
        return "has neither several query tokens nor an LSE in this call"
    if spec.kv != "e4m3" or spec.page not in (16, 32, 64, 128):
        return "keeps e4m3 caches with pages of 16 to 128"
    return cubins(caps, spec) if caps.cc in (100, 103) else None


def flashinfer_prefill(caps: Caps, spec: AttnSpec) -> str | None:
    return "gives no LSE in this call" if spec.lse else None


def fa3_heads(caps: Caps, spec: AttnSpec) -> str | None:
    if spec.sinks:
        return "ignores sinks"
    if spec.kv not in ("e4m3", "bf16"):
        return "keeps e4m3 or bf16 caches"
    return None if spec.head_dim in (64, 128, 256) else "wants head_dim 64, 128 or 256"


def flashinfer_norm(caps: Caps, spec: NormSpec) -> str | None:
    if spec.quant != "tensor" or spec.parts > 1 or spec.deferred or spec.biased or spec.embed or not spec.residual:
        return "has one static scale, one addend and a residual"
    return None


def reference(op: str, module: str) -> Impl:
    return Impl(op, "reference", 0, always, f"kernels.reference.{module}:{op}")


REFERENCE = [
    reference(op, module)
    for module, names in {
        "elementwise": ("add_rmsnorm_quant", "quant_fp8", "silu_mul_quant", "rope_append", "argmax"),
        "attention": ("attn_decode", "attn_decode_fused", "attn_prefill", "mla_attention"),
        "moe": ("moe_route", "moe_experts"),
        "sampling": ("sample",),
        "move": ("kv_pack", "kv_unpack", "kv_sums"),
        "gemm": ("gemm_fp8", "gemm_gate_up", "gemm_w4", "gemm_w8"),
    }.items()
    for op in names
]

NORM, DECODE, PREFILL = "kernels.triton.norm", "kernels.triton.attn_decode", "kernels.triton.attn_prefill"
HOPPER, PORTABLE, TCGEN05, MOVE = (
    "kernels.triton.gemm_hopper",
    "kernels.triton.gemm_portable",
    "kernels.triton.gemm_blackwell",
    "kernels.triton.move",
)

OURS = [
    Impl("add_rmsnorm_quant", "triton", 20, all_of(triton, whole_groups), f"{NORM}:add_rmsnorm_quant"),
    Impl("quant_fp8", "triton", 20, all_of(triton, whole_groups), f"{NORM}:quant_fp8"),
    Impl("silu_mul_quant", "triton", 20, all_of(triton, whole_groups), f"{NORM}:silu_mul_quant"),
    Impl("argmax", "triton", 20, triton, f"{NORM}:argmax"),
    Impl("rope_append", "triton", 20, all_of(triton, pow2_heads), "kernels.triton.rope:rope_append"),
    Impl("attn_decode", "triton", 20, all_of(triton, pow2_heads, half_only), f"{DECODE}:attn_decode", tunable=True),
    Impl(
        "attn_decode_fused",
        "triton",
        20,
        all_of(triton, pow2_heads, fused_group),
        f"{DECODE}:attn_decode_fused",
        tunable=True,
    ),
    Impl("gemm_fp8", "hopper", 30, all_of(triton, hopper, skinny_rows), f"{HOPPER}:gemm_fp8", tunable=True),
    Impl(
        "gemm_fp8",
        "blackwell",
        30,
        all_of(triton, tcgen05, skinny_rows, tcgen05_rows),
        f"{TCGEN05}:gemm_fp8",
        tunable=True,
    ),
    Impl(
        "gemm_gate_up", "blackwell", 30, all_of(triton, tcgen05, gate_up_rows), f"{TCGEN05}:gemm_gate_up", tunable=True
    ),
    Impl("gemm_fp8", "torch", 15, all_of(cuda, cublas), "kernels.torch_cuda:gemm_fp8"),
    Impl("gemm_fp8", "triton_skinny", 20, all_of(triton, skinny_rows), f"{PORTABLE}:gemm_fp8_skinny", tunable=True),
    Impl("gemm_fp8", "triton", 10, all_of(triton, wide_rows), f"{PORTABLE}:gemm_fp8", tunable=True),
    Impl("gemm_gate_up", "hopper", 30, all_of(triton, hopper, gate_up_rows), f"{HOPPER}:gemm_gate_up", tunable=True),
    # xqa rounds more than its documentation says: 3 % on unit normal data
    Impl(
        "attn_decode",
        "flashinfer",
        10,
        all_of(flashinfer, flashinfer_decode),
        "kernels.flashinfer:attn_decode",
        rounding=5e-2,
    ),
    # queries and softmax weights in e4m3: the rounding costs 2 to 3 %, and is what makes it faster than ours
    Impl(
        "attn_prefill",
        "fa3",
        30,
        all_of(flashinfer, triton, hopper, flashinfer_prefill, fa3_heads),
        "kernels.flashinfer:attn_prefill_fa3",
        build="kernels.flashinfer:fa3_module",
        prepare="kernels.flashinfer:Fa3Plans",
        wants_e4m3=True,
        for_few="triton",  # which shares out keys, where this leaves multiprocessors idle
        rounding=5e-2,
    ),
    Impl(
        "attn_prefill",
        "flashinfer",
        30,
        all_of(flashinfer, tcgen05, cubins, flashinfer_prefill),
        "kernels.flashinfer:attn_prefill",
        build="kernels.flashinfer:prefill_module",
    ),
    Impl(
        "add_rmsnorm_quant",
        "flashinfer",
        10,
        all_of(flashinfer, flashinfer_norm),
        "kernels.flashinfer:add_rmsnorm_quant",
    ),
    Impl(
        "attn_prefill",
        "triton",
        20,
        all_of(triton, pow2_heads, half_only),
        f"{PREFILL}:attn_prefill",
        tunable=True,
        prepare="kernels.triton.relaunch:BatchLauncher",
    ),
    Impl(
        "mla_attention", "triton", 20, all_of(triton, pow2_heads, half_only), f"{PREFILL}:mla_attention", tunable=True
    ),
    Impl("moe_route", "triton", 20, triton, "kernels.triton.moe:moe_route"),
    Impl("moe_experts", "triton", 20, all_of(triton, expert_tiles), "kernels.triton.moe:moe_experts", tunable=True),
    Impl("sample", "triton", 20, triton, "kernels.triton.sampling:sample"),
    Impl("kv_pack", "triton", 20, all_of(triton, move_blocks), f"{MOVE}:kv_pack"),
    Impl("kv_unpack", "triton", 20, all_of(triton, move_blocks), f"{MOVE}:kv_unpack"),
    Impl("kv_sums", "triton", 20, all_of(triton, move_blocks), f"{MOVE}:kv_sums"),
    Impl("gemm_w4", "triton", 20, all_of(triton, w4_tiles), "kernels.triton.gemm_w4:gemm_w4", tunable=True),
    Impl("gemm_w8", "triton", 20, triton, "kernels.triton.gemm_w8:gemm_w8", tunable=True),
    Impl("gemm_gate_up", "triton", 20, all_of(triton, gate_up_rows), f"{PORTABLE}:gemm_gate_up", tunable=True),
]

IMPLS: tuple[Impl, ...] = (*REFERENCE, *OURS)
