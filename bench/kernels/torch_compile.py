# pyright: reportPrivateImportUsage=false
"""The benchmark of torch.compile's fusions beside the hand-made ones.

It covers what surrounds a product or attention, and a whole MLP. Both sides run in CUDA graphs and round alike: FP8
with one scale per row, float32 in between. In `autotuned`, Inductor may also choose its own kernels for the products
and fuse into their epilogues.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.figure import Figure, show
from bench.kernels.operations import floor_us, fresh_calls
from bench.report.hardware_limits import FP8_TENSOR_RATE, READ_RATE
from kernels.cases import (
    KernelCall,
    KernelCase,
    norm_case,
    prefill_case,
    quant_case,
    relative_error,
    rope_case,
    silu_case,
    weights,
)
from kernels.decode_plan import decode_plan
from kernels.reference.elementwise import rms_norm, rotate
from kernels.reference.quant import E4M3_MAX, to_e4m3, token_scale
from kernels.registry import Registry
from kernels.selfcheck import bind
from kernels.specs import AttnSpec, GateUpSpec, GemmSpec, NormSpec, QuantSpec, RopeSpec, SiluSpec
from kernels.timing import call_us

EPS = 1e-5
HIDDEN, INTER = 4096, 14336
FUSED_TOKENS = 64
MIDDLE_PEAK = 120.0  # the largest value in the middle for these random operands


def rows(registry: Registry) -> list[Figure]:
    found = [row for tokens in (8, 64, 2048) for row in around(registry, tokens)]
    return [*found, attention(registry, 2048), *(mlp(registry, tokens, "default") for tokens in (8, 64, 2048))]


def autotuned(registry: Registry) -> list[Figure]:
    return [mlp(registry, tokens, "max-autotune-no-cudagraphs") for tokens in (64, 2048)]


def quantized(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = token_scale(y)
    return to_e4m3(y / scale[:, None]), scale


def norm_quant(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    residual = (x.float() + residual.float()).to(residual.dtype)
    return *quantized(rms_norm(residual.float(), weight, EPS)), residual


def silu_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.float().chunk(2, -1)
    return quantized(F.silu(gate) * up)


def rope_write(
    qkv: Tensor, positions: Tensor, slots: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Return the rotated q, and write k and v into their pages."""
    kv_heads, page, dim = k_cache.shape[1:]
    heads = qkv.float().view(len(qkv), -1, dim)
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    k_cache[slots // page, :, slots % page] = to_e4m3(rotate(k, positions, cos_sin) / 0.5)
    v_cache[slots // page, :, slots % page] = to_e4m3(v / 0.25)
    return rotate(q, positions, cos_sin).to(qkv.dtype)


def product(a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor) -> Tensor:
    return torch._scaled_mm(
        a, w.t(), scale_a=a_scale[:, None], scale_b=w_scale[None], out_dtype=torch.bfloat16, use_fast_accum=True
    )


def compiled(run: Callable[..., Any], mode: str = "default") -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(run, mode=mode, dynamic=False, fullgraph=True)


def around(registry: Registry, tokens: int) -> list[Figure]:
    """Time the three operations between products, each on different operands in turn."""
    norm, silu = norm_case(NormSpec(HIDDEN), tokens), silu_case(SiluSpec(INTER, "token"), tokens)
    rope = rope_case(RopeSpec(32, 8, 128), tokens)
    return [
        beside(registry, norm, compiled(norm_quant), lambda call: (call.args[0][0], *call.args[1:3])),
        beside(registry, silu, compiled(silu_quant), lambda call: call.args[:1]),
        beside(registry, rope, compiled(rope_write), rope_arguments),
    ]


def rope_arguments(call: KernelCall) -> tuple[Tensor, ...]:
    qkv, positions, slots, cos_sin, _, k, v = call.args
    return qkv[0], positions, slots.clamp(min=0), cos_sin, k, v


def beside(
    registry: Registry, case: KernelCase, run: Callable[..., Any], arguments: Callable[[KernelCall], tuple[Tensor, ...]]
) -> Figure:
    calls = fresh_calls(case)
    op = registry.get(case.op, case.spec)
    found = run(*(argument.clone() for argument in arguments(calls[0])))
    us = call_us([partial(call.run, op) for call in calls])
    other = call_us([partial(run, *arguments(call)) for call in calls])
    tokens = len(found[0]) if isinstance(found, tuple) else len(found)
    return shown(case.op, tokens, us, floor_us(case), other)


def attention(registry: Registry, tokens: int) -> Figure:
    """Time a prompt's attention and the quantization of its output to e4m3.

    torch has no paged e4m3 cache, so it reads plain bf16 keys.
    """
    case = prefill_case(AttnSpec(32, 8, 128), [(tokens, tokens)], workspace_mb=512)
    call, rounded = case.make("cuda"), quant_case(QuantSpec(HIDDEN, "token"), tokens)
    op = bind(registry, registry.resolve(case.op, case.spec).impl, case, call)
    quant = registry.get("quant_fp8", rounded.spec)
    out = rounded.make("cuda")
    out = KernelCall((call.outputs["out"].view(tokens, HIDDEN), *out.args[1:]), {}, out.outputs)

    def ours() -> None:
        call.run(op)
        out.run(quant)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return quantized(y[0].transpose(0, 1).reshape(tokens, HIDDEN).float())

    q = call.args[0].transpose(0, 1)[None].contiguous()
    k, v = (torch.randn(1, 8, tokens, 128, device="cuda").bfloat16() for _ in range(2))
    run = compiled(theirs)
    run(q, k, v)
    limit = floor_us(case)
    return shown("attention, quantization", tokens, call_us([ours]), limit, call_us([lambda: run(q, k, v)]))


def mlp(registry: Registry, tokens: int, mode: str) -> Figure:
    """Time residual and norm, gate and up, SiLU, and down, with the weights of four layers in turn."""
    works = [CompiledMlp(registry, tokens) for _ in range(4)]
    run = compiled(plain_mlp, mode)
    truth, _ = run(*(argument.clone() for argument in works[0].arguments))
    works[0].run()
    error = relative_error(works[0].out.view(-1, tokens, HIDDEN).float().sum(0), truth)
    us, other = call_us([work.run for work in works]), call_us([partial(run, *work.arguments) for work in works])
    floor = max(3 * INTER * HIDDEN / READ_RATE, 6 * tokens * INTER * HIDDEN / FP8_TENSOR_RATE) * 1e6
    return shown("MLP" if mode == "default" else "MLP, autotuned", tokens, us, floor, other, error=error)


def plain_mlp(
    x: Tensor, residual: Tensor, weight: Tensor, w1: Tensor, s1: Tensor, w2: Tensor, s2: Tensor
) -> tuple[Tensor, Tensor]:
    rows, scale, residual = norm_quant(x, residual, weight)
    middle, middle_scale = silu_quant(product(rows, w1, scale, s1))
    return product(middle, w2, middle_scale, s2), residual


class CompiledMlp:
    """One layer's MLP on operands of its own, put together as the engine does at this many tokens.

    Up to 64 tokens SiLU is fused into the product, with a static scale after it; beyond that there are four operations.
    """

    def __init__(self, registry: Registry, tokens: int) -> None:
        x, residual = torch.randn(2, tokens, HIDDEN, device="cuda").bfloat16()
        weight = (torch.rand(HIDDEN, device="cuda") + 0.5).bfloat16()
        self.arguments = (x, residual, weight, *weights(2 * INTER, HIDDEN, "cuda"), *weights(HIDDEN, INTER, "cuda"))
        self._norm = registry.get("add_rmsnorm_quant", NormSpec(HIDDEN))
        self._rows, self._scale = empty_rows(tokens, HIDDEN)
        self._middle, self._middle_scale = empty_rows(tokens, INTER)
        self._is_fused = tokens <= FUSED_TOKENS
        if self._is_fused:
            plan = decode_plan(tokens)
            self._up = registry.get("gemm_gate_up", GateUpSpec(2 * INTER, HIDDEN))
            self._down = registry.get("gemm_fp8", GemmSpec(HIDDEN, INTER, parts=plan.down_parts, skinny=True))
            self.out = torch.empty(plan.down_parts, tokens, HIDDEN, device="cuda")
            self._middle_scale.fill_(MIDDLE_PEAK / E4M3_MAX)
        else:
            self._up = registry.get("gemm_fp8", GemmSpec(2 * INTER, HIDDEN))
            self._down = registry.get("gemm_fp8", GemmSpec(HIDDEN, INTER))
            self._silu = registry.get("silu_mul_quant", SiluSpec(INTER, "token"))
            self._wide = torch.empty(tokens, 2 * INTER, device="cuda", dtype=torch.bfloat16)
            self.out = torch.empty(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def run(self) -> None:
        x, residual, weight, w1, s1, w2, s2 = self.arguments
        self._norm(x[None], residual, weight, EPS, self._rows, self._scale)
        if self._is_fused:
            self._up(self._rows, w1, self._scale, s1, self._middle, self._middle_scale)
        else:
            self._up(self._rows, w1, self._scale, s1, self._wide)
            self._silu(self._wide, self._middle, self._middle_scale)
        self._down(self._middle, w2, self._middle_scale, s2, self.out)


def empty_rows(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(tokens, width, device="cuda", dtype=torch.float8_e4m3fn),
        torch.empty(tokens, device="cuda"),
    )


def shown(op: str, tokens: int, us: float, floor: float, other: float, **extra: Any) -> Figure:
    return show(Figure("compiled", dict(op=op, tokens=tokens), us, "us", floor / us, "torch.compile", other, extra))
