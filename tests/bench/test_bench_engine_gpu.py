"""What bench.engine.gpu compares with, and the models it makes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.engine.gpu import (
    NUM_WARM,
    answering,
    flops_per_token,
    layer_weights,
    limit_ms,
    prefill_rate,
    random_requests,
)
from bench.models.random_model import LLAMA_8B, STORED, RandomWeights, random_checkpoint
from contracts.sampling import SamplingParams
from engine.cuda.model.number_formats import DEVICE_FORMATS
from engine.cuda.model.weight_loader import load_device_weights
from engine.loader import load_device_engine
from engine.settings import EngineSettings
from tests.engine.driving import answers

TINY = replace(
    LLAMA_8B, vocab_size=300, hidden_size=256, intermediate_size=512, num_layers=2, num_heads=8, num_kv_heads=4,
    head_dim=32, max_model_len=256,
)  # fmt: skip


def test_limits_are_those_of_the_design():
    assert limit_ms(LLAMA_8B, 1, 1088, "float8-head") == pytest.approx(1.70, abs=0.01)
    assert limit_ms(LLAMA_8B, 256, 1088, "float8-head") == pytest.approx(5.79, abs=0.01)
    assert limit_ms(LLAMA_8B, 1, 1088, "float8") == pytest.approx(1.82, abs=0.01)
    assert limit_ms(LLAMA_8B, 1, 1088, "bfloat16") == pytest.approx(3.41, abs=0.01)  # 15.0 GB and 0.14 of cache
    assert flops_per_token(LLAMA_8B, 0) == pytest.approx(2 * 6.98e9, rel=0.001)


def tiny_engine(dtype, quantization=None):
    settings = EngineSettings(dtype=dtype, kv_cache_nbytes=8 << 20, max_num_seqs=4, max_batched_tokens=128)
    device = torch.device("cpu")
    checkpoint = random_checkpoint("tiny", TINY, quantization)
    source = RandomWeights(TINY, device, quantization=quantization)
    return load_device_engine(settings, checkpoint, lambda *_: None, source, device)


def test_all_are_answered_within_and_gone_behind():
    engine = tiny_engine("float32")
    with answering(engine, random_requests(engine, [100, 60, 40], 4 * NUM_WARM)) as num_sampled:
        assert num_sampled >= 3
        assert len(engine.step().sampled) == engine.stats().num_running == 3
    assert not engine.has_work() and engine.stats().free_tokens == engine.capacity_tokens


def test_prompts_are_drawn_before_the_clock_starts(monkeypatch):
    engine, noted, draw = tiny_engine("bfloat16"), [], np.random.default_rng
    monkeypatch.setattr("numpy.random.default_rng", lambda seed: noted.append("drawn") or draw(seed))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    clock = SimpleNamespace(perf_counter=lambda: noted.append("clock") or float(len(noted)))
    monkeypatch.setattr("bench.engine.gpu.time", clock)
    assert prefill_rate(engine, 2, 10, 2) > 0
    assert noted == ["drawn", "clock", "clock"] * 2


@pytest.mark.parametrize("dtype", ["float8", "bfloat16"])
def test_a_model_of_random_weights_answers(dtype):
    engine = tiny_engine(dtype)
    sampling = SamplingParams(max_tokens=5, seed=0, temperature=0.0, ignore_eos=True)
    (tokens,) = answers(engine, [[1, 2, 3]], sampling)
    assert len(tokens) == 5
    assert all(0 <= token < TINY.vocab_size for token in tokens)


@pytest.mark.parametrize(
    ("stored", "recipe", "nbytes"),
    [("fp8-rows", "row", 1), ("fp8-blocks", "block128", 1), ("gptq", "int4", 0.5), ("awq", "int4", 0.5)],
)
def test_a_model_of_random_stored_weights_keeps_them(stored, recipe, nbytes):
    dtype, device = "int4" if recipe == "int4" else "float8", torch.device("cpu")
    source = RandomWeights(TINY, device, quantization=STORED[stored])
    weights = load_device_weights(TINY, source, DEVICE_FORMATS[dtype], 256, device, lambda *_: None)
    matrices = [matrix for layer in weights.layers for matrix in layer.matrices()]
    assert {matrix.recipe for matrix in matrices} == {recipe}
    if recipe == "int4":
        zeros = torch.cat([(m.scale & 15).flatten() for m in matrices if m.scale is not None]).unique()
        assert (len(zeros) == 1) == (stored == "gptq")
    assert sum(matrix.weight.nbytes for matrix in matrices) == nbytes * TINY.num_layers * layer_weights(TINY)
    sampling = SamplingParams(max_tokens=3, seed=0, temperature=0.0, ignore_eos=True)
    assert len(answers(tiny_engine(dtype, STORED[stored]), [[1, 2, 3]], sampling)[0]) == 3
    limit = limit_ms(LLAMA_8B, 1, 1024, stored)
    assert limit == pytest.approx({1: 1.8, 0.5: 1.1}[nbytes], abs=0.06)
