"""The benchmark's decode step on the CPU reference at a small size: every variant computes the same model."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.kernels import decode_step as bench
from kernels import catalog
from kernels.caps import Caps
from kernels.cases import relative_error
from kernels.decode_plan import DecodeGemmPlan, decode_plan
from kernels.registry import Registry

SIZES = dict(HIDDEN=256, INTER=256, Q_HEADS=2, KV_HEADS=1, DIM=128, VOCAB=96, QKV=512, DEVICE="cpu")
SHAPES = {"qkv": (512, 256), "o": (256, 256), "gate_up": (512, 256), "down": (256, 256)}
ONLY_LAUNCH = {"pdl", "num_warps", "early", "ahead"}


def call(op, *args, **kwargs):
    return op(*args, **{name: value for name, value in kwargs.items() if name not in ONLY_LAUNCH})


class Reference(Registry):
    """A registry of references that ignore how our kernels would be launched."""

    def get(self, op, spec):
        return partial(call, super().get(op, spec))


@pytest.fixture(scope="module")
def step():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SIZES.items():
            patch.setattr(bench, name, value)
        patch.setattr(bench, "SHAPES", SHAPES)
        yield bench.Step(
            bench.Model(2), Reference(catalog.IMPLS, Caps("cpu")), 33, context=70, plan=DecodeGemmPlan(2, 2, 2)
        )


@pytest.fixture(scope="module")
def logits(step):
    step.run()
    return step.logits.float().clone()


def test_the_greedy_token_is_the_largest_logit(step, logits):
    assert torch.equal(step.token, logits.argmax(-1))
    assert torch.isfinite(logits).all() and logits.std() > 0


@pytest.mark.parametrize("name", ["no_pdl", "weights_after_wait", "late_trigger", "norm_8_warps"])
def test_how_kernels_are_launched_changes_nothing(step, logits, name):
    other = bench.variants(step, step.registry)[name]
    other.run()
    assert torch.equal(other.logits.float(), logits)


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("bf16_head", 0.1), ("unfused_norm_quant", 0.1), ("static_norm_scale", 0.2), ("attention_apart", 0.1),
        ("unfused_silu", 0.1), ("group_scales", 0.2), ("cublas_deferred", 0.1),
    ],
)  # fmt: skip
def test_other_roundings_stay_near(step, logits, name, bound):
    other = bench.variants(step, step.registry)[name]
    other.logits.fill_(float("nan"))
    other.run()
    assert relative_error(other.logits, logits) < bound


def test_parts_only_change_the_order_of_sums(step, logits):
    other = step.with_tricks(plan=replace(step.plan, qkv_parts=1, o_parts=1, down_parts=1))
    other.run()
    assert relative_error(other.logits, logits) < 0.1


@pytest.mark.parametrize(("batch", "parts", "deferred"), [(1, 2, False), (8, 2, False), (64, 2, False), (256, 1, True)])
def test_plans_split_small_batches_and_defer_large_ones(batch, parts, deferred):
    plan = decode_plan(batch)
    assert (plan.parts("down"), plan.deferred) == (parts, deferred)
    assert not (plan.deferred and plan.parts("qkv") > 1), "cuBLAS does not split along k"
