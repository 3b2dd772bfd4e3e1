"""What torch.compile is given to fuse is what the hand-made operations do: beside their references, on a CPU."""

import pytest
import torch
from torch import Tensor

from bench.kernels import torch_compile as kernels_compiled
from bench.kernels.torch_compile import norm_quant, plain_mlp, rope_arguments, rope_write, silu_quant
from kernels import catalog
from kernels.caps import Caps
from kernels.cases import KernelCall, KernelCase, norm_case, relative_error, rope_case, silu_case, weights
from kernels.registry import Registry
from kernels.specs import NormSpec, RopeSpec, SiluSpec

REGISTRY = Registry(catalog.IMPLS, Caps("cpu"))


def by_reference(case: KernelCase, call: KernelCall) -> KernelCall:
    own = call.copy()
    own.run(REGISTRY.get(case.op, case.spec))
    return own


def widened(rows: Tensor, scale: Tensor) -> Tensor:
    return rows.float() * scale[:, None]


def test_the_norm_rounds_as_ours_does():
    case = norm_case(NormSpec(256), 5)
    call = case.make("cpu")
    *_, out, scale = (own := by_reference(case, call)).args
    rows, row_scale, residual = norm_quant(call.args[0][0], *call.args[1:3])
    assert relative_error(widened(rows, row_scale), widened(out, scale)) < case.tolerance
    assert torch.equal(residual, own.updated["residual"])


def test_silu_rounds_as_ours_does():
    case = silu_case(SiluSpec(256, "token"), 5)
    call = case.make("cpu")
    _, out, scale = by_reference(case, call).args
    assert relative_error(widened(*silu_quant(call.args[0])), widened(out, scale)) < case.tolerance


def test_rope_turns_and_writes_what_ours_does():
    """But for the token of no slot, which ours does not write."""
    case = rope_case(RopeSpec(4, 2, 64), 6)
    call = case.make("cpu")
    own = by_reference(case, call)
    *_, k, v = arguments = rope_arguments(call)
    assert relative_error(rope_write(*arguments), own.outputs["q"]) < case.tolerance
    slots, page = call.args[2][1:], k.shape[2]
    slots = slots[slots > 0]
    for cache, name in ((k, "k"), (v, "v")):
        written, truth = (some[slots // page, :, slots % page] for some in (cache, own.updated[name]))
        assert relative_error(written, truth) < case.tolerance and truth.float().any()


def test_the_plain_mlp_is_one(monkeypatch: pytest.MonkeyPatch):
    """Beside float32 on the same rounded weights; what rounding rows costs is allowed."""
    torch.manual_seed(0)
    x, residual = torch.randn(2, 4, 256).bfloat16()
    gain, w1, s1, w2, s2 = torch.ones(256).bfloat16(), *weights(2 * 512, 256, "cpu"), *weights(256, 512, "cpu")
    monkeypatch.setattr(
        kernels_compiled, "product", lambda a, w, a_scale, w_scale: widened(a, a_scale) @ widened(w, w_scale).T
    )
    out, summed = plain_mlp(x, residual, gain, w1, s1, w2, s2)
    plain = x.float() + residual.float()
    gate, up = (torch.nn.functional.rms_norm(plain, (256,)) @ widened(w1, s1).T).chunk(2, -1)
    assert relative_error(out, torch.nn.functional.silu(gate) * up @ widened(w2, s2).T) < 0.06
    assert relative_error(summed, plain) < 0.01
