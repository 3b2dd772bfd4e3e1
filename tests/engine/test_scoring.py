"""A prompt's own log-probabilities: those of transformers, each token once, however the prompt is computed."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from contracts.events import PromptToken
from contracts.ids import RequestId
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import StepOutput
from engine.sampling.prompt_logprobs import ROWS, spans
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from tests.engine.driving import drain, greedy, random_prompts, request, settings, tokens_of
from tests.engine.tiny_models import VOCAB, save_tiny

PROMPTS = random_prompts(VOCAB, (1, 2, 17, 65, 200), seed=4)
TOLERANCE = 2e-4
"""The error of a log-probability in float32 against transformers, which sums in another order."""


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request, tmp_path_factory) -> tuple[str, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return str(folder), save_tiny(folder, request.param)


def submit(engine: Engine, name: str, prompt: list[int], count: int | None, **options) -> None:
    engine.submit(request(name, prompt, greedy(2, prompt_logprobs=count), **options))


def scores_of(outputs: list[StepOutput], name: str) -> list[PromptToken]:
    found = [scored for output in outputs for scored in output.scored if scored.request_id == name]
    tokens: list[PromptToken] = []
    for scored in found:
        assert scored.first_index == 1 + len(tokens) and 0 < len(scored.tokens) <= ROWS
        tokens += scored.tokens
    return tokens


@torch.inference_mode()
def assert_true(model: PreTrainedModel, prompt: list[int], scores: list[PromptToken], count: int) -> None:
    assert [token.token_id for token in scores] == prompt[1:]
    logprobs_TV = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    for token, logprobs_V in zip(scores, logprobs_TV, strict=False):
        own = float(logprobs_V[token.token_id])
        assert token.logprob == pytest.approx(own, abs=TOLERANCE)
        low, high = (int((logprobs_V > own + slack).sum()) + 1 for slack in (TOLERANCE, -TOLERANCE))
        assert low <= token.rank <= high
        assert len(token.top_logprobs) == count
        expected = logprobs_V.topk(count).values.tolist()
        assert [value for _, value in token.top_logprobs] == pytest.approx(expected, abs=TOLERANCE)
        for token_id, value in token.top_logprobs:
            assert value == pytest.approx(float(logprobs_V[token_id]), abs=TOLERANCE)


@pytest.mark.parametrize("budget", [48, 1024])
def test_they_are_those_of_transformers_however_the_prompt_is_cut(model, budget):
    folder, reference = model
    engine = load_engine(settings(model=folder, max_batched_tokens=budget))
    for index, prompt in enumerate(PROMPTS):
        submit(engine, str(index), prompt, index)
        submit(engine, f"plain {index}", prompt, None)
    outputs = drain(engine)
    for index, prompt in enumerate(PROMPTS):
        assert_true(reference, prompt, scores_of(outputs, str(index)), index)
        assert not scores_of(outputs, f"plain {index}")


def test_a_cached_prefix_is_scored_all_the_same(model):
    folder, reference = model
    engine = load_engine(settings(model=folder))
    for name in ("first", "again"):
        submit(engine, name, PROMPTS[4], 3)
        assert_true(reference, PROMPTS[4], scores_of(drain(engine), name), 3)
    assert engine.stats().prefix_hit_tokens == 0
    submit(engine, "plain", PROMPTS[4], None)
    drain(engine)
    assert engine.stats().prefix_hit_tokens == 192


def test_what_is_computed_again_is_told_once(model):
    folder, reference = model
    block_nbytes = load_engine(settings(model=folder)).layout.block_nbytes
    engine = load_engine(settings(model=folder, kv_cache_nbytes=14 * block_nbytes, prefix_cache=False))
    prompts = random_prompts(VOCAB, (80, 80), seed=1)
    for name, prompt in zip("ab", prompts, strict=True):
        engine.submit(request(name, prompt, greedy(60, prompt_logprobs=1)))
    outputs = drain(engine)
    assert engine.stats().num_preemptions > 0
    for name, prompt in zip("ab", prompts, strict=True):
        assert_true(reference, prompt, scores_of(outputs, name), 1)


def test_all_of_it_comes_before_token_0_and_of_prefill_alone(model):
    folder, reference = model
    prefill, decode = (load_engine(settings(model=folder, max_batched_tokens=48)) for _ in range(2))
    submit(prefill, "r", PROMPTS[4], 1, handoff=True)
    outputs = drain(prefill)
    at_first = next(index for index, output in enumerate(outputs) if output.sampled)
    assert_true(reference, PROMPTS[4], scores_of(outputs[: at_first + 1], "r"), 1)
    decode.reserve(request("r", PROMPTS[4], greedy(9, prompt_logprobs=1)))
    decode.pool_bytes[:, : prefill.pool_bytes.shape[1]] = prefill.pool_bytes
    decode.adopt(RequestId("r"), outputs[at_first].sampled[0].token)
    assert not scores_of(drain(decode), "r")


def test_neighbours_of_a_scored_prompt_get_the_same_numbers(model):
    folder, _ = model
    seen = []
    for count in (None, 5):
        engine = load_engine(settings(model=folder, prefix_cache=False))
        submit(engine, "scored", PROMPTS[4], count)
        engine.submit(request("neighbour", PROMPTS[3], greedy(8, logprobs=2)))
        outputs = drain(engine)
        seen.append([s.token for o in outputs for s in o.sampled if s.request_id == "neighbour"])
        assert tokens_of(outputs, "neighbour")
    assert seen[0] == seen[1]


@given(st.integers(1, 400), st.lists(st.integers(1, 200)), st.booleans())
def test_the_parts_cover_the_prompt_once_and_are_small(num_prompt: int, cuts: list[int], is_asked: bool):
    sequence = Sequence(RequestId("r"), range(num_prompt), greedy(4, prompt_logprobs=0 if is_asked else None))
    edges = sorted({min(num_prompt, sum(cuts[:index])) for index in range(len(cuts) + 1)} | {num_prompt})
    pieces = [ScheduledChunk(sequence, first, end - first) for first, end in pairwise(edges)]
    found = spans(pieces)
    assert [target for span in found for target in span.targets] == list(range(1, num_prompt if is_asked else 1))
    for span in found:
        assert len(span.rows) == len(span.targets) <= ROWS
        assert (span.rows + 1).tolist() == list(span.targets), "one sequence in the batch: its rows are its places"
