"""A draft model drafts its own greedy text, whatever became of a sequence, and changes no answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bench.models.transformers_oracle import greedy as oracle_greedy
from contracts.errors import ConfigError
from engine.cpu.draft_model import drafter as draft_model
from engine.engine import Engine
from engine.loader import load_engine
from tests.engine.driving import answers, greedy, random_prompts, settings
from tests.engine.speculative.judged_drafts import Judged, judge
from tests.engine.speculative.test_speculation import SAMPLINGS
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

LENGTHS = (1, 5, 16, 17, 40, 70)
MAX_TOKENS, DRAFT_TOKENS = 30, 3
LONGEST = 400
SMALLER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": LONGEST}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A smaller model of another family, with a wider embedding than its vocabulary needs."""
    folder = tmp_path_factory.mktemp("drafting")
    return folder, save_tiny(folder, "qwen2", vocab_size=VOCAB + 8, **SMALLER)


def engine_of(folder: Path, drafting: Path, **changes: Any) -> Engine:
    chosen: dict[str, Any] = {"draft_tokens": DRAFT_TOKENS, "adapts_drafts": False} | changes
    return load_engine(settings(model=str(folder), speculate=str(drafting), **chosen))


def its_text(model: PreTrainedModel, tokens: Sequence[int], count: int) -> list[int]:
    """Return its greedy text behind these tokens, of those that the target has, too."""
    text = list(tokens)
    for _ in range(count):
        text.append(int(model(torch.tensor([text])).logits[0, -1, :VOCAB].argmax()))
    return text[len(tokens) :]


def require_its_text(judged: Judged, model: PreTrainedModel) -> None:
    """Compare each draft that was noted with what transformers makes of the draft model."""
    assert judged.drafts
    with torch.inference_mode():
        for tokens, draft in judged.drafts.items():
            assert list(draft) == its_text(model, tokens, len(draft)), f"after {len(tokens)} tokens"


def test_it_drafts_its_own_text(target, drafting):
    """Over right and wrong drafts, in a batch, with prompts in chunks, and behind prefix hits."""
    folder, model = target
    prompts = random_prompts(VOCAB, LENGTHS)
    expected = [oracle_greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    engine = engine_of(folder, drafting[0], max_batched_tokens=48, max_mixed_tokens=16, max_num_seqs=4)
    judged = judge(engine, prompts, expected)
    for _ in range(2):
        judged.drafts.clear()
        assert answers(engine, prompts, greedy(MAX_TOKENS)) == expected
        assert sum(len(draft) == DRAFT_TOKENS for draft in judged.drafts.values()) > 40
        require_its_text(judged, drafting[1])
    assert engine.stats().prefix_hit_tokens > 0 < sum(engine.stats().num_accepted_by_place)


def test_a_model_that_drafts_for_itself_is_always_right(target):
    folder, model = target
    prompts = random_prompts(VOCAB, LENGTHS)
    engine = engine_of(folder, folder)
    assert answers(engine, prompts, greedy(MAX_TOKENS)) == [oracle_greedy(model, each, MAX_TOKENS) for each in prompts]
    stats = engine.stats()
    assert sum(stats.num_accepted_by_place) == stats.num_draft_tokens > 100


def test_preemption_loses_nothing_that_it_has_read(target, drafting):
    folder, model = target
    prompts = random_prompts(VOCAB, LENGTHS[:5])
    expected = [oracle_greedy(model, prompt, 100) for prompt in prompts]
    nbytes = 24 * load_engine(settings(model=str(folder))).layout.block_nbytes
    engine = engine_of(folder, drafting[0], kv_cache_nbytes=2 * nbytes)
    judged = judge(engine, prompts, expected)
    assert answers(engine, prompts, greedy(100)) == expected
    assert engine.stats().num_preemptions > 0
    require_its_text(judged, drafting[1])


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_answers_are_those_without_it(target, drafting, kind: str):
    folder, _ = target
    prompts, sampling = random_prompts(VOCAB, LENGTHS), greedy(24, **SAMPLINGS[kind])
    plain = answers(load_engine(settings(model=str(folder))), prompts, sampling)
    engine = engine_of(folder, drafting[0])
    assert answers(engine, prompts, sampling) == plain
    assert engine.stats().num_drafts > 0


def test_what_it_has_not_read_it_reads_in_steps(target, drafting, monkeypatch: pytest.MonkeyPatch):
    """A prompt that an answer without drafts left in the prefix cache is caught up with before drafts begin."""
    monkeypatch.setattr(draft_model, "MAX_UNREAD", 16)
    folder, model = target
    (prompt,) = random_prompts(VOCAB, [64])
    expected = oracle_greedy(model, prompt, 20)
    engine = engine_of(folder, drafting[0])
    assert answers(engine, [prompt], greedy(1, speculate=False)) == [expected[:1]]
    judged = judge(engine, [prompt], [expected])
    assert answers(engine, [prompt], greedy(20)) == [expected]
    drafted = [len(draft) for _, draft in sorted(judged.drafts.items(), key=lambda each: len(each[0]))]
    assert drafted[:2] == [0, 0] and DRAFT_TOKENS in drafted
    require_its_text(judged, drafting[1])


@pytest.mark.parametrize("family", ["gemma3", "llama4"])
def test_it_drafts_beside_a_model_with_windows(drafting, tmp_path: Path, family: str):
    model = save_tiny(tmp_path, family)
    prompts = random_prompts(VOCAB, LENGTHS)
    expected = [oracle_greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    engine = engine_of(tmp_path, drafting[0], max_batched_tokens=64)
    judged = judge(engine, prompts, expected)
    assert answers(engine, prompts, greedy(MAX_TOKENS)) == expected
    require_its_text(judged, drafting[1])


def test_tokens_that_it_lacks_are_read_as_another(target, tmp_path: Path):
    """The target's vocabulary is the wider one here."""
    save_tiny(tmp_path, "llama", vocab_size=VOCAB - 40, **SMALLER)
    prompt = [5, VOCAB - 1, VOCAB - 40, 7]
    expected = oracle_greedy(target[1], prompt, MAX_TOKENS)
    engine = engine_of(target[0], tmp_path)
    assert answers(engine, [prompt], greedy(MAX_TOKENS)) == [expected]
    assert engine.stats().num_drafts > 0


def test_a_draft_model_with_longrope_is_made_for_the_targets_context(target, tmp_path: Path):
    save_tiny(tmp_path, "phi3", **{**SMALLER, "max_position_embeddings": 1024})
    config = json.loads((tmp_path / "config.json").read_text())
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    rope = {"rope_type": "longrope", "short_factor": [1.0] * half, "long_factor": [2.0] * half, "rope_theta": 10000.0}
    config |= {"rope_parameters": rope | {"original_max_position_embeddings": 600}, "rope_scaling": None}
    config["original_max_position_embeddings"] = 600
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine, prompts = engine_of(target[0], tmp_path), random_prompts(VOCAB, LENGTHS)
    assert answers(engine, prompts, greedy(8)) == [oracle_greedy(target[1], prompt, 8) for prompt in prompts]


def test_its_shorter_context_ends_its_drafts_alone(target, drafting):
    folder, model = target
    (prompt,) = random_prompts(VOCAB, [390])
    expected = oracle_greedy(model, prompt, 30)
    engine = engine_of(folder, drafting[0])
    judged = judge(engine, [prompt], [expected])
    assert answers(engine, [prompt], greedy(30)) == [expected]
    beyond = [len(draft) for tokens, draft in judged.drafts.items() if len(tokens) >= LONGEST]
    assert beyond and not any(beyond)
    require_its_text(judged, drafting[1])


def test_one_that_can_not_draft_is_refused_by_the_name_of_the_field(target, tmp_path: Path):
    save_tiny(tmp_path, "llama", **SMALLER)
    file = tmp_path / "tokenizer.json"
    stored = json.loads(file.read_text())
    vocabulary = stored["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"vocabulary is another: token \d+ is '[ab]' there and '[ab]' in"):
        engine_of(target[0], tmp_path)
    with pytest.raises(ConfigError, match=r"speculate is '.*none\.gguf'"):
        engine_of(target[0], tmp_path / "none.gguf")
