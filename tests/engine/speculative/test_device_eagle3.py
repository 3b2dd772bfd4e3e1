"""EAGLE3 heads in the GPU's adapter draft what the formulas say; on the reference kernels, and on a GPU."""

from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.models.transformers_oracle import greedy as oracle_greedy
from checkpoint import open_checkpoint
from contracts.errors import ConfigError
from engine.engine import Engine
from engine.sequence import Sequence
from engine.speculative.proposer import Draft, Proposer
from tests.engine.device_engines import FUSIBLE, device_engine, engine_of
from tests.engine.driving import answers, greedy, random_prompts
from tests.engine.speculative.drafting import KnowingProposer
from tests.engine.speculative.test_speculation import SAMPLINGS
from tests.engine.speculative.tiny_heads import HEADS, ReferenceDrafts, save_head, speculators
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

LENGTHS = (1, 5, 63, 64, 65, 130)
MAX_TOKENS, DRAFT_TOKENS = 30, 3
ONE_LAYER = [kind for kind in HEADS if kind != "two layers"]
LARGER = speculators(
    {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
)
"""A head beside the model of FUSIBLE."""
WIDE = 2112
"""More columns than a product of few FP8 rows adds up in one part."""


def drafting(folder: Path, head: Path, **changes: Any) -> Engine:
    chosen: dict[str, Any] = {"draft_tokens": DRAFT_TOKENS, "adapts_drafts": False} | changes
    return device_engine(folder, speculate=str(head), **chosen)


class TakingTurns:
    """Every other draft is a known one, three in four of its tokens right; the others are the head's."""

    def __init__(self, head: Proposer) -> None:
        self._head, self._known, self._turn = head, KnowingProposer(), 0

    def propose(self, sequences: SequenceOf[Sequence], num_tokens: SequenceOf[int]) -> list[Draft]:
        self._turn += 1
        return (self._head if self._turn % 2 else self._known).propose(sequences, num_tokens)

    def end_sequence(self, sequence: Sequence) -> None:
        self._head.end_sequence(sequence)


def note_drafts(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> dict[tuple[int, ...], Draft]:
    """Have known drafts take turns with the head's, of which each is noted behind its text as it is verified."""
    KnowingProposer.answers = dict(zip(map(tuple, prompts), expected, strict=True))
    speculator: Any = engine.speculator
    speculator._proposer = TakingTurns(speculator._proposer)
    noted: dict[tuple[int, ...], Draft] = {}
    record = speculator.record_draft

    def noting(sequence: Sequence, draft: Draft, num_accepted: int) -> None:
        if draft.strength == 1:  # a known one has none
            noted[tuple(sequence.tokens[: len(sequence.tokens) - 1 - num_accepted])] = draft
        record(sequence, draft, num_accepted)

    speculator.record_draft = noting
    return noted


def count_right(noted: dict[tuple[int, ...], Draft], reference: ReferenceDrafts) -> int:
    """Return how many drafts are what the formulas say."""
    return sum(list(draft.token_ids) == reference.after(tokens, len(draft)) for tokens, draft in noted.items())


@pytest.mark.parametrize("kind", ONE_LAYER)
def test_each_kind_of_head_drafts_what_its_formulas_say(target, tmp_path: Path, kind: str):
    """Drafts follow right and wrong ones, in a batch, with prompts in chunks, and behind prefix hits."""
    folder, model = target
    config = open_checkpoint(str(folder)).config
    stated = save_head(tmp_path, HEADS[kind], config)
    prompts = random_prompts(VOCAB, LENGTHS)
    expected = [oracle_greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    engine = drafting(folder, stated, max_batched_tokens=80, max_mixed_tokens=66, max_num_seqs=4)
    noted = note_drafts(engine, prompts, expected)
    reference = ReferenceDrafts(stated, config, model)
    for _ in range(2):
        noted.clear()
        assert answers(engine, prompts, greedy(MAX_TOKENS)) == expected
        assert count_right(noted, reference) == len(noted) > 20
    assert engine.stats().prefix_hit_tokens > 0 < sum(engine.stats().num_accepted_by_place)


def test_preemption_restores_what_the_head_has_read(target, head: Path):
    folder, model = target
    prompts = random_prompts(VOCAB, (60, 60, 60))
    expected = [oracle_greedy(model, prompt, 100) for prompt in prompts]
    nbytes = 7 * device_engine(folder).layout.block_nbytes
    engine = drafting(folder, head, kv_cache_nbytes=nbytes, max_model_len=256)
    noted = note_drafts(engine, prompts, expected)
    assert answers(engine, prompts, greedy(100)) == expected
    assert engine.stats().num_preemptions > 0
    reference = ReferenceDrafts(head, open_checkpoint(str(folder)).config, model)
    assert count_right(noted, reference) == len(noted) > 20


@pytest.mark.parametrize("kind", ["greedy", "logprobs", "drawn", "penalised", "grammar"])
def test_answers_are_those_without_a_head(target, head: Path, kind: str):
    """Each kind of step; all that may be asked for is in the tests of speculation, whoever drafts."""
    folder, _ = target
    prompts, sampling = random_prompts(VOCAB, LENGTHS), greedy(24, **SAMPLINGS[kind])
    plain = answers(device_engine(folder), prompts, sampling)
    engine = drafting(folder, head, adapts_drafts=kind == "greedy")
    assert answers(engine, prompts, sampling) == plain
    assert engine.stats().num_drafts > 0


def test_a_step_that_drafts_is_known_before_the_next(target, head: Path):
    """Every draft that is verified has tokens of the model's vocabulary by then."""
    folder, _ = target
    (prompt,) = random_prompts(VOCAB, [20])
    engine = drafting(folder, head)
    noted = note_drafts(engine, [prompt], [[]])
    answers(engine, [prompt], greedy(20))
    assert noted and all(0 <= token < VOCAB for draft in noted.values() for token in draft.token_ids)


def test_a_batch_that_fails_changes_no_answer(target, head: Path, monkeypatch):
    """Its chunks are computed one by one, and what the head has not read it does not see."""
    folder, model = target
    prompts = random_prompts(VOCAB, (20, 62))
    expected = [oracle_greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    engine = drafting(folder, head)
    noted = note_drafts(engine, prompts, expected)
    runner: Any = engine.runner
    launch, steps = runner.launcher.launch, 0

    def failing(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise RuntimeError("out of memory")
        return launch(*arguments)

    monkeypatch.setattr(runner.launcher, "launch", failing)
    assert answers(engine, prompts, greedy(MAX_TOKENS)) == expected
    assert steps > 5 and len(noted) > 5


def test_long_drafts_are_padded_to_a_few_lengths(target, head: Path):
    folder, model = target
    prompts = random_prompts(VOCAB, (20, 60))
    expected = [oracle_greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    engine = drafting(folder, head, draft_tokens=8)
    noted = note_drafts(engine, prompts, expected)
    assert answers(engine, prompts, greedy(MAX_TOKENS)) == expected
    assert count_right(noted, ReferenceDrafts(head, open_checkpoint(str(folder)).config, model)) == len(noted)
    assert {5, 7} & {len(draft) for draft in noted.values()}


@pytest.mark.parametrize("max_num_seqs", [2, 16])
def test_a_wide_head_in_fp8_reads_more_rows_than_it_drafts(tmp_path: Path, max_num_seqs: int):
    """Its product with qkv is left in parts, of prompts and of all rows that a step verifies."""
    shape = {"intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    save_tiny(tmp_path, "llama", hidden_size=WIDE, **shape)
    head = save_head(
        tmp_path / "head", speculators(shape | {"hidden_size": WIDE}), open_checkpoint(str(tmp_path)).config
    )
    engine = drafting(tmp_path, head, dtype="float8", max_num_seqs=max_num_seqs, max_model_len=256)
    runner: Any = engine.runner
    for graphs in runner.launcher.head.graph_sets:
        graphs.capture(lambda launch: launch() or launch, graphs.sizes)
        graphs.release()
    prompts = random_prompts(VOCAB, (5, 63, 64))
    assert [len(answer) for answer in answers(engine, prompts, greedy(8))] == [8] * len(prompts)
    assert engine.stats().num_drafts > 0


def test_a_head_of_several_layers_is_refused_before_weights_are_read(target, tmp_path: Path, monkeypatch):
    monkeypatch.delattr("engine.cuda.loader.load_device_weights")
    config = open_checkpoint(str(target[0])).config
    with pytest.raises(ConfigError, match="num_hidden_layers is 2; on a GPU heads have one layer"):
        drafting(target[0], save_head(tmp_path, HEADS["two layers"], config))


def test_a_team_has_no_head(target, head: Path):
    with pytest.raises(ConfigError, match="heads draft on one GPU"):
        drafting(target[0], head, tensor_parallel=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "share"), [("float32", 1.0), ("bfloat16", 0.8)])
def test_a_gpu_drafts_what_the_formulas_say(dtype: str, share: float, tmp_path: Path):
    """Random weights, so that rounding decides between some tokens; a wrong row or slot leaves none right."""
    model = save_tiny(tmp_path, "llama", **FUSIBLE)
    config = open_checkpoint(str(tmp_path)).config
    head = save_head(tmp_path / "head", LARGER, config)
    prompts = random_prompts(VOCAB, LENGTHS)
    plain = answers(engine_of(tmp_path, dtype), prompts, greedy(MAX_TOKENS))
    engine = engine_of(tmp_path, dtype, speculate=str(head), draft_tokens=DRAFT_TOKENS, adapts_drafts=False)
    noted = note_drafts(engine, prompts, plain)
    found = answers(engine, prompts, greedy(MAX_TOKENS))
    assert [answer[:2] for answer in found] == [answer[:2] for answer in plain]
    right = count_right(noted, ReferenceDrafts(head, config, model))
    assert len(noted) > 20 and right >= share * len(noted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float8", "float8-head"])
def test_a_gpu_in_fp8_drafts_what_the_reference_kernels_do(dtype: str, tmp_path: Path):
    """Drafts behind texts that both have are compared; rounding of random rows decides between some tokens."""
    save_tiny(tmp_path, "llama", **FUSIBLE)
    head = save_head(tmp_path / "head", LARGER, open_checkpoint(str(tmp_path)).config)
    prompts = random_prompts(VOCAB, LENGTHS)
    plain = answers(engine_of(tmp_path, dtype), prompts, greedy(MAX_TOKENS))
    firsts: list[dict[tuple[int, ...], int]] = []
    for device in ("cuda", "cpu"):
        engine = engine_of(tmp_path, dtype, device, speculate=str(head), draft_tokens=DRAFT_TOKENS, adapts_drafts=False)
        noted = note_drafts(engine, prompts, plain)
        answers(engine, prompts, greedy(MAX_TOKENS))
        firsts.append({tokens: draft.token_ids[0] for tokens, draft in noted.items()})
    shared = firsts[0].keys() & firsts[1].keys()
    assert len(shared) >= 6
    assert sum(firsts[0][text] == firsts[1][text] for text in shared) > 0.6 * len(shared)
