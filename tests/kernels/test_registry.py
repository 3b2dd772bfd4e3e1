"""Selection is a pure function of capabilities and spec: checked with machines that are not here."""

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import catalog
from kernels.caps import Caps, detect, missing
from kernels.plans import PlanTable, TunedPlans, TuningRefused, cache_path, decode, encode, load, save
from kernels.registry import Impl, NoImplementation, Registry, parse_override
from kernels.specs import (
    AttnSpec,
    FusedAttnSpec,
    GateUpSpec,
    GemmSpec,
    MoESpec,
    MoveSpec,
    NormSpec,
    QuantSpec,
    W4Spec,
    W8Spec,
)
from kernels.triton.relaunch import BatchLaunches

pytestmark = pytest.mark.slow

FULL: dict[str, Any] = dict(torch=(2, 11, 0), triton=(3, 6, 0), flashinfer=(0, 6, 13), flashinfer_jit=True)
MACHINES = {
    "cpu": Caps("cpu", torch=(2, 13, 0), triton=(3, 7, 1)),
    "ada": Caps("cuda", 89, "L40S", 142, **FULL),
    "h200": Caps("cuda", 90, "NVIDIA H200", 132, **FULL),
    "b200": Caps("cuda", 100, "NVIDIA B200", 148, **FULL, flashinfer_cubins=True),
    "b300": Caps("cuda", 103, "NVIDIA B300", 148, **FULL),
    "rtx": Caps("cuda", 120, "RTX PRO 6000", 188, **FULL),
    "bare h200": Caps("cuda", 90, "NVIDIA H200", 132, torch=(2, 11, 0)),
}
LLAMA = AttnSpec(32, 8, 128)
SKINNY = GemmSpec(6144, 4096, parts=2, skinny=True)


@pytest.mark.parametrize(
    ("op", "spec", "expected"),
    [
        ("attn_decode", LLAMA, "cpu:reference ada:flashinfer h200:triton b200:triton b300:triton rtx:triton"),
        ("attn_prefill", LLAMA, "cpu:reference ada:reference h200:fa3 b200:flashinfer b300:triton rtx:triton"),
        ("gemm_fp8", SKINNY, "cpu:reference h200:hopper b200:blackwell b300:blackwell rtx:triton_skinny"),
        ("gemm_fp8", GemmSpec(4096, 4096), "cpu:reference ada:torch h200:torch b200:torch rtx:torch"),
        ("gemm_fp8", GemmSpec(4096, 4096, "block128"), "ada:reference h200:torch b200:triton rtx:triton"),
        ("gemm_gate_up", GateUpSpec(28672, 4096), "h200:hopper b200:blackwell rtx:triton"),
        ("gemm_gate_up", GateUpSpec(28672, 4096, "token"), "h200:reference rtx:reference"),
        ("gemm_w4", W4Spec(4096, 4096), "cpu:reference h200:triton rtx:triton"),
        ("gemm_w8", W8Spec(960, 576), "cpu:reference ada:reference h200:triton b200:triton rtx:triton"),
        ("add_rmsnorm_quant", NormSpec(4096), "cpu:reference ada:reference h200:triton"),
    ],
)
def test_each_machine_gets_what_it_can_run(op, spec, expected):
    for pair in expected.split():
        machine, name = pair.split(":")
        assert catalog.registry(MACHINES[machine]).resolve(op, spec).impl.name == name, machine


@pytest.mark.parametrize(
    ("op", "spec", "impl", "machine", "words"),
    [
        ("attn_prefill", AttnSpec(64, 8, 64, sinks=True), "fa3", "h200", "ignores sinks"),
        ("attn_prefill", AttnSpec(32, 8, 128, lse=True), "fa3", "h200", "LSE"),
        ("attn_prefill", AttnSpec(32, 8, 96), "fa3", "h200", "head_dim 64, 128 or 256"),
        ("attn_prefill", AttnSpec(32, 8, 128, kv="fp32"), "fa3", "h200", "e4m3 or bf16"),
        ("attn_prefill", LLAMA, "fa3", "b200", "compute capability 9.0"),
        ("attn_prefill", LLAMA, "fa3", "bare h200", "flashinfer is not installed"),
        ("attn_prefill", LLAMA, "fa3", "cpu", "needs a CUDA device"),
        ("attn_prefill", LLAMA, "flashinfer", "b300", "flashinfer-cubin is not installed"),
        ("attn_decode", AttnSpec(32, 8, 128, page=48), "flashinfer", "h200", "pages of 16 to 128"),
        ("attn_decode", AttnSpec(32, 8, 80), "triton", "h200", "head size that is a power of two"),
        ("attn_decode_fused", FusedAttnSpec(32, 8, 128, quant="token"), "triton", "h200", "not the whole token"),
        ("attn_decode_fused", FusedAttnSpec(34, 2, 128), "triton", "h200", "16 query heads per KV head"),
        ("gemm_fp8", GemmSpec(100, 4096, skinny=True), "hopper", "h200", "n in steps of 64"),
        ("gemm_fp8", GemmSpec(64, 2900, parts=3, skinny=True), "hopper", "h200", "k in steps of 64"),
        ("gemm_fp8", GemmSpec(64, 704, "group", parts=2, skinny=True), "hopper", "h200", "k in steps of 128"),
        ("gemm_fp8", GemmSpec(64, 704, "tensor", skinny=True), "hopper", "h200", "no tensor scales"),
        ("gemm_fp8", GemmSpec(4096, 4096, "block128", skinny=True), "blackwell", "b200", "rescales at the end only"),
        ("gemm_fp8", GemmSpec(4096, 4096, parts=2), "torch", "h200", "does not split along k"),
        ("gemm_fp8", GemmSpec(4096, 4096, "block128"), "torch", "b200", "128-block scales"),
        ("gemm_fp8", GemmSpec(4096, 4096, "group", skinny=True), "blackwell", "b200", "rescales at the end only"),
        ("gemm_w4", W4Spec(100, 4096), "triton", "h200", "n in steps of 64"),
        ("gemm_w4", W4Spec(64, 192), "triton", "h200", "k in steps of 128"),
        ("moe_experts", MoESpec(8, 2, 100, 64), "triton", "h200", "hidden and inter in steps of 64"),
        ("kv_pack", MoveSpec(2, 1000), "triton", "h200", "units in steps of 4096 bytes"),
        ("add_rmsnorm_quant", NormSpec(4096, "token"), "flashinfer", "h200", "one static scale"),
        ("add_rmsnorm_quant", NormSpec(4096, "tensor", biased=True), "flashinfer", "h200", "one addend"),
    ],
)
def test_a_reason_against_names_what_is_wrong(op, spec, impl, machine, words):
    registry = catalog.registry(MACHINES[machine])
    found = next(i for i in registry.of(op) if i.name == impl)
    assert words in (registry.reason_against(found, spec) or "")


def test_fa3_plans_a_batch_on_the_host_and_triton_chooses_its_launches_once_a_batch():
    registry = catalog.registry(MACHINES["h200"], override={"attn_prefill": "triton"})
    batches = [registry.preparer("attn_prefill", LLAMA)(None, [3], [9]) for _ in range(2)]
    assert all(isinstance(batch, BatchLaunches) for batch in batches) and batches[0] is not batches[1]
    assert [impl.name for impl in catalog.IMPLS if impl.prepare] == ["fa3", "triton"]
    assert registry.preparer("argmax", QuantSpec(64, "none"))(None, [3], [9]) is None


def test_a_preparer_is_made_for_the_spec_and_called_with_the_batch():
    impl = Impl("op", "one", 1, lambda caps, spec: None, "x:y", prepare="tests.kernels.test_registry:Plans2")
    preparer = Registry((impl,), MACHINES["cpu"]).preparer("op", LLAMA)
    assert preparer("table", [1], [2]) == (LLAMA, "table", [1], [2])


class Plans2:
    def __init__(self, spec):
        self.spec = spec

    def __call__(self, *batch):
        return (self.spec, *batch)


def test_a_choice_is_made_once_and_again_after_an_exclusion():
    registry = catalog.registry(MACHINES["h200"])
    assert registry.resolve("attn_prefill", LLAMA) is registry.resolve("attn_prefill", LLAMA)
    registry.exclude("attn_prefill", "fa3", "failed the self-check: error 1e+00")
    assert registry.resolve("attn_prefill", LLAMA).impl.name == "triton"
    assert dict(registry.resolve("attn_prefill", LLAMA).rejected)["fa3"].startswith("failed the self-check")


def unbuildable(monkeypatch, error):
    """A FlashInfer that is installed, and raises this."""
    builds = []

    def fa3_module(spec):
        builds.append(spec)
        raise error

    monkeypatch.setitem(sys.modules, "kernels.flashinfer", SimpleNamespace(fa3_module=fa3_module))
    return builds


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("JIT compilation is disabled via FLASHINFER_DISABLE_JIT"), "disabled via FLASHINFER_DISABLE_JIT"),
        (RuntimeError("Ninja build failed. Output:\nnvcc fatal"), r"RuntimeError: Ninja build failed. Output:\)"),
        (FileNotFoundError(2, "No such file or directory", "ninja"), "No such file or directory: 'ninja'"),
        (PermissionError(13, "Permission denied", "/.cache"), "Permission denied: '/.cache'"),
    ],
)
def test_what_flashinfer_cannot_build_is_passed_over_with_one_warning(monkeypatch, caplog, error, words):
    builds, registry = unbuildable(monkeypatch, error), catalog.registry(MACHINES["h200"])
    for _ in range(2):
        assert registry.built("attn_prefill", LLAMA).name == "triton"
        assert registry.get("attn_prefill", LLAMA).func.__module__ == "kernels.triton.attn_prefill"
        assert isinstance(registry.preparer("attn_prefill", LLAMA)(None, [3], [9]), BatchLaunches)
    (warning,) = caplog.messages
    assert re.search(words, warning) and warning.startswith("attn_prefill runs as triton") and "nvcc" in warning
    assert len(builds) == 1
    assert "flashinfer cannot build or load it" in registry.explain()


def test_a_flashinfer_that_cannot_be_imported_is_passed_over(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "kernels.flashinfer", None)
    assert catalog.registry(MACHINES["h200"]).built("attn_prefill", LLAMA).name == "triton"
    assert "ModuleNotFoundError" in caplog.text


def test_what_was_asked_for_and_cannot_be_built_is_refused(monkeypatch):
    unbuildable(monkeypatch, RuntimeError("Could not find nvcc"))
    registry = catalog.registry(MACHINES["h200"], override={"attn_prefill": "fa3"})
    with pytest.raises(NoImplementation, match=r"fa3: .*Could not find nvcc; .*triton: the setting asks for fa3"):
        registry.get("attn_prefill", LLAMA)


def test_an_implementation_is_built_before_it_is_taken(monkeypatch):
    built = []
    monkeypatch.setitem(sys.modules, "kernels.flashinfer", SimpleNamespace(fa3_module=built.append))
    assert catalog.registry(MACHINES["h200"]).built("attn_prefill", LLAMA).name == "fa3"
    assert built == [LLAMA]


def test_without_triton_a_gpu_falls_back_to_torch_and_the_reference():
    registry = catalog.registry(MACHINES["bare h200"])
    assert registry.resolve("gemm_fp8", GemmSpec(4096, 4096)).impl.name == "torch"
    assert registry.resolve("attn_decode", LLAMA).impl.name == "reference"
    assert "triton is not installed: pip install triton" in missing(MACHINES["bare h200"])


def test_explain_says_why_each_other_was_passed_over():
    registry = catalog.registry(MACHINES["rtx"])
    registry.resolve("gemm_fp8", SKINNY)
    text = registry.explain()
    assert "gemm_fp8" in text and "triton_skinny" in text
    assert "not hopper: uses wgmma, which only compute capability 9.0 has" in text


def test_override_and_exclusion_change_the_choice():
    registry = catalog.registry(MACHINES["h200"], override=parse_override("gemm_fp8=triton_skinny", catalog.ops()))
    assert registry.resolve("gemm_fp8", SKINNY).impl.name == "triton_skinny"
    registry = catalog.registry(MACHINES["h200"])
    assert registry.resolve("gemm_fp8", SKINNY).impl.name == "hopper"
    registry.exclude("gemm_fp8", "hopper", "failed the self-check: error 1e+00")
    assert registry.resolve("gemm_fp8", SKINNY).impl.name == "triton_skinny"
    assert "failed the self-check" in registry.explain()


def test_override_of_an_unknown_operation_is_refused():
    with pytest.raises(ValueError, match="unknown operation in the kernel setting: gemm"):
        parse_override("gemm=torch", catalog.ops())


def test_no_implementation_lists_every_reason():
    impl = Impl("op", "one", 1, lambda caps, spec: "never", "x:y")
    with pytest.raises(NoImplementation, match="one: never"):
        Registry((impl,), MACHINES["cpu"]).resolve("op", NormSpec(1))


def test_every_operation_has_a_reference_and_every_target_exists_as_text():
    for op in catalog.ops():
        names = [impl.name for impl in catalog.IMPLS if impl.op == op]
        assert "reference" in names and len(names) == len(set(names)), op


def test_importing_the_package_pulls_in_neither_triton_nor_flashinfer():
    code = (
        "import sys; sys.modules['triton'] = None; sys.modules['flashinfer'] = None\n"
        "import kernels, kernels.caps, kernels.catalog, kernels.selfcheck\n"
        "from kernels.specs import NormSpec\n"
        "r = kernels.catalog.registry(kernels.caps.Caps('cpu'))\n"
        "r.get('add_rmsnorm_quant', NormSpec(64)); print(r.explain()); print(kernels.__version__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "not triton: needs a CUDA device" in done.stdout and done.stdout.endswith("0.0.0\n")


def test_detect_describes_this_machine():
    caps = detect("cpu")
    assert caps.device == "cpu" and caps.torch >= (2, 11)
    assert any("no CUDA device" in line for line in missing(caps))


@given(st.dictionaries(st.integers(1, 4096), st.just({}), max_size=6), st.integers(1, 5000))
def test_a_plan_is_of_the_smallest_bucket_that_holds(rows, tokens):
    table = PlanTable({bucket: {"bucket": bucket} for bucket in rows})
    picked = table.pick(tokens, {"bucket": None})["bucket"]
    holding = [bucket for bucket in rows if bucket >= tokens]
    assert picked == (min(holding) if holding else max(rows) if rows else None)


def test_tuned_plans_are_read_as_they_were_written(tmp_path):
    card = MACHINES["h200"]
    path = cache_path(tmp_path, card)
    assert path != cache_path(tmp_path, MACHINES["rtx"])
    assert load(path, card) == TunedPlans(), "nothing was tuned"
    plans = TunedPlans({"gemm_fp8|x": {8: {"bw": 64}}})
    save(path, plans, card)
    assert load(path, card) == plans == decode(encode(plans))
    assert load(path, card).table("gemm_fp8", "x", 90).pick(5, {}) == {"bw": 64}


@pytest.mark.parametrize(
    "text", ["{ damaged", "[]", "{}", '{"made_for": 1, "plans": {}}', '{"made_for": {}, "plans": {"a": 1}}',
             '{"made_for": {}, "plans": {"a": {"x": {}}}}'],
)  # fmt: skip
def test_a_damaged_file_of_plans_is_refused_in_words(tmp_path, text):
    path = cache_path(tmp_path, MACHINES["h200"])
    path.write_text(text)
    with pytest.raises(TuningRefused, match=r"is damaged .* run python -m kernels.tune again"):
        load(path, MACHINES["h200"])


def test_tuned_plans_overlay_the_shipped_defaults():
    key = SKINNY.key()
    assert TunedPlans().table("gemm_fp8/hopper", key, 90).pick(8, {})["stages"] == 5
    assert (
        TunedPlans({f"gemm_fp8/hopper|{key}": {8: {"stages": 9}}})
        .table("gemm_fp8/hopper", key, 90)
        .pick(8, {})["stages"]
        == 9
    )
