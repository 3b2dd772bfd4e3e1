"""The self-check: all implementations that could run here against the reference.

Those that fail are ruled out.

python -m kernels.selfcheck [--op NAME] [--json FILE]
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels import caps as capabilities
from kernels import catalog
from kernels.cases import KernelCall, KernelCase, errors
from kernels.registry import Impl, Registry
from kernels.standard import cases
from kernels.timing import capture

# Bytes read and operations of FP8 products with one scale a tensor, a second. Measured on an H200
# (bench/report/hardware_limits.py): 93 % of its data sheet's bytes and 75 % of its operations. Of the others as
# data sheets have them, dense: no kernel
# reaches these. Cards that are not here show no fraction; a PCIe H100, which reads 2 TB/s, has another name.
LIMITS = {
    "NVIDIA H200": (4.45e12, 1.48e15),
    "NVIDIA H100 80GB HBM3": (3.35e12, 1.979e15),
    "NVIDIA B200": (7.7e12, 4.5e15),
}


@dataclass(frozen=True)
class SelfCheckResult:
    """How one implementation did on one case.

    limit: fraction of the byte or FLOP limit, where the card is known.
    """

    op: str
    case: str
    impl: str
    error: float
    tolerance: float
    us: float | None = None
    limit: float | None = None
    failure: str | None = None
    replay: bool | None = None  # a captured graph gave the bits of the eager call, twice; None without a GPU

    @property
    def ok(self) -> bool:
        return self.failure is None and self.error <= self.tolerance and self.replay is not False


def check(registry: Registry, suite: Iterable[KernelCase], device: str, timed: bool = False) -> list[SelfCheckResult]:
    """Judge every candidate on every case, and exclude from the registry what failed."""
    verdicts = []
    for case in suite:
        call = case.make(device)
        want = call.copy()
        want.run(reference(registry, case).load(case.spec, registry.plans, registry.caps))
        for impl in registry.candidates(case.op, case.spec):
            if impl.name != "reference":
                verdict = check_case(registry, case, impl, call, want, timed)
                verdicts.append(verdict)
                if not verdict.ok:
                    registry.exclude(case.op, impl.name, f"failed the self-check: {why(verdict)}")
    return verdicts


def why(verdict: SelfCheckResult) -> str:
    """What is wrong with an implementation that failed."""
    if verdict.failure:
        return verdict.failure
    if verdict.replay is False:
        return f"a replayed graph and the eager call differ on {verdict.case}"
    return f"error {verdict.error:.2e} above {verdict.tolerance:.0e} on {verdict.case}"


def check_case(
    registry: Registry, case: KernelCase, impl: Impl, call: KernelCall, want: KernelCall, timed: bool
) -> SelfCheckResult:
    tolerance = max(case.tolerance, impl.rounding)
    got, on_gpu = call.copy(), registry.caps.device == "cuda" and torch.cuda.is_available()
    got.poison()
    try:
        op = bind(registry, impl, case, call)
        got.run(op)
        worst = max(errors(got, want).values())
        replay = replays(call, op) if on_gpu else None
    except Exception as error:  # a broken implementation may raise anything, and must not end the check of the others
        failure = f"{type(error).__name__}: {str(error)[:200]}"
        return SelfCheckResult(case.op, case.spec.key(), impl.name, float("inf"), tolerance, failure=failure)
    us = time_us(got, op) if timed and on_gpu else None
    limit = fraction(registry, case, us)
    return SelfCheckResult(case.op, case.spec.key(), impl.name, worst, tolerance, us, limit, replay=replay)


def bind(registry: Registry, impl: Impl, case: KernelCase, call: KernelCall) -> Callable[..., Any]:
    """The implementation as the call needs it: tuned, and with the plan of the batch where it takes one."""
    op = impl.load(case.spec, registry.plans, registry.caps)
    return partial(op, prepared=impl.preparer(case.spec)(*call.batch)) if impl.prepare else op


def replays(call: KernelCall, op: Callable[..., Any]) -> bool:
    """Whether a captured graph gives the bits of the eager call, at the first replay and at the second."""
    eager, graphed = call.copy(), call.copy()
    eager.poison()
    eager.run(op)
    graph = capture(partial(graphed.run, op))
    return all(same_bits(eager, replayed(graph, graphed, call)) for _ in range(2))


def replayed(graph: torch.cuda.CUDAGraph, graphed: KernelCall, start: KernelCall) -> KernelCall:
    """One replay from the inputs of `start`, with outputs poisoned before."""
    for name, tensor in graphed.updated.items():
        tensor.copy_(start.updated[name])
    graphed.poison()
    graph.replay()
    torch.cuda.synchronize()
    return graphed


def same_bits(a: KernelCall, b: KernelCall) -> bool:
    theirs = b.outputs | b.updated
    return all(
        torch.equal(as_bytes(tensor), as_bytes(theirs[name])) for name, tensor in (a.outputs | a.updated).items()
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """NaN differs from NaN, and bytes do not."""
    return tensor.contiguous().view(torch.uint8)


def reference(registry: Registry, case: KernelCase) -> Impl:
    return next(impl for impl in registry.of(case.op) if impl.name == "reference")


def time_us(call: KernelCall, op: object) -> float:
    """Median of device times over single calls, after a warm-up."""
    spans = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call.run(op)  # type: ignore[arg-type]
        end.record()
        torch.cuda.synchronize()
        spans.append(start.elapsed_time(end) * 1e3)
    return sorted(spans)[len(spans) // 2]


def fraction(registry: Registry, case: KernelCase, us: float | None) -> float | None:
    known = next((v for name, v in LIMITS.items() if registry.caps.name.startswith(name)), None)
    if known is None or us is None:
        return None
    return max(case.nbytes / known[0], case.flops / known[1]) / (us * 1e-6)


def table(verdicts: list[SelfCheckResult]) -> str:
    head = f"{'operation':18} {'implementation':14} {'error':>9} {'limit of error':>14} {'replay':>6}"
    lines = [f"{head} {'us':>9} {'of limit':>8}  case"]
    for v in verdicts:
        us, limit = (f"{v.us:9.1f}" if v.us else "        -"), (f"{v.limit:8.0%}" if v.limit else "       -")
        replay = {True: " equal", False: "DIFFER", None: "     -"}[v.replay]
        failed = "" if v.ok else f"  FAILED {v.failure or ''}"
        lines.append(
            f"{v.op:18} {v.impl:14} {v.error:9.2e} {v.tolerance:14.0e} {replay} {us} {limit}  {v.case}{failed}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--op", help="only this operation")
    options.add_argument("--json", type=Path, help="write the verdicts here")
    args = options.parse_args(argv)
    caps = capabilities.detect()
    registry = catalog.registry(caps)
    suite = [case for case in cases(caps.device) if args.op in (None, case.op)]
    verdicts = check(registry, suite, caps.device, timed=True)
    lines = [
        *capabilities.missing(caps),
        table(verdicts),
        *(f"taken out: {op}/{name}: {why}" for (op, name), why in registry.excluded.items()),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if args.json:
        args.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    return 0 if all(v.ok for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
