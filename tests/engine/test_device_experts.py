"""Mixtures of experts through the GPU's adapter, on the reference kernels: rounding, and where they end the model."""

import pytest
import torch

from engine.loader import load_engine
from kernels.cases import relative_error
from tests.engine.device_engines import device_engine, logits_of
from tests.engine.driving import answers, greedy, random_prompts, settings
from tests.engine.tiny_models import VOCAB, save_mxfp4, save_tiny

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(VOCAB, (9, 64, 100))


WHOLE_TILES = {"hidden_size": 128, "num_attention_heads": 4}


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "llama4"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    save_tiny(folder, request.param, **WHOLE_TILES)
    return folder


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.15), ("float8", 0.5)])
def test_rounded_formats_stay_near_float32(folder, dtype, bound):
    """A rounded row may be sent to another expert, which changes it altogether; wrong experts everywhere give 1.4."""
    expected = logits_of(device_engine(folder, "float32"), PROMPTS)
    error = relative_error(logits_of(device_engine(folder, dtype), PROMPTS), expected)
    assert 1e-4 < error < bound


def test_a_mixture_that_ends_the_model_or_not_gives_the_same(tmp_path):
    """Only the rows that sample go through the last layer, which has experts here or has none."""
    for dense in ([0], [2]):
        folder = tmp_path / str(dense[0])
        save_tiny(folder, "qwen3_moe", mlp_only_layers=dense)
        whole = answers(device_engine(folder), PROMPTS, greedy())
        assert answers(device_engine(folder, max_batched_tokens=70, max_num_seqs=2), PROMPTS, greedy()) == whole


def test_mxfp4_experts_stay_so_beside_bf16_rows_and_are_widened_for_float32(tmp_path):
    save_mxfp4(tmp_path, save_tiny(tmp_path, "gpt_oss", **WHOLE_TILES))
    expected = logits_of(device_engine(tmp_path, "float32"), PROMPTS)
    params = greedy()
    assert answers(device_engine(tmp_path), PROMPTS, params) == answers(
        load_engine(settings(model=str(tmp_path))), PROMPTS, params
    )
    for dtype, bound in (("bfloat16", 0.15), ("float8", 0.5)):
        engine = device_engine(tmp_path, dtype)
        layers = engine.runner.launcher.model._weights.layers  # type: ignore[attr-defined]
        assert all(layer.mlp.gate_up.dtype is torch.int16 for layer in layers)
        assert relative_error(logits_of(engine, PROMPTS), expected) < bound
