"""Each family's KV crosses each transport: chunked, many at once, then with prefix hits. Real engines, real transports,
everything of two workers but their processes.
"""

import random

import pytest

from bench.models.transformers_oracle import greedy
from contracts.sampling import SamplingParams
from tests.engine import tiny_models
from tests.path.cores import Cores

pytestmark = pytest.mark.slow

PROMPTS = [random.Random(i).choices(range(2, 256), k=5 + 23 * i) for i in range(14)]
MAX_TOKENS = 16


@pytest.fixture(scope="module", params=sorted(tiny_models.FAMILIES))
def family(request, tmp_path_factory) -> tuple[str, list[list[int]]]:
    """A tiny model's folder, and what transformers answers with it."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = tiny_models.save_tiny(folder, request.param)
    return str(folder), [greedy(reference, prompt, MAX_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("transfer", ["ucx", "shm", "tcp"])
def test_the_answers_are_those_of_transformers(family, transfer):
    model, expected = family
    sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    with Cores(model, transfer) as pair:
        assert pair.answers(PROMPTS, sampling) == expected
        assert pair.answers(PROMPTS, sampling) == expected
        assert pair.prefill.engine.stats().prefix_hit_tokens > 0
        assert {link.transport for link in pair.prefill.node.stats()} == {transfer}
        assert pair.prefill.counters()["handoffs_committed"] == 2 * len(PROMPTS)
        for worker in (pair.prefill, pair.decode):
            worker.engine.check()
