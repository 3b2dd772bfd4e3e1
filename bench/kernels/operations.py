"""The benchmark of each operation by itself, beside its peers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.kernels import peers
from bench.kernels.figure import Figure, show
from bench.report.hardware_limits import BF16_RATE, FP8_TENSOR_RATE, READ_RATE
from kernels.cases import (
    KernelCall,
    KernelCase,
    attn_case,
    experts_case,
    gate_up_case,
    gemm_case,
    mla_case,
    norm_case,
    prefill_case,
    sample_case,
    silu_case,
    w4_case,
)
from kernels.decode_plan import decode_plan, int4_parts
from kernels.registry import Registry
from kernels.selfcheck import bind, reference
from kernels.specs import AttnSpec, GateUpSpec, GemmSpec, MLASpec, MoESpec, NormSpec, SampleSpec, SiluSpec, W4Spec
from kernels.timing import call_us

L2_NBYTES = 200 << 20


def floor_us(case: KernelCase, rate: float = FP8_TENSOR_RATE) -> float:
    return max(case.nbytes / READ_RATE, case.flops / rate) * 1e6


def fresh_calls(case: KernelCase, most: int = 12) -> list[KernelCall]:
    """Return copies of the work on different operands, enough that none is still in L2 on its next turn."""
    count = max(2, min(most, int(L2_NBYTES // max(case.nbytes, 1)))) if case.nbytes else 1
    return [case.make("cuda") for _ in range(count)]


def measure(registry: Registry, case: KernelCase, calls: list[KernelCall], impl: str | None = None) -> float:
    chosen = next(i for i in registry.candidates(case.op, case.spec) if impl in (None, i.name))
    op = chosen.load(case.spec, registry.plans, registry.caps)
    return call_us([partial(call.run, op) for call in calls])


def error(registry: Registry, case: KernelCase, call: KernelCall, run: Callable[[KernelCall], Any]) -> float:
    """Return the relative error of the first output against the reference on the same inputs."""
    want, got = call.copy(), call.copy()
    want.run(reference(registry, case).load(case.spec, registry.plans, registry.caps))
    got.poison()
    run(got)
    name = next(iter(got.outputs))
    a, b = got.outputs[name].float(), want.outputs[name].float()
    return ((a - b).norm() / b.norm()).item()


def attention(registry: Registry) -> list[Figure]:
    rows = []
    shapes = [
        ("llama-8b", AttnSpec(32, 8, 128)),
        ("gpt-oss-20b", AttnSpec(64, 8, 64, sinks=True)),
        ("gpt-oss-20b window", AttnSpec(64, 8, 64, window=128, sinks=True)),
    ]
    for model, spec in shapes:
        for batch, context in ((1, 1024), (16, 1024), (128, 1024), (16, 8192), (1, 131072)):
            case = attn_case(spec, [context] * batch, workspace_mb=256)
            calls = fresh_calls(case, 6)
            us = measure(registry, case, calls, "triton")
            wrong = error(registry, case, calls[0], lambda call, c=case: call.run(registry.get(c.op, c.spec)))
            peer, peer_us, more = peers.decode(registry, case, calls)
            params = dict(model=model, batch=batch, context=context)
            rows.append(
                show(
                    Figure(
                        "attn_decode", params, us, "us", floor_us(case) / us, peer, peer_us, dict(error=wrong, **more)
                    )
                )
            )
            del calls
            torch.cuda.empty_cache()
    return rows


def prefill(registry: Registry) -> list[Figure]:
    rows = []
    for model, spec in (
        ("llama-8b", AttnSpec(32, 8, 128)),
        ("llama-8b bf16 cache", AttnSpec(32, 8, 128, kv="bf16")),
        ("gpt-oss-20b", AttnSpec(64, 8, 64, sinks=True)),
        ("gpt-oss-20b window", AttnSpec(64, 8, 64, window=128, sinks=True)),
    ):
        for new, total in ((8192, 8192), (2048, 32768), (128, 8320), (256, 8448)):
            case = prefill_case(spec, [(new, total)], workspace_mb=512)
            rows.append(prefill_row(registry, case, dict(model=model, new=new, total=total)))
            torch.cuda.empty_cache()
    return rows


def prefill_row(registry: Registry, case: KernelCase, params: dict[str, Any]) -> Figure:
    """Time the chosen implementation, our other ones and the peers."""
    call, chosen = case.make("cuda"), registry.resolve(case.op, case.spec).impl
    ops = {
        i.name: bind(registry, i, case, call) for i in registry.candidates(case.op, case.spec) if i.name != "reference"
    }
    times = {name: call_us([partial(call.run, op)]) for name, op in ops.items()}
    us = times[chosen.name]
    extra: dict[str, Any] = dict(chosen=chosen.name, tflops=case.flops / us / 1e6)
    extra |= {f"ours_{name}_us": value for name, value in times.items() if name != chosen.name}
    others = peers.prefill(registry, case, call) if case.spec.kv == "e4m3" else {}  # type: ignore[attr-defined]
    extra |= others | dict(error=prefill_error(registry, case))
    known = {name: value for name, value in others.items() if name.endswith("_us")}
    best = min(known, key=lambda name: known[name]) if known else None
    peak = FP8_TENSOR_RATE if case.spec.kv == "e4m3" else BF16_RATE  # type: ignore[attr-defined]
    limit = None if getattr(case.spec, "window", 0) else floor_us(case, peak) / us
    return show(Figure("attn_prefill", params, us, "us", limit, best, known.get(best or ""), extra))


def prefill_error(registry: Registry, case: KernelCase) -> float:
    """Return the error of the chosen implementation, on 512 tokens after 1536.

    The prompt is short because the reference holds all scores in memory.
    """
    assert isinstance(case.spec, AttnSpec)
    small = prefill_case(case.spec, [(512, 2048)], workspace_mb=64)
    call = small.make("cuda")
    op = bind(registry, registry.resolve(small.op, small.spec).impl, small, call)
    return error(registry, small, call, lambda c: c.run(op))


def mla(registry: Registry) -> list[Figure]:
    rows = []
    for chunks, label in (([(1, 4096)] * 32, "decode 32 x 4096"), ([(256, 4096)], "256 on 4096")):
        case = mla_case(MLASpec(128), chunks)
        us = measure(registry, case, [case.make("cuda")], "triton")
        rows.append(show(Figure("mla_attention", dict(shape=label), us, "us", floor_us(case) / us)))
    return rows


LLAMA = {"qkv": (6144, 4096), "o": (4096, 4096), "down": (4096, 14336)}


def skinny(registry: Registry) -> list[Figure]:
    """Time norm and product together, as a decode step runs them, on 2 to 12 weights in turn."""
    rows = []
    for tokens in (1, 8, 32, 64):
        for name, (n, k) in LLAMA.items():
            case = gemm_case(GemmSpec(n, k, parts=decode_plan(tokens).parts(name), skinny=True), tokens)
            rows.append(norm_and(registry, case, f"{name}", tokens, peers.scaled_mm(case, tokens)))
        case = gate_up_case(GateUpSpec(28672, 4096), tokens)
        rows.append(norm_and(registry, case, "gate_up+silu+quant", tokens, peers.scaled_mm(case, tokens)))
    return rows


def norm_and(registry: Registry, case: KernelCase, name: str, tokens: int, peer: Callable[[KernelCall], Any]) -> Figure:
    norm = norm_case(NormSpec(4096, parts=2), tokens)
    normed = norm.make("cuda")
    calls = [chained(normed, call) for call in fresh_calls(case)]
    norm_op, op = registry.get(norm.op, norm.spec), registry.get(case.op, case.spec)

    def both(call: KernelCall) -> None:
        normed.run(norm_op)
        call.run(op)

    def beside(call: KernelCall) -> None:
        normed.run(norm_op)
        peer(call)

    us, other = call_us([partial(both, call) for call in calls]), call_us([partial(beside, call) for call in calls])
    return show(
        Figure(
            "norm_gemm",
            dict(gemm=name, tokens=tokens),
            us,
            "us",
            floor_us(case) / us,
            "norm + _scaled_mm row-wise",
            other,
        )
    )


def chained(normed: KernelCall, call: KernelCall) -> KernelCall:
    """Return the product's call so that it shares buffers with the norm, if the shapes agree.

    It reads what the norm wrote, and writes what the norm will read. In a step these lie in L2, and separate buffers
    would not.
    """
    args, (x, *_, normed_out, normed_scale) = list(call.args), normed.args
    if args[0].shape == normed_out.shape:
        args[0], args[2] = normed_out, normed_scale
    if args[4].shape == x.shape:
        args[4] = x
    return KernelCall(tuple(args), call.kwargs)


def wide(registry: Registry) -> list[Figure]:
    rows = []
    for tokens in (512, 2048, 8192):
        for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)):
            for recipe in ("row", "tensor", "block128"):
                case = gemm_case(GemmSpec(n, k, recipe), tokens)  # type: ignore[arg-type]
                calls = [case.make("cuda") for _ in range(2)]
                times = {
                    i.name: measure(registry, case, calls, i.name)
                    for i in registry.candidates(case.op, case.spec)
                    if i.name != "reference"
                }
                chosen = registry.resolve(case.op, case.spec).impl.name
                other = min((name for name in times if name != chosen), key=lambda name: times[name], default=None)
                extra = dict(chosen=chosen, tflops=case.flops / times[chosen] / 1e6)
                rows.append(
                    show(
                        Figure(
                            "gemm_fp8",
                            dict(tokens=tokens, n=n, k=k, recipe=recipe),
                            times[chosen],
                            "us",
                            floor_us(case) / times[chosen],
                            other,
                            times.get(other or ""),
                            extra,
                        )
                    )
                )
                torch.cuda.empty_cache()
    return rows


def four_bit(registry: Registry) -> list[Figure]:
    rows = []
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        for tokens in (1, 8, 16, 32, 64, 1024):
            parts = int4_parts(tokens, n, k)
            case = w4_case(W4Spec(n, k, parts), tokens)
            us = measure(registry, case, fresh_calls(case, 8), "triton")
            params = dict(n=n, k=k, parts=parts, tokens=tokens)
            other = peers.bf16_mm(case, tokens)
            rows.append(show(Figure("gemm_w4", params, us, "us", floor_us(case, BF16_RATE) / us, "bf16 matmul", other)))
            torch.cuda.empty_cache()
    return rows


EXPERTS = {
    "gpt-oss-20b": MoESpec(32, 4, 2880, 2880, activation="swiglu_oai"),
    "gpt-oss-20b mxfp4 bias": MoESpec(32, 4, 2880, 2880, activation="swiglu_oai", weights="mxfp4", bias=True),
    "qwen3-30b-a3b": MoESpec(128, 8, 2048, 768),
    "maverick (16 of 128 experts)": MoESpec(16, 1, 5120, 8192, scoring="sigmoid"),
}


def experts(registry: Registry) -> list[Figure]:
    rows = []
    for model, spec in EXPERTS.items():
        for tokens in (1, 16, 256, 4096):
            case = experts_case(spec, tokens)
            call = case.make("cuda")
            us = measure(registry, case, [call, *(rerouted(spec, call) for _ in range(5))], "triton")
            touched = call.args[3].unique().numel()
            nbytes = 3 * touched * spec.inter * spec.hidden * (1 if spec.weights == "e4m3" else 17 / 32)
            peak = FP8_TENSOR_RATE if spec.weights == "e4m3" else BF16_RATE
            floor = max(nbytes / READ_RATE, case.flops / peak) * 1e6
            naive = peers.naive_moe(case, call) if spec.weights == "e4m3" else None
            rows.append(
                show(
                    Figure(
                        "moe_experts",
                        dict(model=model, tokens=tokens),
                        us,
                        "us",
                        floor / us,
                        "loop of bf16 products" if naive else None,
                        naive,
                    )
                )
            )
            del call
            torch.cuda.empty_cache()
    return rows


def rerouted(spec: MoESpec, call: KernelCall) -> KernelCall:
    """Return the call with other experts of the same weights chosen, which are not in L2."""
    args = list(call.args)
    args[3] = torch.rand(len(args[0]), spec.experts, device="cuda").topk(spec.top_k).indices.to(torch.int32)
    return KernelCall(tuple(args), call.kwargs)


def sampling(registry: Registry) -> list[Figure]:
    rows = []
    for batch in (1, 8, 64, 256):
        case = sample_case(SampleSpec(128256), batch, torch.bfloat16)
        call = case.make("cuda")
        us = measure(registry, case, [call], "triton")
        other = peers.torch_sample(call)
        rows.append(
            show(Figure("sample", dict(batch=batch, vocab=128256), us, "us", floor_us(case) / us, "torch sort", other))
        )
    return rows


def elementwise(registry: Registry) -> list[Figure]:
    rows = []
    for tokens in (8, 256, 8192):
        for case in (
            norm_case(NormSpec(4096), tokens),
            silu_case(SiluSpec(14336), tokens),
            silu_case(SiluSpec(14336, "token"), tokens),
        ):
            calls = fresh_calls(case)
            us = measure(registry, case, calls, "triton")
            naive = peers.composition(case, calls)
            params = dict(op=case.op, quant=case.spec.quant, tokens=tokens)  # type: ignore[attr-defined]
            rows.append(show(Figure("elementwise", params, us, "us", floor_us(case) / us, "torch composition", naive)))
            del calls
            torch.cuda.empty_cache()
    return rows
