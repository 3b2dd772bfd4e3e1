"""The self-check takes a wrong implementation out of selection, and leaves the right ones in."""

from dataclasses import replace

import pytest
import torch

from kernels import catalog
from kernels.caps import Caps, detect
from kernels.cases import KernelCall, norm_case, relative_error
from kernels.registry import Impl, Registry
from kernels.selfcheck import SelfCheckResult, check, fraction, main, same_bits, table, why
from kernels.specs import NormSpec
from kernels.standard import cases
from tests.kernels.broken import forgets_a_row, off_by_a_little, raises


def registry_with(*broken):
    impls = tuple(
        Impl("add_rmsnorm_quant", f.__name__, 50 + i, lambda caps, spec: None, f"tests.kernels.broken:{f.__name__}")
        for i, f in enumerate(broken)
    )
    return Registry(catalog.IMPLS + impls, Caps("cpu"))


def test_broken_implementations_are_taken_out():
    registry = registry_with(off_by_a_little, forgets_a_row, raises)
    spec = NormSpec(64)
    assert registry.resolve("add_rmsnorm_quant", spec).impl.name == "raises"
    verdicts = check(registry, [norm_case(spec, 5)], "cpu")
    assert [v.ok for v in verdicts] == [False, False, False]
    assert registry.resolve("add_rmsnorm_quant", spec).impl.name == "reference"
    text = registry.explain()
    assert "illegal memory access" in text and text.count("failed the self-check") == 3
    assert "FAILED" in table(verdicts)


def test_what_an_implementation_states_to_round_is_allowed_it_and_no_other():
    target = "tests.kernels.broken:off_by_a_little"
    for rounding, ok in ((0.1, True), (0.01, False)):
        impl = Impl("add_rmsnorm_quant", "rough", 50, lambda caps, spec: None, target, rounding=rounding)
        registry = Registry((*catalog.IMPLS, impl), Caps("cpu"))
        verdict = check(registry, [norm_case(NormSpec(64), 5)], "cpu")[0]
        assert (verdict.ok, verdict.impl) == (ok, "rough")


def test_a_graph_that_differs_from_the_eager_call_is_a_failure():
    good = SelfCheckResult("op", "case", "impl", 0.0, 1e-3, replay=True)
    bad = replace(good, replay=False)
    assert good.ok and not bad.ok
    assert "a replayed graph and the eager call differ on case" in why(bad)
    assert "DIFFER" in table([bad]) and " equal" in table([good])


def test_bits_are_compared_and_not_values():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same_bits(KernelCall((), outputs={"x": nan}), KernelCall((), outputs={"x": nan.clone()}))
    assert not same_bits(KernelCall((), outputs={"x": zero}), KernelCall((), outputs={"x": -zero}))


def test_a_copy_of_a_call_keeps_its_aliases_and_shares_nothing():
    x = torch.zeros(3)
    call = KernelCall((x, 5), dict(out=x), {"out": x}, batch=(x, [1]))
    other = call.copy()
    assert other.args[0] is other.kwargs["out"] is other.outputs["out"] is other.batch[0]
    other.args[0].fill_(1)
    assert x.sum() == 0 and other.args[1] == 5


def test_poison_marks_every_kind_of_output():
    kinds = {dtype: torch.zeros(2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.uint8)}
    kinds[torch.float8_e4m3fn] = torch.zeros(2).to(torch.float8_e4m3fn)
    KernelCall((), outputs={str(d): t for d, t in kinds.items()}).poison()
    assert all(t.float().isnan().all() or (t.float() != 0).all() for t in kinds.values())


def test_a_fraction_of_the_limit_is_of_the_larger_of_bytes_and_operations():
    h200 = Registry((), Caps("cuda", 90, "NVIDIA H200"))
    case = replace(norm_case(NormSpec(64), 5), nbytes=4.45e6, flops=1.48e9)
    assert fraction(h200, case, 2.0) == pytest.approx(0.5)
    assert fraction(h200, replace(case, flops=2.96e9), 2.0) == pytest.approx(1.0)
    sxm = Registry((), Caps("cuda", 90, "NVIDIA H100 80GB HBM3"))
    assert fraction(sxm, replace(case, nbytes=3.35e6), 2.0) == pytest.approx(0.5)
    for name in ("Some Card", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"):  # slower memory, and faster, than that H100's
        assert fraction(Registry((), Caps("cuda", 90, name)), case, 2.0) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("op", catalog.ops())
def test_every_implementation_replays_bit_for_bit_on_the_gpu(op):
    registry = catalog.registry(detect())
    verdicts = check(registry, [case for case in cases("cuda") if case.op == op], "cuda")
    assert all(v.replay for v in verdicts), table(verdicts)
    assert all(v.ok for v in verdicts), table(verdicts)


def test_the_gpu_suite_has_a_case_of_every_operation():
    assert {case.op for case in cases("cuda")} == set(catalog.ops())


def test_a_nan_is_an_infinite_error():
    assert relative_error(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 1.0])) == float("inf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_command_runs_without_a_gpu(capsys):
    assert main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out
