"""FlashInfer's real signatures and capability table hold what our calls assume. Needs the package; one test a GPU."""

import ast
import inspect
from functools import partial
from pathlib import Path

import pytest
import torch

import kernels
from kernels.cases import prefill_case
from kernels.reference.quant import to_e4m3
from kernels.specs import AttnSpec

flashinfer = pytest.importorskip(
    "flashinfer", reason="flashinfer-python is not installed: its contract cannot be checked"
)

SOURCE = Path(kernels.__file__).parent / "flashinfer.py"


def calls():
    """Every call of a FlashInfer function in kernels/flashinfer.py: name, number of positional arguments, keywords."""
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.Call):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "flashinfer"
                else getattr(node.func, "id", "")
            )
            if name.startswith("trtllm_") or (
                isinstance(node.func, ast.Attribute)
                and name == node.func.attr
                and getattr(node.func.value, "id", "") == "flashinfer"
            ):
                yield name, len(node.args), [k.arg for k in node.keywords]


def find(name):
    from flashinfer import decode, prefill

    return next(getattr(module, name) for module in (flashinfer, decode, prefill) if hasattr(module, name))


def test_every_call_binds_to_the_installed_signature():
    seen = list(calls())
    assert {name for name, _, _ in seen} == {
        "trtllm_batch_decode_with_kv_cache",
        "trtllm_batch_context_with_kv_cache",
        "fused_add_rmsnorm_quant",
        "BatchPrefillWithPagedKVCacheWrapper",
    }
    for name, positional, keywords in seen:
        inspect.signature(find(name)).bind(*[None] * positional, **dict.fromkeys(keywords))


def test_the_prefill_wrapper_binds_what_we_plan_and_run_it_with():
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    for name in ("plan", "run"):
        found = [call for call in method_calls(name)]
        assert found, name
        for positional, keywords in found:
            inspect.signature(getattr(wrapper, name)).bind(None, *[None] * positional, **dict.fromkeys(keywords))


def test_queries_in_e4m3_take_their_scales_by_position_as_fa3_does():
    """attn_prefill_fa3 relies on it."""
    source = inspect.getsource(flashinfer.BatchPrefillWithPagedKVCacheWrapper.run)
    assert "is_float8(q) and len(args) >= 3" in source


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_queries_that_rope_has_rounded_give_the_bits_of_those_that_fa3_rounds():
    from kernels.flashinfer import Fa3Plans, attn_prefill_fa3

    spec = AttnSpec(32, 8, 128)
    plain = prefill_case(spec, [(1, 1), (130, 700), (1000, 1000)], workspace_mb=8).make("cuda")
    rounded = plain.copy()
    queries, *rest = rounded.args
    attend = partial(attn_prefill_fa3, spec, prepared=Fa3Plans(spec)(*plain.batch))
    plain.run(attend)
    attend(to_e4m3(queries.float()), *rest, **rounded.kwargs)
    assert torch.equal(plain.outputs["out"], rounded.outputs["out"])


def method_calls(name):
    """Positional count and keywords of each call of a method of that name on `wrapper` in kernels/flashinfer.py."""
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield len(node.args), [k.arg for k in node.keywords]


def test_per_tensor_products_are_open_to_every_architecture_we_name():
    from flashinfer.gemm import bmm_fp8

    assert all(bmm_fp8.is_backend_supported("cublas", cc) for cc in (89, 90, 100, 103, 120))
    assert not bmm_fp8.is_backend_supported("cutlass", 90)
