# pyright: reportMissingImports=false, reportOptionalMemberAccess=false, reportPrivateImportUsage=false
"""The peers of our kernels: FlashInfer, torch, and compositions of single torch operations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kernels.cases import KernelCall, KernelCase, relative_error
from kernels.reference.sampling import keep
from kernels.registry import Registry
from kernels.specs import AttnSpec, MoESpec, NormSpec
from kernels.timing import call_us, eager_us

try:
    import flashinfer
except ImportError:  # a peer that is not installed is left out of the table
    flashinfer = None  # type: ignore[assignment]

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def decode(
    registry: Registry, case: KernelCase, calls: list[KernelCall]
) -> tuple[str | None, float | None, dict[str, Any]]:
    """Time FlashInfer's decode attention on the same cache, and compare it with ours."""
    impl = next((i for i in registry.candidates(case.op, case.spec) if i.name == "flashinfer"), None)
    if impl is None:
        return None, None, {}
    op = impl.load(case.spec, registry.plans, registry.caps)
    copies = [call.copy() for call in calls]
    us = call_us([partial(call.run, op) for call in copies])
    ours = calls[0].copy()
    ours.run(registry.get(case.op, case.spec))
    return "flashinfer xqa", us, dict(peer_against_ours=relative_error(copies[0].outputs["out"], ours.outputs["out"]))


def prefill(registry: Registry, case: KernelCase, call: KernelCall) -> dict[str, float]:
    """Time FlashInfer's fa2 and fa3, planned once, and torch's attention on bf16 keys.

    For an e4m3 cache fa3 takes e4m3 queries. It is timed once with the rounding that a caller with bf16 queries must
    add, and once with queries that are rounded already.
    """
    spec = case.spec
    assert isinstance(spec, AttnSpec)
    result = sdpa(spec, call)
    if flashinfer is None or spec.sinks:
        return result
    q, pages = call.args[0], (call.args[1], call.args[2])
    scales = dict(k_scale=call.kwargs["k_scale"], v_scale=call.kwargs["v_scale"])
    fa2, fa3 = planned("fa2", BF16, spec, call), planned("fa3", E4M3, spec, call)
    q8 = q.to(E4M3)
    result["flashinfer_fa2_us"] = eager_us(lambda: fa2.run(q, pages, **scales))
    result["flashinfer_fa3_us"] = eager_us(lambda: fa3.run(q.clamp(-448, 448).to(E4M3), pages))
    result["flashinfer_fa3_bare"] = eager_us(lambda: fa3.run(q8, pages))
    return result


def planned(backend: str, dtype: torch.dtype, spec: AttnSpec, call: KernelCall) -> Any:
    _, k, _, table, lens, starts, *_ = call.args
    pages = -(-lens // spec.page)
    indptr = F.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
    indices = torch.cat([table[b, : int(n)] for b, n in enumerate(pages.tolist())])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "HND", backend=backend
    )
    wrapper.plan(
        starts, indptr, indices, (lens - 1) % spec.page + 1, spec.q_heads, spec.kv_heads, spec.head_dim, spec.page,
        causal=True,
        sm_scale=spec.head_dim**-0.5, window_left=spec.window - 1 if spec.window else -1, q_data_type=dtype,
        kv_data_type=k.dtype, o_data_type=BF16,
    )  # fmt: skip
    return wrapper


def sdpa(spec: AttnSpec, call: KernelCall) -> dict[str, float]:
    """Time torch's attention if the chunk is the whole sequence, else return nothing.

    Its fast kernels have no causal mask aligned to the end.
    """
    q, lens = call.args[0], call.args[4]
    if spec.sinks or q.shape[0] != int(lens[0]):
        return {}
    q = q.transpose(0, 1)[None]
    k = torch.randn(1, spec.kv_heads, q.shape[2], spec.head_dim, device="cuda", dtype=BF16)
    return {
        "torch_sdpa_bf16_us": call_us(
            [lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)]
        )
    }


def scaled_mm(case: KernelCase, tokens: int) -> Callable[[KernelCall], Any]:
    """Return a row-wise _scaled_mm of the same operands; for gate_up it lacks SiLU and quantization."""

    def run(call: KernelCall) -> None:
        a, w, a_scale, w_scale = call.args[:4]
        torch._scaled_mm(
            a, w.t(), scale_a=a_scale[:tokens, None], scale_b=w_scale[None, :], out_dtype=BF16, use_fast_accum=True
        )

    return run


def bf16_mm(case: KernelCase, tokens: int) -> float:
    """Time a bf16 product of the same shape, on several weights in turn."""
    n, k = case.spec.n, case.spec.k  # type: ignore[attr-defined]
    x = torch.randn(tokens, k, device="cuda", dtype=BF16)
    ws = [torch.randn(n, k, device="cuda", dtype=BF16) for _ in range(4)]
    return call_us([partial(F.linear, x, w) for w in ws])


def naive_moe(case: KernelCase, call: KernelCall) -> float:
    """Time the experts one after another in bf16, routed on the host, as a plain model computes them."""
    spec = case.spec
    assert isinstance(spec, MoESpec)
    x, _, weights, ids, w1, _, w2, *_ = call.args
    x = x.to(BF16)

    def run() -> None:
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], w1[expert].to(BF16)).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, w2[expert].to(BF16))
            out.index_add_(0, token, y * weights[token, slot, None].to(BF16))

    return eager_us(run, count=2, groups=3)


def torch_sample(call: KernelCall) -> float:
    logits, temperature, top_k, top_p, min_p, *_ = call.args

    def run() -> None:
        scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
        kept = keep(scaled, top_k, top_p, min_p)
        torch.multinomial(scaled.masked_fill(~kept, float("-inf")).softmax(-1), 1)

    return eager_us(run, count=2, groups=3)


def composition(case: KernelCase, calls: list[KernelCall]) -> float:
    """Time the same work in single torch operations."""
    if isinstance(case.spec, NormSpec):
        return call_us([partial(naive_norm, call) for call in calls])
    return call_us([partial(naive_silu, call) for call in calls])


def naive_norm(call: KernelCall) -> None:
    x, residual, weight, eps, out, scale = call.args
    hidden = F.rms_norm(residual.add_(x[0]), weight.shape, weight, eps)
    scale.copy_(hidden.abs().amax(-1) / 448)
    out.copy_((hidden / scale[:, None]).clamp(-448, 448))


def naive_silu(call: KernelCall) -> None:
    x, out, scale = call.args
    gate, up = x.chunk(2, -1)
    out.copy_((F.silu(gate) * up / scale[:1]).clamp(-448, 448))
