"""A model's layer for multi-token prediction drafts what it does in transformers, and changes no answer."""

from pathlib import Path
from typing import Any

import pytest

from bench.models.transformers_oracle import greedy as oracle_greedy
from checkpoint import open_checkpoint
from contracts.errors import ConfigError
from engine.engine import Engine
from engine.loader import load_engine
from engine.speculative.named_drafter import open_named_head
from tests.engine.driving import answers, greedy, random_prompts, settings
from tests.engine.speculative.judged_drafts import judge, require_formulas
from tests.engine.speculative.tiny_mtp import TinyMtp
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(VOCAB, (1, 5, 17, 60))
MAX_TOKENS = 20


def engine_of(folder: Path, **changes: Any) -> Engine:
    chosen: dict[str, Any] = {"speculate": "mtp", "draft_tokens": 3, "adapts_drafts": False} | changes
    return load_engine(settings(model=str(folder), **chosen))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_drafts_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Over right and wrong drafts, in a batch, with prompts in chunks, and behind prefix hits."""
    tiny = TinyMtp(tmp_path, family)
    expected = [oracle_greedy(tiny.model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    engine = engine_of(tmp_path, max_batched_tokens=48, max_mixed_tokens=16, max_num_seqs=3)
    judged = judge(engine, PROMPTS, expected)
    for _ in range(2):
        judged.drafts.clear()
        assert answers(engine, PROMPTS, greedy(MAX_TOKENS)) == expected
        assert len(judged.drafts) > 20
        require_formulas(judged, tiny)
    stats = engine.stats()
    assert stats.prefix_hit_tokens > 0 < sum(stats.num_accepted_by_place) < stats.num_draft_tokens


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_answers_are_those_without(tmp_path: Path, dtype: str) -> None:
    """Its own drafts, verified; after preemption, too, and with the log-probabilities of a prompt."""
    TinyMtp(tmp_path, "deepseek_v3")
    plain = load_engine(settings(model=str(tmp_path), dtype=dtype))
    wanted = greedy(40, prompt_logprobs=1)
    drafting = engine_of(tmp_path, dtype=dtype, kv_cache_nbytes=18 * plain.layout.block_nbytes)
    assert answers(drafting, PROMPTS, wanted) == answers(plain, PROMPTS, wanted)
    stats = drafting.stats()
    assert stats.num_preemptions > 0 < stats.num_drafts


def test_a_model_without_such_a_layer_says_so(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"speculate is 'mtp'; .* has 0 layers .*\(num_nextn_predict_layers\)"):
        engine_of(tmp_path)
    save_tiny(tmp_path, "glm4_moe")
    on_gpu, checkpoint = settings(device="cuda:0", speculate="suffix+mtp"), open_checkpoint(str(tmp_path))
    with pytest.raises(ConfigError, match=r"speculate is 'suffix\+mtp'; such a layer drafts on CPUs"):
        open_named_head(on_gpu, checkpoint)
    with pytest.raises(ConfigError, match=r"has no tensor of layer 3, the one for multi-token prediction"):
        engine_of(tmp_path)
