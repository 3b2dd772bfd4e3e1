"""The pages of groups beside the model's, as a draft head has them, go wherever a block goes, and no answer depends on
them. Real engines and links in one process.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from contracts.hashing import chain_hashes
from contracts.layout import KVGroup
from contracts.node import WorkerRole
from engine.engine import Engine
from engine.loader import load_engine
from tests.e2e.tiny import VOCAB, save_tiny
from tests.engine import driving
from tests.path.beside import head_groups, pages_of_prompt
from tests.path.cores import Cores
from tests.path.test_path_migration import PROMPTS as MOVED_PROMPTS
from tests.path.test_path_migration import Movers
from tests.path.test_path_reuse import PROMPT as PULLED_PROMPT
from tests.path.test_path_reuse import Pool, second_turn
from tests.waiting import until

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"kv_cache_mib": 2}
HEAD, OTHER_HEAD = head_groups("a head"), head_groups("another head")
PROMPTS = driving.random_prompts(VOCAB, (97, 64, 5, 113))
SAMPLING = driving.greedy(12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    return driving.answers(load_engine(driving.settings(model=model)), PROMPTS, SAMPLING)


@pytest.fixture(params=["ucx", "shm", "tcp"])
def transfer(request: pytest.FixtureRequest) -> str:
    return request.param


def digests_of(prompt: Sequence[int]) -> list[bytes]:
    return chain_hashes(prompt, 16)


def assert_same_pages(one: Engine, other: Engine, prompt: Sequence[int], num_groups: int) -> None:
    """Raise AssertionError unless both hold the prompt's blocks, with the same bytes in the first groups alone."""
    digests = digests_of(prompt)
    pairs = zip(pages_of_prompt(one, digests), pages_of_prompt(other, digests), strict=False)
    assert [np.array_equal(here, there) for here, there in pairs] == [group < num_groups for group in range(3)]


def test_a_handoff_takes_the_pages_of_every_group_along(model: str, expected: list[list[int]], transfer: str) -> None:
    with Cores(model, transfer, besides=(HEAD, HEAD), **SETTINGS) as pair:
        assert pair.answers(PROMPTS, SAMPLING) == expected
        for prompt in PROMPTS:
            if len(prompt) >= 16:
                assert_same_pages(pair.prefill.engine, pair.decode.engine, prompt, 3)
        nbytes = sum(link.nbytes for link in pair.decode.node.stats())
        num_blocks = sum(-(-len(prompt) // 16) for prompt in PROMPTS)
        assert nbytes == num_blocks * pair.decode.engine.layout.block_nbytes
        assert pair.decode.counters()["kv_handoffs_received_without_draft"] == 0
        for worker in (pair.prefill, pair.decode):
            worker.engine.check()


def test_with_another_head_the_models_pages_move_alone(model: str, expected: list[list[int]]) -> None:
    with Cores(model, "shm", besides=(HEAD, OTHER_HEAD), **SETTINGS) as pair:
        assert pair.answers(PROMPTS, SAMPLING) == expected
        assert_same_pages(pair.prefill.engine, pair.decode.engine, PROMPTS[0], 1)


@pytest.mark.parametrize("besides", [(HEAD, ()), ((), HEAD)], ids=["prefill", "decode"])
def test_a_head_on_one_side_keeps_nobody_from_a_handoff(
    model: str, expected: list[list[int]], transfer: str, besides: tuple
) -> None:
    with Cores(model, transfer, besides=besides, **SETTINGS) as pair:
        assert pair.answers(PROMPTS, SAMPLING) == expected
        layout = pair.decode.engine.layout.model_part
        num_blocks = sum(-(-len(prompt) // 16) for prompt in PROMPTS)
        assert sum(link.nbytes for link in pair.decode.node.stats()) == num_blocks * layout.block_nbytes
        num_missed = len(PROMPTS) if pair.decode.engine.layout.groups != layout.groups else 0
        assert pair.decode.counters()["kv_handoffs_received_without_draft"] == num_missed


@pytest.fixture
def pool(model: str) -> Iterator[Pool]:
    pool = Pool(model, "shm", WorkerRole.PREFILL, WorkerRole.MIXED, beside=HEAD)
    prefill, mixed = (pool.workers[role] for role in (WorkerRole.PREFILL, WorkerRole.MIXED))
    until(lambda: prefill.node.ensure_link(mixed.ref) and mixed.node.ensure_link(prefill.ref))
    yield pool
    pool.close()


def test_a_pulled_prefix_brings_every_group(pool: Pool) -> None:
    mixed, prefill = pool.workers[WorkerRole.MIXED], pool.workers[WorkerRole.PREFILL]
    pool.ask(pool.job(PULLED_PROMPT, mixed, mixed))
    answer = pool.ask(second_turn(pool, [*PULLED_PROMPT, 7]))
    assert answer.cached == len(PULLED_PROMPT) // 16 * 16 and pool.counters()["kv_peer_failed"] == 0
    assert_same_pages(mixed.engine, prefill.engine, PULLED_PROMPT, 3)
    pool.assert_clean()


@pytest.mark.parametrize("there", [HEAD, ()], ids=["the same head", "a head at the source"])
def test_a_running_answer_moves_with_every_group(model: str, there: Sequence[KVGroup]) -> None:
    movers = Movers(model, (WorkerRole.DECODE, WorkerRole.DECODE), (HEAD, there), **SETTINGS)
    a, b = movers.workers
    try:
        job = movers.begin("greedy", a)
        movers.until(lambda: movers.has("greedy", 10))
        movers.move(job, a, b)
        movers.until(lambda: movers.is_over("greedy"))
        movers.until(movers.is_clean)
        assert a.counters()["migrations_committed"] == 1
        digests = digests_of(MOVED_PROMPTS["greedy"])
        moved = pages_of_prompt(b.engine, digests)
        assert len(moved) == 1 + len(there)
        for one, other in zip(pages_of_prompt(a.engine, digests), moved, strict=False):
            assert np.array_equal(one, other)
    finally:
        for worker in movers.workers:
            worker.node.close()
