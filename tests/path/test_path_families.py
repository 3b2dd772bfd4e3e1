"""Each family's KV crosses each transport: chunked, many at once, then with prefix hits. Real engines, real transports,
everything of two workers but their processes.
"""

import random
from collections.abc import Callable
from functools import cache

import pytest

from bench.models.transformers_oracle import greedy
from contracts.sampling import SamplingParams
from tests.engine import tiny_models
from tests.path.cores import Cores

pytestmark = pytest.mark.slow

PROMPTS = [random.Random(i).choices(range(2, 256), k=5 + 23 * i) for i in range(14)]
MAX_TOKENS = 16


EVERYWHERE = {"deepseek_v3", "gpt_oss", "llama", "llama3", "llama4", "mistral", "qwen2", "qwen3", "qwen3_moe"}
"""The families whose KV crosses each transport; that of the others lies in pages as theirs does, and crosses one."""
WAYS = [
    (family, transfer)
    for family in sorted(tiny_models.FAMILIES.keys() - {"deepseek_v2"})  # of one family with V3
    for transfer in ("ucx", "shm", "tcp")
    if family in EVERYWHERE or transfer == "tcp"
]


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> Callable[[str], tuple[str, list[list[int]]]]:
    """Return a tiny model's folder, and what transformers answers with it; each is made once."""

    @cache
    def made(name: str) -> tuple[str, list[list[int]]]:
        folder = tmp_path_factory.mktemp(name)
        reference = tiny_models.save_tiny(folder, name)
        return str(folder), [greedy(reference, prompt, MAX_TOKENS) for prompt in PROMPTS]

    return made


@pytest.mark.parametrize(("family", "transfer"), WAYS)
def test_the_answers_are_those_of_transformers(families, family, transfer):
    model, expected = families(family)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    with Cores(model, transfer) as pair:
        assert pair.answers(PROMPTS, sampling) == expected
        assert pair.answers(PROMPTS, sampling) == expected
        assert pair.prefill.engine.stats().prefix_hit_tokens > 0
        assert {link.transport for link in pair.prefill.node.stats()} == {transfer}
        assert pair.prefill.counters()["handoffs_committed"] == 2 * len(PROMPTS)
        for worker in (pair.prefill, pair.decode):
            worker.engine.check()
