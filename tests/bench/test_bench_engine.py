"""What the engine's benchmarks count: bytes of weights, tokens of a rate, agreement of logits."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.engine import cpu as engine_bench
from bench.engine.agreement import (
    Gold,
    answers,
    compare,
    compare_llama_cpp,
    distance,
    gold,
    prompts,
    teacher_forced,
)
from bench.engine.cpu import _rows, decode, prefill, submit, weight_nbytes
from engine.cpu.linear import FORMATS
from engine.loader import load_engine
from tests.engine.driving import settings
from tests.engine.tiny_models import VOCAB, save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = save_tiny(folder, "llama")
    return folder, model, load_engine(settings(model=str(folder), prefix_cache=False))


@pytest.fixture(scope="module")
def golds(tiny):
    _, model, _ = tiny
    return gold(model, [list(range(5, 25)), list(range(40, 47))], 6)


def test_bytes_of_weights_are_those_of_the_matrices_that_a_step_reads(tiny):
    _, model, engine = tiny
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    head = model.get_output_embeddings().weight
    assert weight_nbytes(engine) == 4 * (sum(p.numel() for p in matrices) + head.numel())


def test_bytes_of_weights_are_those_of_the_format_that_answers_are_computed_in(tiny):
    _, model, _ = tiny
    head = model.get_output_embeddings().weight.numel()
    inner = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name)
    expected = {"float16": 2 * (inner + head), "int8": inner + head, "mixed4": inner * 5 // 8 + 2 * head}
    checkpoint = tiny[2].checkpoint
    for dtype, nbytes in expected.items():
        assert weight_nbytes(SimpleNamespace(checkpoint=checkpoint, dtype=dtype)) == nbytes  # type: ignore[arg-type]
    assert all(weight_nbytes(SimpleNamespace(checkpoint=checkpoint, dtype=dtype)) for dtype in FORMATS)  # type: ignore[arg-type]


def test_rates_count_every_token_once(tiny, monkeypatch):
    _, _, engine = tiny
    monkeypatch.setattr(engine_bench, "NUM_PROMPT", 40)
    monkeypatch.setattr(engine_bench, "NUM_DECODED", 5)
    seen = []
    monkeypatch.setattr(engine_bench, "_rate", lambda engine, tokens: seen.append(drain(engine, tokens)) or 1.0)
    decode(engine, 1)
    decode(engine, 3)
    prefill(engine)
    assert seen == [5, 15, 40]


def drain(engine, tokens) -> int:
    total = 0
    while engine.has_work():
        total += tokens(engine.step())
    return total


def test_submitted_prompts_are_the_same_each_time(tiny):
    _, _, engine = tiny
    found = []
    for _ in range(2):
        submit(engine, [7], 3)
        tokens = []
        while engine.has_work():
            tokens += [sampled.token.token_id for sampled in engine.step().sampled]
        found.append(tokens)
    assert found[0] == found[1] and len(found[0]) == 3


def test_rows_stand_beside_limit_and_peer():
    rates = {"decode": 80.0, "peer decode": 40.0, "streams": 500.0, "prefill": 2e3, "peer prefill": 1e3, "read": 44e9}
    rows = {row.name: row for row in _rows(rates, nbytes=11 * 10**8)}
    assert rows["decode, 1 stream"].limit == pytest.approx(40.0)
    assert rows["decode, 16 streams"].limit == pytest.approx(640.0)
    assert rows["decode, 16 streams"].peer_value == 40.0
    assert rows["memory read"].value == pytest.approx(44.0)


def test_the_benchmarks_prompts_differ():
    engine = load_engine(settings())
    made = prompts(engine, 64)
    assert len({tuple(prompt) for prompt in made}) == 64
    assert max(map(len, made)) > 100, "some are longer than a chunk"


def test_an_engine_in_float32_agrees_in_full(tiny, golds):
    folder, _, engine = tiny
    rows = {row.name: row.value for row in compare(engine, golds, str(folder))}
    assert 0 <= rows.pop("KL divergence from float32") < 1e-9
    assert set(rows.values()) == {1.0}


def test_a_wrong_model_is_seen(tiny, golds):
    _, _, engine = tiny
    wrong = [Gold(g.prompt, g.answer, torch.randn_like(g.logits) * 8) for g in golds]
    argmax, divergence = distance(wrong, teacher_forced(engine, wrong))
    assert argmax < 0.5 and divergence > 0.1


def test_llama_cpp_is_compared_along_the_same_answers(golds):
    asked = []

    class Peer:
        def forced_logits(self, prompt, answer):
            asked.append((prompt, answer))
            return golds[len(asked) - 1].logits.numpy() + (0 if len(asked) == 1 else np.eye(6, VOCAB, 3) * 9)

    argmax, divergence = compare_llama_cpp(Peer(), golds)  # type: ignore[arg-type]
    assert asked == [(gold.prompt, gold.answer) for gold in golds]
    assert argmax.params == divergence.params == {"dtype": "llama.cpp"}
    assert 0.5 <= argmax.value < 1 and divergence.value > 0.1


def test_answers_come_back_in_the_order_of_the_prompts(tiny, golds):
    _, _, engine = tiny
    assert answers(engine, golds[::-1]) == [gold.answer for gold in golds[::-1]]
