"""An embedding is transformers' last row behind the final norm, whatever runs beside it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from bench.models.transformers_oracle import oracle
from checkpoint import open_checkpoint
from contracts.errors import RequestError
from engine.cpu.native.loader import load_native_backend
from engine.engine import Engine
from engine.loader import load_device_engine, load_engine
from engine.model_loader.checkpoint_weights import open_weights
from kernels.cpu.native import load_kernels
from tests.engine.driving import answers, drain, greedy, random_prompts, request, settings
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

LENGTHS = (1, 5, 16, 17, 40, 70)
EMBEDDING = greedy(1, returns_embedding=True)


def embedded(engine: Engine, prompts: list[list[int]]) -> list[np.ndarray]:
    """Return the embeddings of prompts in one batch, beside an answer that wants none."""
    for index, prompt in enumerate(prompts):
        engine.submit(request(str(index), prompt, EMBEDDING))
    engine.submit(request("beside", [3, 4, 5], greedy(3)))
    firsts = [one for output in drain(engine) for one in output.sampled if one.token.index == 0]
    rows = {str(one.request_id): one.token.embedding for one in firsts}
    assert rows.pop("beside") is None
    return [np.frombuffer(rows[str(index)] or b"", "<f4") for index in range(len(prompts))]


def expected_of(folder: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    model = oracle(open_checkpoint(str(folder))).model
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy() for prompt in prompts]


def require_close(found: list[np.ndarray], expected: list[np.ndarray], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * float(np.abs(theirs).max()))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "granite", "gpt_oss"])
def test_embeddings_equal_transformers(tmp_path: Path, family: str) -> None:
    """In chunks, in a batch, and behind prefix hits; gains that are folded, or doubled as Granite's logits are."""
    save_tiny(tmp_path, family)
    prompts = random_prompts(VOCAB, LENGTHS)
    expected = expected_of(tmp_path, prompts)
    engine = load_engine(settings(model=str(tmp_path), max_batched_tokens=48, max_mixed_tokens=16, max_num_seqs=4))
    for _ in range(2):
        require_close(embedded(engine, prompts), expected, 1e-4)
    assert engine.stats().prefix_hit_tokens > 0


def test_the_native_kernels_give_the_same(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", hidden_size=128, intermediate_size=192)
    chosen, prompts = settings(model=str(tmp_path)), random_prompts(VOCAB, LENGTHS)
    checkpoint = open_checkpoint(str(tmp_path))
    backend = load_native_backend(
        chosen, checkpoint, open_weights(checkpoint), load_kernels(), 2, lambda *_: None, "float32"
    )
    require_close(embedded(Engine(chosen, checkpoint, backend), prompts), expected_of(tmp_path, prompts), 1e-3)


def test_a_batch_that_fails_gives_each_its_own_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "llama")
    engine, prompts = load_engine(settings(model=str(tmp_path))), random_prompts(VOCAB, LENGTHS)
    forward = engine.runner.forward

    def failing(pieces, *more):
        if len(pieces) > 1:
            raise RuntimeError("together they are too many")
        return forward(pieces, *more)

    monkeypatch.setattr(engine.runner, "forward", failing)
    require_close(embedded(engine, prompts), expected_of(tmp_path, prompts), 1e-4)


def test_a_gpu_refuses_them(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    chosen, checkpoint = settings(model=str(tmp_path), dtype="bfloat16"), open_checkpoint(str(tmp_path))
    engine = load_device_engine(chosen, checkpoint, lambda *_: None, device=torch.device("cpu"))
    with pytest.raises(RequestError, match="gives no embeddings: workers on CPUs do"):
        engine.submit(request("a", [3, 4], EMBEDDING))
    assert len(answers(engine, [[3, 4]], greedy(2))[0]) == 2


@pytest.mark.parametrize(("labels", "family"), [(1, "qwen3"), (3, "llama")])
def test_a_classifier_gives_transformers_logits_of_its_labels(tmp_path, labels, family):
    prompts = random_prompts(VOCAB, LENGTHS)
    config = save_tiny(tmp_path, family).config
    config.num_labels, config.pad_token_id = labels, 2
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    engine = load_engine(settings(model=str(tmp_path), max_batched_tokens=48))
    for index, prompt in enumerate(prompts):
        engine.submit(request(str(index), prompt, EMBEDDING))
    rows = {str(one.request_id): one.token.embedding or b"" for output in drain(engine) for one in output.sampled}
    with torch.inference_mode():
        expected = [
            model(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt))).logits[0] for prompt in prompts
        ]
    for index, logits in enumerate(expected):
        assert np.frombuffer(rows[str(index)], "<f4") == pytest.approx(logits.numpy(), abs=2e-5)
    with pytest.raises(RequestError, match="this model classifies texts, and writes none"):
        engine.submit(request("text", prompts[0], greedy(1)))
