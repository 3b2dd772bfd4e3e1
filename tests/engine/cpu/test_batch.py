"""What else is in a batch changes no answer on the CPU: tokens and log-probabilities are the same to the bit."""

import numpy as np
import pytest

from contracts.sampling import SamplingParams
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import StepOutput
from tests.e2e.tiny import VOCAB, save_tiny
from tests.engine.driving import drain, needs_bfloat16, request, settings

pytestmark = pytest.mark.slow

NUM_REQUESTS, NUM_TOKENS = 8, 16
DTYPES = ["float32", "float16", "int8", *(pytest.param(d, marks=needs_bfloat16) for d in ("bfloat16", "mixed16"))]


def told(outputs: list[StepOutput], name: str) -> list[tuple[int, float | None]]:
    return [(s.token.token_id, s.token.logprob) for out in outputs for s in out.sampled if s.request_id == name]


def submit(engine: Engine, prompt: list[int], index: int) -> None:
    """A seeded draw at temperature 1: of a random model, whose tokens are all but equally likely."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=index, temperature=1.0, ignore_eos=True, logprobs=0)
    engine.submit(request(str(index), prompt, sampling))


@pytest.mark.parametrize(
    ("dtype", "num_threads"),
    [
        ("float32", 1),
        ("float16", 2),
        ("int8", 1),
        pytest.param("bfloat16", 2, marks=needs_bfloat16),
        pytest.param("mixed16", 1, marks=needs_bfloat16),
        pytest.param("mixed16", 2, marks=needs_bfloat16),
    ],
)
def test_a_seeded_answer_is_the_same_alone_and_in_any_batch(tmp_path, dtype, num_threads):
    chosen = settings(model=str(save_tiny(tmp_path)), dtype=dtype, num_threads=num_threads)
    engine = load_engine(chosen)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB - 1, size=int(size)).tolist() for size in rng.integers(2, 150, NUM_REQUESTS)]
    alone = []
    for index, prompt in enumerate(prompts):
        submit(engine, prompt, index)
        alone.append(told(drain(engine), str(index)))
    outputs = []
    for index, prompt in enumerate(prompts):  # batches of all sizes, prompts beside answers
        submit(engine, prompt, index)
        outputs += [engine.step(), engine.step()]
    outputs += drain(engine)
    assert [told(outputs, str(index)) for index in range(NUM_REQUESTS)] == alone
    assert all(len(answer) == NUM_TOKENS for answer in alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_answer_that_is_computed_again_is_the_same(tmp_path, dtype):
    """Over more than one part of the context, in chunks longer than what attends at once."""
    engine = load_engine(
        settings(model=str(save_tiny(tmp_path)), dtype=dtype, prefix_cache=False, max_batched_tokens=96)
    )
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB - 1, size).tolist() for size in (100, 37)]
    sampling = SamplingParams(max_tokens=170, seed=3, temperature=1.0, ignore_eos=True, logprobs=0)
    found: list[list[list[tuple[int, float | None]]]] = []
    for num_before in (1000, 150):
        for index, prompt in enumerate(prompts):
            engine.submit(request(str(index), prompt, sampling))
        outputs = [engine.step() for _ in range(num_before) if engine.has_work()]
        for sequence in list(engine.scheduler.running):
            engine.scheduler._preempt(sequence)  # pyright: ignore[reportPrivateUsage]
        outputs += drain(engine)
        found.append([told(outputs, str(index)) for index in range(len(prompts))])
    assert engine.stats().num_preemptions == len(prompts)
    assert found[0] == found[1] and [len(answer) for answer in found[0]] == [170, 170]
