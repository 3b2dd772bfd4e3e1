"""Through the handoff, guesses are as good as on one worker, and change no token. Real engines, real transports."""

import random

import pytest

from bench.models.transformers_oracle import greedy
from contracts.sampling import SamplingParams
from engine.loader import load_engine
from tests.engine import driving, tiny_models
from tests.path.cores import Cores

pytestmark = pytest.mark.slow

PROMPTS = [random.Random(i).choices(range(2, 256), k=3 + 11 * i) * 2 for i in range(8)]
MAX_TOKENS = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[str, list[list[int]]]:
    """A tiny model's folder, and what transformers answers with it."""
    folder = tmp_path_factory.mktemp("model")
    reference = tiny_models.save_tiny(folder, "llama")
    return str(folder), [greedy(reference, prompt, MAX_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("transfer", ["ucx", "shm", "tcp"])
def test_a_pair_guesses_and_answers_as_one_worker(model, transfer):
    """With the same drafter and drafts of one length, as many tokens are accepted."""
    folder, expected = model
    sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    with Cores(folder, transfer, speculate="ngram") as pair:
        for worker in (pair.prefill, pair.decode):
            worker.engine.speculator._is_adaptive = False  # pyright: ignore[reportOptionalMemberAccess, reportPrivateUsage]
        assert pair.answers(PROMPTS, sampling) == expected
        there, here = pair.decode.engine.stats(), pair.prefill.engine.stats()
        for worker in (pair.prefill, pair.decode):
            worker.engine.check()
    alone = load_engine(driving.settings(model=folder, speculate="ngram", adapts_drafts=False))
    assert driving.answers(alone, PROMPTS, sampling) == expected
    one = alone.stats()
    assert here.num_drafts == 0 < sum(there.num_accepted_by_place)
    assert (there.num_drafts, there.num_accepted_by_place) == (one.num_drafts, one.num_accepted_by_place)
