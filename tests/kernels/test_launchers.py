"""What every implementation promises: nothing allocated, nothing read back by the host, one signature an operation."""

import ast
import importlib
import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest

import kernels
from kernels import catalog, specs

ROOT = Path(kernels.__file__).parent
TARGETS = sorted({impl.target for impl in catalog.IMPLS if impl.name != "reference"})
SYNCS = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero"}
ALLOCATES = {"empty", "zeros", "ones", "full", "rand", "randn", "tensor", "clone", "empty_like", "zeros_like"}


def called_names(function):
    return {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
    }


def functions(target):
    """The implementation and what it calls in its own file, Triton's and Gluon's kernels apart."""
    module, name = target.split(":")
    tree = ast.parse((ROOT.parent / (module.replace(".", "/") + ".py")).read_text())
    plain = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef) and not n.decorator_list}
    seen, todo = {}, [name]
    while todo:
        current = todo.pop()
        if current in plain and current not in seen:
            seen[current] = plain[current]
            todo += called_names(plain[current])
    return seen


@pytest.mark.parametrize("target", TARGETS)
def test_no_implementation_waits_for_the_device(target):
    for name, function in functions(target).items():
        assert not called_names(function) & SYNCS, f"{name} reads back to the host"


@pytest.mark.parametrize("target", TARGETS)
def test_no_implementation_allocates(target):
    made_once = {"unit"}  # a constant per device, made at the first call, outside of any capture
    for name, function in functions(target).items():
        if name not in made_once:
            assert not called_names(function) & ALLOCATES, f"{name} allocates"


def parameters(target):
    module, name = target.split(":")
    if "flashinfer" in module:
        return list_of(functions(target)[name])
    found = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
    return [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD], {
        p.name for p in found if p.kind is p.KEYWORD_ONLY
    }


def list_of(function):
    return [a.arg for a in function.args.args], {a.arg for a in function.args.kwonlyargs}


@pytest.mark.parametrize("op", catalog.ops())
def test_all_implementations_of_an_operation_take_the_same_arguments(op):
    oracle = next(impl for impl in catalog.IMPLS if (impl.op, impl.name) == (op, "reference"))
    positional, keywords = parameters(oracle.target)
    for impl in catalog.IMPLS:
        if impl.op == op:
            mine, optional = parameters(impl.target)
            assert mine == positional, impl.target
            assert optional >= keywords, f"{impl.target} lacks {keywords - optional}"


def test_what_prepares_a_batch_exists():
    for impl in catalog.IMPLS:
        if impl.prepare:
            module, name = impl.prepare.split(":")
            tree = ast.parse((ROOT.parent / (module.replace(".", "/") + ".py")).read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


SPEC_OF = {
    "attn_decode": specs.AttnSpec, "attn_decode_fused": specs.FusedAttnSpec, "attn_prefill": specs.AttnSpec,
    "gemm_fp8": specs.GemmSpec, "gemm_gate_up": specs.GateUpSpec, "gemm_w4": specs.W4Spec, "gemm_w8": specs.W8Spec,
    "moe_experts": specs.MoESpec, "mla_attention": specs.MLASpec,
}  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "defaults").glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_plan_is_of_an_implementation_and_a_spec_that_exist(path):
    """A field added to a spec changes its key, and plans under the old key would silently be lost."""
    for name, rows in json.loads(path.read_text()).items():
        target, key = name.split("|")
        op, impl = target.split("/")
        assert any((i.op, i.name, i.tunable) == (op, impl, True) for i in catalog.IMPLS), target
        assert [part.split("=")[0] for part in key.split(",")] == [f.name for f in fields(SPEC_OF[op])], name
        assert all(int(bucket) > 0 and plan for bucket, plan in rows.items())
