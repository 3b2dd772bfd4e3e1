"""EAGLE3 heads in the engine draft what the formulas say, whatever became of a sequence, and change no answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.models.transformers_oracle import greedy as oracle_greedy
from checkpoint import open_checkpoint
from contracts.errors import ConfigError
from engine.cpu.eagle3.head_rows import HeadRows
from engine.engine import Engine
from engine.loader import load_engine
from tests.engine.driving import answers, greedy, random_prompts, settings
from tests.engine.speculative.judged_drafts import judge, require_formulas
from tests.engine.speculative.test_speculation import SAMPLINGS
from tests.engine.speculative.tiny_heads import HEADS, ReferenceDrafts, save_head, specforge, speculators
from tests.engine.tiny_models import VOCAB

pytestmark = pytest.mark.slow

LENGTHS = (1, 5, 16, 17, 40, 70)
MAX_TOKENS, DRAFT_TOKENS = 30, 3


def engine_of(folder: Path, head: Path, **changes: Any) -> Engine:
    chosen: dict[str, Any] = {"draft_tokens": DRAFT_TOKENS, "adapts_drafts": False} | changes
    return load_engine(settings(model=str(folder), speculate=str(head), **chosen))


def count_writes(engine: Engine) -> list[int]:
    """Note how many slots each pass of the head writes behind which nothing is drafted."""
    drafter: Any = engine.speculator._proposer  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]
    written: list[int] = []
    write = drafter._head.write

    def counting(rows: HeadRows) -> None:
        written.append(len(rows.tokens_M))
        write(rows)

    drafter._head.write = counting
    return written


@pytest.mark.parametrize("kind", HEADS)
def test_each_kind_of_head_drafts_what_its_formulas_say(target, tmp_path: Path, kind: str):
    """Over right and wrong drafts, in a batch, with prompts in chunks, and behind prefix hits."""
    folder, model = target
    config = open_checkpoint(str(folder)).config
    stated = save_head(tmp_path, HEADS[kind], config)
    prompts = random_prompts(VOCAB, LENGTHS)
    expected = [oracle_greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    engine = engine_of(folder, stated, max_batched_tokens=48, max_mixed_tokens=16, max_num_seqs=4)
    reference = ReferenceDrafts(stated, config, model)
    judged = judge(engine, prompts, expected)
    for _ in range(2):
        judged.drafts.clear()
        assert answers(engine, prompts, greedy(MAX_TOKENS)) == expected
        assert len(judged.drafts) > 40
        require_formulas(judged, reference)
    assert engine.stats().prefix_hit_tokens > 0 < sum(engine.stats().num_accepted_by_place)


def test_preemption_restores_what_the_head_has_read(target, head: Path):
    folder, model = target
    prompts = random_prompts(VOCAB, LENGTHS[:5])
    expected = [oracle_greedy(model, prompt, 100) for prompt in prompts]
    nbytes = 24 * load_engine(settings(model=str(folder))).layout.block_nbytes
    engine = engine_of(folder, head, kv_cache_nbytes=nbytes)
    judged = judge(engine, prompts, expected)
    assert answers(engine, prompts, greedy(100)) == expected
    assert engine.stats().num_preemptions > 0
    reference = ReferenceDrafts(head, open_checkpoint(str(folder)).config, model)
    require_formulas(judged, reference)


@pytest.mark.parametrize("kind", ["greedy", "logprobs", "drawn", "penalised", "grammar"])
def test_answers_are_those_without_a_head(target, head: Path, kind: str):
    """Each kind of step; all that may be asked for is in the tests of speculation, whoever drafts."""
    folder, _ = target
    prompts, sampling = random_prompts(VOCAB, LENGTHS), greedy(24, **SAMPLINGS[kind])
    plain = answers(load_engine(settings(model=str(folder))), prompts, sampling)
    engine = engine_of(folder, head, adapts_drafts=kind == "greedy")
    assert answers(engine, prompts, sampling) == plain
    assert engine.stats().num_drafts > 0


def test_a_request_that_does_without_leaves_no_gap_for_those_behind(target, head: Path):
    """Nothing was guessed of the first answer, and what the head has read of it serves the second."""
    folder, model = target
    (prompt,) = random_prompts(VOCAB, [40])
    expected = oracle_greedy(model, prompt, 60)
    engine = engine_of(folder, head)
    written = count_writes(engine)
    assert answers(engine, [prompt], greedy(40, speculate=False)) == [expected[:40]]
    assert engine.stats().num_drafts == 0
    assert written == [39, 8, 16], "the prompt at once, then a pass for each block that ends"
    longer = prompt + expected[:38]
    judged = judge(engine, [longer], [expected[38:]])
    assert answers(engine, [longer], greedy(20)) == [expected[38:58]]
    reference = ReferenceDrafts(head, open_checkpoint(str(folder)).config, model)
    assert engine.stats().prefix_hit_tokens >= 64
    require_formulas(judged, reference)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        (speculators({"vocab_size": 319}), "vocab_size is 319, the target's is 320"),
        (speculators({"hidden_size": 64}), "hidden_size is 64, the target's rows have 96 columns"),
        (specforge(eagle_config={"eagle_aux_hidden_state_layer_ids": [2]}), "what comes out of the last layer"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_the_name_of_the_field(
    target, tmp_path: Path, stated: dict[str, Any], words: str
):
    (tmp_path / "config.json").write_text(json.dumps(stated))
    if "last layer" in words:
        save_head(tmp_path, stated, open_checkpoint(str(target[0])).config)
    with pytest.raises(ConfigError, match=words):
        engine_of(target[0], tmp_path)


def test_a_head_that_is_not_there_is_told(target, tmp_path: Path):
    with pytest.raises(ConfigError, match="is no EAGLE3 head"):
        engine_of(target[0], tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no head comes with this package for"):
        load_engine(settings(model=str(target[0]), speculate="eagle3"))
