"""Quantized checkpoints on a GPU: each layout against the reference kernels, and against what it stands for."""

import pytest
import torch

from kernels.cases import relative_error
from tests.engine.device_engines import engine_of, logits_of
from tests.engine.driving import answers, greedy, random_prompts
from tests.engine.quantized_models import LAYOUTS, LLAMA4_LAYOUTS, save_quantized, save_quantized_llama4
from tests.engine.tiny_models import VOCAB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = random_prompts(VOCAB, (5, 63, 64, 130))
KEPT = [name for name in LAYOUTS if name not in ("gptq-32", "gptq-act-order")]


@pytest.mark.parametrize(
    ("name", "family"), [*((name, "llama3") for name in KEPT), ("deepseek", "qwen3"), ("awq", "qwen2")]
)
def test_kernels_compute_what_the_reference_does_and_what_the_layout_stands_for(name, family, tmp_path):
    save_quantized(tmp_path, LAYOUTS[name], family)
    dtype = "int4" if name.startswith(("gptq", "awq")) else "float8"
    found = logits_of(engine_of(tmp_path, dtype), PROMPTS).cpu()
    reference = logits_of(engine_of(tmp_path, dtype, "cpu"), PROMPTS)
    widened = logits_of(engine_of(tmp_path, "float32", "cpu"), PROMPTS)
    errors = relative_error(found, reference), relative_error(found, widened)
    print(f"{name} {family}: {errors[0]:.4f} of the reference, {errors[1]:.4f} of the widened model")
    # Where it widens weights for cuBLAS the INT4 kernel rounds them once more; the reference does not.
    assert errors[0] < (0.15 if dtype == "float8" else 0.035)
    assert errors[1] < (0.3 if dtype == "float8" else 0.04)


@pytest.mark.parametrize("name", [*LLAMA4_LAYOUTS, "compressed-rows"])
def test_kernels_compute_what_the_reference_does_of_stored_experts(name, tmp_path):
    """Each row goes through all experts, or the only one: rounded otherwise, it might go to another."""
    if name in LLAMA4_LAYOUTS:
        save_quantized_llama4(tmp_path, LLAMA4_LAYOUTS[name], num_local_experts=1)
    else:
        save_quantized(tmp_path, LAYOUTS[name], "qwen3_moe", num_experts_per_tok=8)
    found = logits_of(engine_of(tmp_path, "float8"), PROMPTS).cpu()
    errors = [
        relative_error(found, logits_of(engine_of(tmp_path, dtype, "cpu"), PROMPTS)) for dtype in ("float8", "float32")
    ]
    print(f"{name} experts: {errors[0]:.4f} of the reference, {errors[1]:.4f} of the widened model")
    assert errors[0] < 0.15 and errors[1] < 0.3


@pytest.mark.parametrize("name", sorted(LLAMA4_LAYOUTS))
def test_widened_experts_of_llama4_answer_as_on_the_cpu(name, tmp_path):
    save_quantized_llama4(tmp_path, LLAMA4_LAYOUTS[name])
    expected = answers(engine_of(tmp_path, "float32", "cpu"), PROMPTS, greedy(12))
    assert answers(engine_of(tmp_path, "float32"), PROMPTS, greedy(12)) == expected


@pytest.mark.parametrize(
    "name", ["compressed-matrix", "deepseek", "gptq", "awq", "llama4-compressed", "llama4-modelopt"]
)
def test_captured_steps_answer_as_eager_ones(name, tmp_path, monkeypatch):
    if name in LLAMA4_LAYOUTS:
        save_quantized_llama4(tmp_path, LLAMA4_LAYOUTS[name])
    else:
        save_quantized(tmp_path, LAYOUTS[name])
    dtype = "int4" if name in ("gptq", "awq") else "float8"
    captured = answers(engine_of(tmp_path, dtype), PROMPTS, greedy(24))
    monkeypatch.setattr("engine.cuda.graphs.decode_graphs.DecodeGraphs.capture", lambda *_: None)
    assert answers(engine_of(tmp_path, dtype), PROMPTS, greedy(24)) == captured


def test_widened_weights_answer_as_on_the_cpu(tmp_path):
    save_quantized(tmp_path, LAYOUTS["gptq-act-order"])
    expected = answers(engine_of(tmp_path, "float32", "cpu"), PROMPTS, greedy(12))
    assert answers(engine_of(tmp_path, "float32"), PROMPTS, greedy(12)) == expected
