"""Drafts verified by the GPU's adapter, on the reference kernels: it draws all rows itself, and a batch ahead."""

from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest
import torch

from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.backend import Runner
from engine.engine import Engine
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from engine.speculative.choice import PROPOSERS
from engine.speculative.proposer import Draft
from tests.engine.device_engines import FUSIBLE, device_engine, engine_of
from tests.engine.driving import answers, drain, greedy, random_prompts, request, tokens_of
from tests.engine.speculative.drafting import KnowingProposer
from tests.engine.speculative.test_speculation import SAMPLINGS
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

LENGTHS = (1, 17, 63, 64, 130)


@pytest.fixture
def knowing(monkeypatch: pytest.MonkeyPatch) -> type[KnowingProposer]:
    """A drafter that may be named in settings; what it knows is to be set."""
    monkeypatch.setitem(PROPOSERS, "knowing", KnowingProposer)
    return KnowingProposer


def learn(knowing: type[KnowingProposer], prompts: SequenceOf[list[int]], expected: SequenceOf[list[int]]) -> None:
    knowing.answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}


def drafting(folder: Path, dtype: str = "float32", **changes) -> Engine:
    return device_engine(
        folder, dtype, **{"speculate": "knowing", "adapts_drafts": False, "draft_tokens": 4, **changes}
    )


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_whatever_a_request_asks_for_its_tokens_are_those_without(folder: Path, knowing, kind: str):
    """In a batch, alone, beside prompts in chunks, and with prefix hits; in blocks of 64 that drafts run over."""
    prompts = random_prompts(VOCAB, LENGTHS)
    sampling = greedy(40, **SAMPLINGS[kind])
    plain = answers(device_engine(folder), prompts, sampling)
    learn(knowing, prompts, plain)
    engine = drafting(folder)
    assert answers(engine, prompts, sampling) == plain
    stats = engine.stats()
    assert 0 < sum(stats.num_accepted_by_place) < stats.num_draft_tokens
    assert answers(engine, prompts[-1:], sampling) == plain[-1:], "alone, with prefix hits"
    chunked = drafting(folder, max_batched_tokens=72, max_mixed_tokens=66, max_num_seqs=3)
    assert answers(chunked, prompts, sampling) == plain


def test_requests_that_ask_for_different_things_share_a_step(folder: Path, knowing):
    """A penalty of one has the host draw for all of the step, place by place."""
    prompts = random_prompts(VOCAB, [9] * len(SAMPLINGS))
    kinds = [greedy(24, **changes) for changes in SAMPLINGS.values()]
    plain = [answers(device_engine(folder), [prompt], kind)[0] for prompt, kind in zip(prompts, kinds, strict=True)]
    learn(knowing, prompts, plain)
    assert each(drafting(folder), prompts, kinds) == plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.02), ("float8", 0.1), ("float8-head", 0.1)])
def test_a_gpu_s_captured_step_verifies_drafts(dtype: str, tolerance: float, tmp_path: Path, knowing):
    """FP8 there rounds differently with the smallest difference of a sum; another token's row is far from both."""
    save_tiny(tmp_path, "llama", **FUSIBLE)
    engine = engine_of(tmp_path, dtype, speculate="knowing", draft_tokens=4, adapts_drafts=False)
    for _ in range(20):
        compare_rows(engine.runner, tolerance)
    prompts = random_prompts(VOCAB, LENGTHS)
    plain = answers(engine_of(tmp_path, dtype), prompts, greedy(40))
    learn(knowing, prompts, plain)
    found = answers(engine, prompts, greedy(40))
    assert engine.stats().num_accepted_by_place[0] > 0
    assert [answer[:2] for answer in found] == [answer[:2] for answer in plain]


def compare_rows(runner: Runner, tolerance: float = 1e-3) -> None:
    """Drafts of different lengths, over the edge of a block, to one token at a time; so few rows round alike."""
    lengths, drafts = (61, 63, 64), ((7, 8, 9), (), (11,))
    sequences = []
    for number, prompt in enumerate(random_prompts(VOCAB, lengths)):
        sequence = Sequence(RequestId(str(number)), prompt, greedy())
        sequence.blocks.extend(range(4 * number, 4 * number + 4))
        sequences.append(sequence)
    runner.forward_without_sampling([ScheduledChunk(s, 0, s.num_prompt) for s in sequences])
    for sequence in sequences:
        sequence.tokens.append(6)
    pieces = [
        ScheduledChunk(sequence, sequence.num_prompt, 1, Draft(draft))
        for sequence, draft in zip(sequences, drafts, strict=True)
    ]
    found = runner.forward_without_sampling(pieces).logits.clone()
    expected = []
    for sequence, draft in zip(sequences, drafts, strict=True):
        for token in (*draft, 0):
            piece = ScheduledChunk(sequence, len(sequence.tokens) - 1, 1)
            expected.append(runner.forward_without_sampling([piece]).logits.clone())
            sequence.tokens.append(token)
    wanted = torch.cat(expected)
    assert float((found - wanted).norm() / wanted.norm()) < tolerance


def each(engine: Engine, prompts: SequenceOf[list[int]], samplings: SequenceOf[SamplingParams]) -> list[list[int]]:
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        engine.submit(request(str(index), prompt, sampling))
    outputs = drain(engine)
    return [tokens_of(outputs, str(index)) for index in range(len(prompts))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8", "float8-head"])
def test_rows_of_a_draft_say_what_steps_of_one_token_say(dtype: str, tmp_path: Path):
    """`float8` takes the step of few launches."""
    save_tiny(tmp_path, "llama", **FUSIBLE)
    runner = drafting(tmp_path, dtype, speculate="ngram").runner
    compare_rows(runner)


@pytest.mark.parametrize("name", ["ngram", "suffix"])
@pytest.mark.parametrize("adapts", [False, True])
def test_drafters_without_weights_change_nothing(folder: Path, name: str, adapts: bool):
    prompts = [prompt * 2 for prompt in random_prompts(VOCAB, LENGTHS)]
    plain = answers(device_engine(folder), prompts, greedy(80))
    engine = device_engine(folder, speculate=name, adapts_drafts=adapts)
    assert answers(engine, prompts, greedy(80)) == plain
    if not adapts:  # else it hangs on how long the steps took whether anything is guessed
        assert sum(engine.stats().num_accepted_by_place) > 0


def test_a_right_draft_takes_fewer_steps(folder: Path, knowing, monkeypatch):
    monkeypatch.setattr(knowing, "wrong", 0.0)
    (prompt,) = random_prompts(VOCAB, [9])
    (plain,) = answers(device_engine(folder), [prompt], greedy(41))
    learn(knowing, [prompt], [plain])
    engine = drafting(folder, draft_tokens=3)
    engine.submit(request("0", prompt, greedy(41)))
    outputs = drain(engine)
    assert tokens_of(outputs, "0") == plain
    assert [output.num_decode_tokens for output in outputs] == [0] + [4] * 10


def test_a_step_without_drafts_in_sight_is_launched_ahead(folder: Path, knowing, monkeypatch):
    """A text that nobody foretells never has the device wait for the host, where drafts adapt."""
    (prompt,) = random_prompts(VOCAB, [9])
    knowing.answers = {}
    engine = drafting(folder, adapts_drafts=True)
    engine.submit(request("0", prompt, greedy(20)))
    engine.step()
    ahead = []
    while engine.has_work():
        ahead.append(engine.pipeline.in_flight is not None)
        engine.step()
    assert all(ahead[:-1])


def test_drafts_are_cut_to_the_rows_that_a_step_has(folder: Path, knowing, monkeypatch):
    monkeypatch.setattr("engine.speculative.choice.MAX_DRAFT_ROWS", 5)
    prompts = random_prompts(VOCAB, [9] * 6)
    plain = answers(device_engine(folder), prompts, greedy(20))
    learn(knowing, prompts, plain)
    engine, most = drafting(folder, max_num_seqs=6), 0
    forward = engine.runner.forward

    def counted(pieces: SequenceOf[ScheduledChunk], *written):
        nonlocal most
        most = max(most, sum(len(piece.draft) for piece in pieces))
        return forward(pieces, *written)

    monkeypatch.setattr(engine.runner, "forward", counted)
    assert answers(engine, prompts, greedy(20)) == plain
    assert most == 5


def test_preempted_answers_are_the_same(folder: Path, knowing):
    prompts = random_prompts(VOCAB, [60, 60, 60])
    layout = device_engine(folder).layout
    plain = answers(device_engine(folder), prompts, greedy(100))
    learn(knowing, prompts, plain)
    engine = drafting(folder, draft_tokens=7, kv_cache_nbytes=6 * layout.block_nbytes, max_model_len=256)
    assert answers(engine, prompts, greedy(100)) == plain
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.num_accepted_by_place[0] > 0
    assert stats.free_tokens == engine.capacity_tokens


def test_the_longest_context_is_not_left(folder: Path, knowing, monkeypatch):
    monkeypatch.setattr(knowing, "wrong", 0.0)
    (prompt,) = random_prompts(VOCAB, [100])
    (plain,) = answers(device_engine(folder, max_model_len=128), [prompt], greedy(100))
    learn(knowing, [prompt], [[*plain, 1, 2, 3, 4]])
    assert answers(drafting(folder, max_model_len=128), [prompt], greedy(100)) == [plain]
    assert len(prompt) + len(plain) == 128
