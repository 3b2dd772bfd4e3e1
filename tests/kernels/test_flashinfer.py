"""FlashInfer's real signatures and capability table hold what our calls assume. Needs the package; one test a GPU."""

import ast
import inspect
import re
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
    }
    for name, positional, keywords in seen:
        inspect.signature(find(name)).bind(*[None] * positional, **dict.fromkeys(keywords))


def test_the_prefill_module_binds_what_we_run_it_with():
    """It is made by a function, as one of several within it."""
    made = ast.parse(inspect.getsource(flashinfer.prefill.get_batch_prefill_module))
    (run,) = (node for node in ast.walk(made) if isinstance(node, ast.FunctionDef) and node.name == "paged_run")
    names = [arg.arg for arg in run.args.args]
    (given,) = (keywords for _, keywords in method_calls("run"))
    assert set(given) <= set(names)
    assert set(names[: len(names) - len(run.args.defaults)]) <= set(given)


def test_the_prefill_module_is_made_for_what_we_say():
    """The arguments go by position, through `*args`."""
    from flashinfer.jit.attention.modules import gen_batch_prefill_module

    tree = ast.parse(SOURCE.read_text())
    (call,) = (
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "get_batch_prefill_module"
    )
    assert list(inspect.signature(gen_batch_prefill_module).parameters)[: len(call.args)] == [
        "backend", "dtype_q", "dtype_kv", "dtype_o", "dtype_idx", "head_dim_qk", "head_dim_vo", "pos_encoding_mode",
        "use_sliding_window", "use_logits_soft_cap", "use_fp16_qk_reduction",
    ]  # fmt: skip


def test_fa3_reads_what_we_plan():
    """Its plan is where each of its columns begins, whose order and kind are those of the C++ source."""
    source = (Path(flashinfer.__file__).parent / "data/include/flashinfer/attention/scheduler.cuh").read_text()
    plan = source[source.index("struct PrefillPlanSM90Info") :]
    names = re.findall(r"(\w+) = vec\[\d\]", plan[: plan.index("template")])
    assert names == [
        "qo_tile_indices_offset", "qo_indptr_offset", "kv_indptr_offset", "qo_len_offset", "kv_len_offset",
        "head_indices_offset", "work_indptr_offset", "batch_indices_offset", "same_schedule_for_all_heads",
    ]  # fmt: skip
    made = source[source.index("inline cudaError_t PrefillSM90Plan") :]
    assert re.search(r"cta_tile_q = 128;\s+if \(head_dim_vo == 64\) \{\s+cta_tile_q = 192;", made)


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "spec",
    [AttnSpec(32, 8, 128), AttnSpec(32, 8, 128, kv="bf16"), AttnSpec(32, 8, 64), AttnSpec(9, 3, 64, kv="bf16")],
    ids=lambda spec: f"{spec.kv}-{spec.head_dim}",
)
@pytest.mark.parametrize(
    "sequences",
    [[(1, 1)], [(1000, 1000)], [(64, 5000)], [(130, 700), (1, 4097), (1000, 1000), (300, 2000)], [(40, 40)] * 200],
    ids=["one", "whole", "behind", "mixed", "many"],
)
def test_our_plan_gives_the_bits_that_flashinfers_own_gives(spec, sequences):
    from kernels.flashinfer import CACHE_DTYPE, Fa3Plans, attn_prefill_fa3

    case = prefill_case(spec, sequences, workspace_mb=64).make("cuda")
    queries, k_cache, v_cache, table, *_ = case.args
    out = case.outputs["out"]
    case.run(partial(attn_prefill_fa3, spec, prepared=Fa3Plans(spec)(*case.batch)))
    ours = out.clone()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "HND", backend="fa3"
    )
    new, total = (torch.tensor(column, dtype=torch.int32) for column in zip(*sequences, strict=True))
    pages = (total + spec.page - 1) // spec.page
    starts = [
        torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)]) for counts in (new, pages)
    ]
    sm_scale, k_scale, v_scale = (case.kwargs[name] for name in ("sm_scale", "k_scale", "v_scale"))
    dtype, is_e4m3 = CACHE_DTYPE[spec.kv], spec.kv == "e4m3"  # whose scale of the softmax fa3 takes as the queries'
    wrapper.plan(
        *starts, torch.cat([row[:count] for row, count in zip(table, pages.tolist(), strict=True)]),
        (total - 1) % spec.page + 1, spec.q_heads, spec.kv_heads, spec.head_dim, spec.page, causal=True,
        sm_scale=1.0 if is_e4m3 else sm_scale, q_data_type=dtype, kv_data_type=dtype, o_data_type=torch.bfloat16,
    )  # fmt: skip
    if is_e4m3:
        wrapper.run(to_e4m3(queries.float()), (k_cache, v_cache), sm_scale, k_scale, v_scale, out=out)
    else:
        wrapper.run(queries, (k_cache, v_cache), k_scale=k_scale, v_scale=v_scale, out=out)
    assert torch.equal(ours, out)


def method_calls(name):
    """Positional count and keywords of each call of a method of that name in kernels/flashinfer.py."""
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield len(node.args), [k.arg for k in node.keywords]


def test_per_tensor_products_are_open_to_every_architecture_we_name():
    from flashinfer.gemm import bmm_fp8

    assert all(bmm_fp8.is_backend_supported("cublas", cc) for cc in (89, 90, 100, 103, 120))
    assert not bmm_fp8.is_backend_supported("cutlass", 90)
