"""The tuner: it finds tile sizes for this card and writes them to a file that workers read.

    python -m kernels.tune [--op NAME] [--cache DIR]

Offline only: nothing here runs while serving. Of a worker on several GPUs the first one's process reads for all.
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from kernels import caps as capabilities
from kernels import catalog
from kernels.cases import (
    KernelCall,
    KernelCase,
    attn_case,
    errors,
    experts_case,
    fused_attn_case,
    gate_up_case,
    gemm_case,
    prefill_case,
    w4_case,
)
from kernels.plans import Plan, PlanTable, TunedPlans, TuningRefused, cache_path, load, save
from kernels.registry import Impl, Registry
from kernels.selfcheck import reference
from kernels.specs import AttnSpec, FusedAttnSpec, GateUpSpec, GemmSpec, MoESpec, W4Spec
from kernels.timing import call_us
from kernels.triton.moe import SORTED_ROWS, can_sort_rows

L2_NBYTES = 200 << 20  # operands in turn exceed this, so that no call finds its own in L2


@dataclass(frozen=True)
class TuningJob:
    """A case to tune for one bucket of token counts, and the plans to try."""

    case: KernelCase
    bucket: int
    plans: tuple[Plan, ...]
    impl: str = "triton"


def grid(**axes: Iterable[int]) -> tuple[Plan, ...]:
    """Return every combination of the axes."""
    plans: list[Plan] = [{}]
    for name, values in axes.items():
        plans = [{**plan, name: value} for plan in plans for value in values]
    return tuple(plans)


def jobs() -> list[TuningJob]:
    """Return what is tuned: Llama-8B, gpt-oss-20B, Qwen3-30B-A3B and Maverick shapes."""
    return [*decode_jobs(), *prefill_jobs(), *weight_jobs(), *expert_jobs()]


def decode_jobs() -> list[TuningJob]:
    llama = AttnSpec(32, 8, 128)
    full = grid(stream=(1,), slices=(1,), block=(32, 64), stages=(2, 3, 4), warps=(1,), residents=(8,))
    fused = partial(FusedAttnSpec, 32, 8, 128)
    return [
        TuningJob(attn_case(llama, [1088] * 128), 256, full),
        TuningJob(
            fused_attn_case(fused(parts=2), [1088]),
            3,
            grid(slices=(9, 17), block=(64,), stages=(2, 3), warps=(2, 4), bulk=(0, 1)),
        ),
        TuningJob(
            fused_attn_case(fused(parts=2), [1088] * 8),
            8,
            grid(slices=(4, 6), block=(64,), stages=(2, 3), warps=(2, 4), bulk=(0, 1)),
        ),
        TuningJob(
            fused_attn_case(fused(), [1088] * 32),
            32,
            grid(slices=(1, 2), block=(64,), stages=(3, 5), warps=(1, 2), bulk=(0, 1)),
        ),
        TuningJob(
            fused_attn_case(fused(), [1088] * 64),
            64,
            grid(slices=(1, 2), block=(64,), stages=(3, 4, 5), warps=(1, 2), bulk=(0, 1)),
        ),
        TuningJob(
            fused_attn_case(fused(deferred=True), [1088] * 256),
            256,
            grid(slices=(1,), block=(64,), stages=(3, 4, 5), warps=(1, 2), bulk=(0, 1)),
        ),
    ]


def prefill_jobs() -> list[TuningJob]:
    plans = grid(bm=(64, 128), pack=(1, 8), block=(64,), stages=(3, 4), warps=(4, 8))
    wide = grid(bm=(128,), block=(64, 128), stages=(2, 3), warps=(4, 8)) + grid(
        bm=(64,), block=(64, 128), stages=(2, 3), warps=(4,)
    )
    return [
        TuningJob(prefill_case(AttnSpec(32, 8, 128), [(2048, 8192)], workspace_mb=256), 8192, wide),
        TuningJob(prefill_case(AttnSpec(64, 8, 64, sinks=True), [(2048, 8192)], workspace_mb=256), 8192, wide),
        TuningJob(prefill_case(AttnSpec(64, 8, 64, window=128, sinks=True), [(8192, 8192)]), 8192, plans),
    ]


def weight_jobs() -> list[TuningJob]:
    rows = []
    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)):
        for tokens in (8, 64):
            common = dict(bx=(max(16, tokens),), ahead=(0, 2, 4))
            plans = grid(bw=(64, 128), stages=(2, 3, 4), warps=(4,), **common)
            plans += grid(bw=(128,), stages=(2, 3, 4), warps=(8,), **common)
            rows += [TuningJob(w4_case(W4Spec(n, k, parts), tokens), tokens, plans) for parts in (1, 2, 4)]
    block = grid(bm=(64, 128), bn=(128,), stages=(3, 4), warps=(4, 8))
    rows.append(TuningJob(gemm_case(GemmSpec(4096, 4096, "block128"), 4096), 8192, block))
    rows.append(
        TuningJob(
            gate_up_case(GateUpSpec(28672, 4096), 8),
            8,
            grid(bw=(64, 128), bx=(8,), bk=(128, 256), stages=(3, 4, 6), warps=(4,)),
            "hopper",
        )
    )
    return rows


def expert_jobs() -> list[TuningJob]:
    rows = []
    for spec in (MoESpec(32, 4, 2880, 2880, activation="swiglu_oai"), MoESpec(128, 8, 2048, 768)):
        for tokens in (1, 16, 256, 4096):
            share = max(16, tokens * spec.top_k // spec.experts)
            bx = (16,) if share <= 16 else (32, 64) if share < 256 else (64, 128)
            plans = grid(bx=bx, bw=(64, 128), stages=(3, 4), warps=(4, 8) if tokens > 256 else (4,))
            if can_sort_rows(spec) and tokens > 256:
                plans += (SORTED_ROWS,)
            rows.append(TuningJob(experts_case(spec, tokens), tokens, plans))
    return rows


def tune(registry: Registry, job: TuningJob, report: Callable[[str], object]) -> Plan | None:
    """Return the fastest plan that agrees with the reference, or None when none does."""
    case = job.case
    impl = next(impl for impl in registry.of(case.op) if impl.name == job.impl)
    calls = [case.make("cuda")]
    calls += [case.make("cuda") for _ in range(min(11, int(L2_NBYTES // max(case.nbytes, 1))))] if case.nbytes else []
    want = calls[0].copy()
    want.run(reference(registry, case).load(case.spec, registry.plans, registry.caps))
    timed = [(us, plan) for plan in job.plans if (us := judge(registry, impl, case, plan, calls, want)) is not None]
    if not timed:
        report(f"{case.name} bucket {job.bucket}: no plan works")
        return None
    us, best = min(timed, key=lambda pair: pair[0])
    report(f"{case.name} bucket {job.bucket}: {us:.1f} us with {best} (worst {max(u for u, _ in timed):.1f})")
    return best


def judge(
    registry: Registry, impl: Impl, case: KernelCase, plan: Plan, calls: list[KernelCall], want: KernelCall
) -> float | None:
    """Return the microseconds of a plan, or None where it does not fit the chip or is wrong."""
    if plan == SORTED_ROWS and not registry.caps.hopper:
        return None
    op = partial(
        impl.load(case.spec, registry.plans, registry.caps),
        plans=PlanTable({1 << 30: plan}, registry.caps.cc, registry.caps.sm_count),
    )
    try:
        got = calls[0].copy()
        got.poison()
        got.run(op)
        if max(errors(got, want).values()) > case.tolerance:
            return None
        return call_us([partial(call.run, op) for call in calls], groups=3)
    except (OutOfResources, CompilationError, AssertionError):
        return None


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--op", help="only this operation")
    options.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "tandem" / "kernels")
    args = options.parse_args(argv)
    caps = capabilities.detect()
    if caps.device != "cuda":
        sys.stderr.write("tuning needs a GPU\n")
        return 2
    registry = catalog.registry(caps)
    path = cache_path(args.cache, caps)
    rows = {name: dict(buckets) for name, buckets in _found_before(path, caps).tuned.items()}
    for job in (job for job in jobs() if args.op in (None, job.case.op)):
        plan = tune(registry, job, lambda line: sys.stdout.write(line + "\n"))
        if plan is not None:
            rows.setdefault(f"{job.case.op}/{job.impl}|{job.case.spec.key()}", {})[job.bucket] = plan
        save(path, TunedPlans(rows), caps)
        torch.cuda.empty_cache()
    sys.stdout.write(f"written to {path}\n")
    return 0


def _found_before(path: Path, caps: capabilities.Caps) -> TunedPlans:
    """Return what the file has, unless it is of another card or of other versions."""
    try:
        return load(path, caps)
    except TuningRefused as refused:
        sys.stderr.write(f"{refused}\n")
        return TunedPlans()


if __name__ == "__main__":
    sys.exit(main())
