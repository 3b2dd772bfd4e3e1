"""The choice of an operation's implementation.

Decided once, at load, from static facts, and explained in words.
"""

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kernels.caps import Caps
from kernels.plans import TunedPlans
from kernels.specs import KernelSpec

_log = logging.getLogger(__name__)

Supports = Callable[[Caps, Any], str | None]

# What FlashInfer 0.6.13 raises where it cannot give a kernel. ImportError: what it needs is not installed. OSError: no
# ninja, or a folder that it cannot write. RuntimeError: no nvcc, a compiler that fails, FLASHINFER_DISABLE_JIT is set
# (MissingJITCacheError), its packages are of different versions, a module does not load. ValueError: a variable of its
# own that it cannot read.
_UNBUILDABLE = ImportError, OSError, RuntimeError, ValueError


class NoImplementation(RuntimeError):
    """No implementation of an operation runs here; the message lists every reason."""


@dataclass(frozen=True)
class Impl:
    """One implementation of one operation. `supports` is pure: None, or the reason why not."""

    op: str
    name: str
    priority: int  # the highest supported one is taken
    supports: Supports
    target: str  # "module:function", imported only when it is chosen
    tunable: bool = False  # takes `plans=`, a table of tile sizes by token count
    build: str = ""  # "module:function" of the spec, which builds and loads what a library may turn out not to have
    prepare: str = ""  # "module:class" whose instances plan a batch on the host; see Registry.preparer
    wants_e4m3: bool = False  # queries of `attn_prefill` beside an e4m3 cache, as RopeSpec.rounded leaves them
    for_few: str = ""  # the name of what does better for few rows of `attn_prefill` behind many keys, if it runs here
    rounding: float = 0.0  # error against the reference that its own roundings explain; the self-check allows it

    def load(self, spec: KernelSpec, plans: TunedPlans, caps: Caps) -> Callable[..., Any]:
        """Import the implementation and bind it to the static spec."""
        bound = partial(_named(self.target), spec)
        if not self.tunable:
            return bound
        return partial(bound, plans=plans.table(f"{self.op}/{self.name}", spec.key(), caps.cc, caps.sm_count))

    def preparer(self, spec: KernelSpec) -> Callable[..., Any]:
        """What plans a batch for this implementation: called with the batch, it returns the op's `prepared=`."""
        return _named(self.prepare)(spec) if self.prepare else nothing_to_prepare


def _named(target: str) -> Callable[..., Any]:
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)


def nothing_to_prepare(*batch: Any) -> None:
    """Implementations that read lengths on the device need no plan of the batch."""


@dataclass(frozen=True)
class ImplChoice:
    """The outcome for one (operation, spec): the winner, and why each other one was passed over."""

    op: str
    spec: KernelSpec
    impl: Impl
    rejected: tuple[tuple[str, str], ...]

    def explain(self) -> str:
        lines = [f"{self.op} [{self.spec.key()}]: {self.impl.name}"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.rejected])


@dataclass
class Registry:
    """All implementations, this process's capabilities, and what an operator or a self-check ruled out.

    `override` maps an operation to the name of the implementation to use ("attn_decode=triton,gemm_fp8=torch" as text);
    `excluded` holds (operation, name) pairs that failed their self-check.
    """

    impls: tuple[Impl, ...]
    caps: Caps
    plans: TunedPlans = field(default_factory=TunedPlans)
    override: Mapping[str, str] = field(default_factory=dict)
    excluded: Mapping[tuple[str, str], str] = field(default_factory=dict)
    choices: dict[tuple[str, str], ImplChoice] = field(default_factory=dict)

    def get(self, op: str, spec: KernelSpec) -> Callable[..., Any]:
        """The callable for this operation, bound to the spec. Raises NoImplementation."""
        return self.built(op, spec).load(spec, self.plans, self.caps)

    def preparer(self, op: str, spec: KernelSpec) -> Callable[..., Any]:
        """Return what plans a batch for `attn_prefill`.

        Call it once for all layers that attend for the same rows, outside of graphs, as preparer(block_table, new,
        total), with the host's counts of rows and of all tokens by sequence; what it returns goes to the op as
        `prepared=`. One preparer serves one stream.
        """
        return self.built(op, spec).preparer(spec)

    def built(self, op: str, spec: KernelSpec) -> Impl:
        """What `resolve` chooses, its kernel built.

        What can't be built is passed over from now on, and a warning says so. Raises NoImplementation.
        """
        while (impl := self.resolve(op, spec).impl).build:
            try:
                _named(impl.build)(spec)
                break
            except _UNBUILDABLE as error:
                why = _first_line(error)
                self.exclude(op, impl.name, f"flashinfer cannot build or load it: {why}")
                _log.warning(
                    "%s runs as %s: FlashInfer cannot build or load its kernel %s (%s). For that one, see that nvcc "
                    "and ninja run here and that FLASHINFER_DISABLE_JIT is not set, or install flashinfer-jit-cache",
                    op, self.resolve(op, spec).impl.name, impl.name, why,
                )  # fmt: skip
                _log.info("all that FlashInfer says of its kernel %s", impl.name, exc_info=error)
        return impl

    def resolve(self, op: str, spec: KernelSpec) -> ImplChoice:
        key = (op, repr(spec))
        if key not in self.choices:
            self.choices[key] = self._choose(op, spec)
        return self.choices[key]

    def candidates(self, op: str, spec: KernelSpec) -> list[Impl]:
        """Every implementation that runs here, the best first."""
        return [impl for impl in self.of(op) if self.reason_against(impl, spec) is None]

    def of(self, op: str) -> list[Impl]:
        return sorted((impl for impl in self.impls if impl.op == op), key=lambda impl: -impl.priority)

    def reason_against(self, impl: Impl, spec: KernelSpec) -> str | None:
        wanted = self.override.get(impl.op)
        if wanted and wanted != impl.name:
            return f"the setting asks for {wanted}"
        return self.excluded.get((impl.op, impl.name)) or impl.supports(self.caps, spec)

    def exclude(self, op: str, name: str, reason: str) -> None:
        """Take an implementation out of selection, for instance after a failed self-check."""
        self.excluded = {**self.excluded, (op, name): reason}
        self.choices = {key: choice for key, choice in self.choices.items() if key[0] != op}

    def explain(self) -> str:
        """All choices made so far, in words, for `tandem doctor`."""
        return "\n".join(choice.explain() for _, choice in sorted(self.choices.items()))

    def _choose(self, op: str, spec: KernelSpec) -> ImplChoice:
        rejected: list[tuple[str, str]] = []
        for impl in self.of(op):
            reason = self.reason_against(impl, spec)
            if reason is None:
                return ImplChoice(op, spec, impl, tuple(rejected))
            rejected.append((impl.name, reason))
        why = "; ".join(f"{name}: {reason}" for name, reason in rejected) or "none is registered"
        raise NoImplementation(f"{op} [{spec.key()}] has no implementation on {self.caps.name}: {why}")


def _first_line(error: BaseException) -> str:
    first, *_ = str(error).split("\n")
    return f"{type(error).__name__}: {first}"


def parse_override(text: str, ops: Iterable[str]) -> dict[str, str]:
    """Turn "op=name,op=name" into a mapping. Raises ValueError for an unknown operation."""
    pairs = dict(part.split("=", 1) for part in text.split(",") if part)
    unknown = sorted(set(pairs) - set(ops))
    if unknown:
        raise ValueError(f"unknown operation in the kernel setting: {', '.join(unknown)}")
    return pairs
