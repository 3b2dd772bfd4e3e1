"""Mixtures of experts on the CPU: what their answers do not depend on, and which configurations are refused."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from bench.models.transformers_oracle import greedy as oracle_greedy
from engine.cpu.expert_router import ExpertRouter
from engine.cpu.linear import FORMATS
from engine.cpu.mlp import GatedMlp
from engine.cpu.moe import CpuMoE
from engine.loader import load_engine
from models.config import Experts
from tests.engine.driving import answers, greedy, needs_bfloat16, random_prompts, scored, settings
from tests.engine.tiny_models import VOCAB, save_mxfp4, save_tiny

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(VOCAB, (1, 5, 17, 40, 150))
COUNT, HIDDEN, INNER = 6, 32, 64


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "llama4"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    save_tiny(folder, request.param)
    return folder


def random_weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((COUNT, HIDDEN), (COUNT, 2 * INNER, HIDDEN), (COUNT, HIDDEN, INNER))
    router, gate_up, down = (torch.randn(shape, generator=generator) / 4 for shape in shapes)
    return router, gate_up, down


def mixture(config: Experts, dtype: str) -> CpuMoE:
    router, gate_up, down = random_weights()
    made = FORMATS[dtype]
    experts = [GatedMlp(made.pack(first), made.pack(second)) for first, second in zip(gate_up, down, strict=True)]
    return CpuMoE(ExpertRouter(config, made.router(router, None)), experts)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, COUNT])
def test_a_row_is_the_weighted_sum_of_its_experts(top_k, renormalize):
    x = torch.randn(19, HIDDEN)
    router, gate_up, down = random_weights()
    scores = (x @ router.T).softmax(-1)
    expected = torch.zeros_like(x)
    for row in range(len(x)):
        chosen = scores[row].argsort(descending=True)[:top_k]
        total = scores[row, chosen].sum() if renormalize else 1.0
        for expert in chosen:
            gate, up = (gate_up[expert] @ x[row]).chunk(2)
            expected[row] += scores[row, expert] / total * (down[expert] @ (F.silu(gate) * up))
    found = mixture(Experts(COUNT, top_k, INNER, renormalize), "float32")(x, 4)
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    "dtype", ["float16", *(pytest.param(dtype, marks=needs_bfloat16) for dtype in ("mixed16", "bfloat16"))]
)
def test_a_row_of_a_mixture_keeps_its_bits_in_any_company(dtype):
    x, made = torch.randn(40, HIDDEN), mixture(Experts(COUNT, 2, INNER, True), dtype)
    together = made(x, 40)
    for first, last in ((0, 1), (3, 4), (5, 11), (7, 40)):
        assert torch.equal(made(x[first:last], last - first), together[first:last])


@pytest.mark.parametrize(
    ("folder", "dtype"),
    [
        ("qwen3_moe", "float16"),
        pytest.param("qwen3_moe", "bfloat16", marks=needs_bfloat16),
        ("gpt_oss", "int8"),
        pytest.param("gpt_oss", "mixed16", marks=needs_bfloat16),
        pytest.param("llama4", "mixed16", marks=needs_bfloat16),
    ],
    indirect=["folder"],
)
def test_answers_do_not_depend_on_the_batch_or_the_chunks(folder, dtype):
    whole = load_engine(settings(model=str(folder), dtype=dtype))
    together = answers(whole, PROMPTS, greedy())
    assert [answers(whole, [prompt], greedy())[0] for prompt in PROMPTS] == together
    chunked = load_engine(settings(model=str(folder), dtype=dtype, max_batched_tokens=48, max_num_seqs=3))
    assert answers(chunked, PROMPTS, greedy()) == together


def test_auto_serves_a_mixture(folder):
    engine = load_engine(settings(model=str(folder), dtype="auto"))
    assert [len(answer) for answer in answers(engine, PROMPTS, greedy())] == [12] * len(PROMPTS)


def test_mxfp4_experts_are_what_their_table_says(tmp_path):
    model = save_tiny(tmp_path, "gpt_oss")
    plain = [oracle_greedy(model, prompt, 12) for prompt in PROMPTS]
    save_mxfp4(tmp_path, model)
    expected = [oracle_greedy(model, prompt, 12) for prompt in PROMPTS]
    assert answers(load_engine(settings(model=str(tmp_path))), PROMPTS, greedy()) == expected != plain


@pytest.mark.parametrize("changes", [{"sliding_window": 41}, {"rope_parameters": {"factor": 8.5}}, {"sinks": 0.5}])
def test_a_little_of_what_sets_gpt_oss_apart_shows(tmp_path, changes):
    """A window of one token more, another scaling of rope, sinks moved by a half."""
    save_tiny(tmp_path, "gpt_oss")
    before = scored(tmp_path, PROMPTS[-1])
    if "sinks" in changes:
        tensors = load_file(tmp_path / "model.safetensors")
        moved = {name: tensor + 0.5 * name.endswith("sinks") for name, tensor in tensors.items()}
        save_file(moved, tmp_path / "model.safetensors")
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        for key, value in changes.items():
            config[key] = config[key] | value if isinstance(value, dict) else value
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert np.abs(np.array(scored(tmp_path, PROMPTS[-1])) - before).max() > 1e-3
