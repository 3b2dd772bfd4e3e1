"""Layers that see a window or a segment move only the pages that are needed, and no answer depends on more.

Real engines and links in one process, each with fewer pages for these layers than it has blocks.
"""

from typing import Any

import pytest

from bench.models.transformers_oracle import greedy as oracle_greedy
from contracts.handoff import PrefixRequest
from contracts.hashing import chain_hashes
from contracts.ids import Epoch, RequestId
from contracts.layout import KVLayout
from contracts.node import WorkerRole
from engine.engine import Engine
from engine.loader import load_engine
from kv_transfer.events import MessageReceived
from tests.engine.driving import answers, greedy, random_prompts, settings
from tests.engine.tiny_models import VOCAB, save_tiny
from tests.path.cores import Cores
from tests.path.test_path_migration import Movers
from tests.path.test_path_reuse import GREEDY, Pool
from tests.waiting import until

pytestmark = pytest.mark.slow

SIZE = 16
FEW: dict[str, Any] = {"kv_cache_mib": 1, "max_num_seqs": 4}
PROMPTS = random_prompts(VOCAB, (5, 40, 64, 97, 150, 230, 311))


@pytest.fixture(scope="module", params=["gpt_oss", "llama4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """A tiny model's folder, and what transformers answers with it."""
    folder = tmp_path_factory.mktemp("windows")
    reference = save_tiny(folder, request.param)
    return str(folder), [oracle_greedy(reference, prompt, 12) for prompt in PROMPTS]


def moved_blocks(layout: KVLayout, num_tokens: int, num_here: int = 0) -> list[int]:
    """Return how many blocks of a prompt move in each group."""
    return [layout.num_blocks(num_tokens) - skip // SIZE for skip in layout.skips(num_here, num_tokens)]


def num_held(engine: Engine) -> int:
    engine.check()
    return sum(table.num_held for _, table in engine.groups._groups)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("transfer", ["ucx", "shm", "tcp"])
def test_a_pair_answers_as_transformers_and_moves_windows_alone(model, transfer: str) -> None:
    folder, expected = model
    with Cores(folder, transfer, **FEW) as pair:
        layout, nbytes = pair.decode.engine.layout, 0
        for turn in range(2):
            for prompt, answer in zip(PROMPTS, expected, strict=True):
                here = (len(prompt) - 1) // SIZE * SIZE if turn else 0
                assert pair.answers([prompt], greedy(12)) == [answer]
                moved = moved_blocks(layout, len(prompt), here)
                told = sum(link.nbytes for link in pair.decode.node.stats())
                if turn == 0:
                    assert told - nbytes == sum(n * layout.group_nbytes(group) for group, n in enumerate(moved))
                nbytes = told
        assert pair.answers(PROMPTS, greedy(12)) == expected
        for worker in (pair.prefill, pair.decode):
            assert not worker.engine.groups.are_whole and num_held(worker.engine) == 0
            gauges = worker.core._status.report().gauges  # pyright: ignore[reportPrivateUsage]
            assert gauges["window_pages_held"] == 0 < gauges["window_pages_cached"]
            assert gauges["window_pages_cached"] <= gauges["window_pages"] < worker.engine.pool.num_blocks


def test_a_pair_whose_layers_all_have_windows_moves_nothing_else(tmp_path) -> None:
    reference = save_tiny(tmp_path, "mistral", sliding_window=40)
    expected = [oracle_greedy(reference, prompt, 12) for prompt in PROMPTS]
    with Cores(str(tmp_path), "tcp", **FEW) as pair:
        layout = pair.decode.engine.layout
        assert [group.kind for group in layout.groups] == ["window"]
        assert pair.answers(PROMPTS, greedy(12)) == expected
        moved = sum(moved_blocks(layout, len(prompt))[0] for prompt in PROMPTS)
        assert sum(link.nbytes for link in pair.decode.node.stats()) == moved * layout.block_nbytes
        assert pair.answers(PROMPTS, greedy(12)) == expected
        assert num_held(pair.prefill.engine) == num_held(pair.decode.engine) == 0


def test_a_prompt_of_32k_tokens_moves_its_window(model) -> None:
    layout = load_engine(settings(model=model[0])).layout
    (short,) = (index for index, group in enumerate(layout.groups) if group.is_short)
    counts = moved_blocks(layout, 32768 + 5)
    assert counts[short] <= -(-layout.groups[short].span // SIZE) + 1 and counts[1 - short] == 2049
    assert sum(n * layout.group_nbytes(group) for group, n in enumerate(counts)) < 0.7 * 2049 * layout.block_nbytes


def test_a_prefix_is_pulled_with_its_window(model) -> None:
    folder, _ = model
    pool = Pool(folder, "tcp", WorkerRole.PREFILL, WorkerRole.MIXED, **FEW)
    prefill, mixed = (pool.workers[role] for role in (WorkerRole.PREFILL, WorkerRole.MIXED))
    try:
        until(lambda: prefill.node.ensure_link(mixed.ref) and mixed.node.ensure_link(prefill.ref))
        prompt = PROMPTS[5]
        text = [*prompt, *pool.ask(pool.job(prompt, mixed, mixed)).tokens, *[7] * 20]
        answer = pool.ask(pool.job(text, prefill, mixed, mixed))
        assert answer.cached == (len(prompt) + GREEDY.max_tokens - 1) // SIZE * SIZE
        assert answer.tokens == answers(load_engine(settings(model=folder)), [text], GREEDY)[0]
        assert pool.counters()["kv_peer_loads"] == 1
        pulled = sum(link.nbytes for link in prefill.node.stats() if link.peer_id == mixed.ref.worker_id)
        layout = prefill.engine.layout
        counts = moved_blocks(layout, answer.cached)
        assert pulled >= sum(n * layout.group_nbytes(group) for group, n in enumerate(counts))
        pool.assert_clean()
        assert num_held(prefill.engine) == num_held(mixed.engine) == 0
        digests = chain_hashes(text, SIZE)
        assert prefill.engine.prefix_exports.count(digests) == len(digests)
    finally:
        pool.close()


def test_blocks_from_before_the_first_token_on_are_refused(model) -> None:
    pool = Pool(model[0], "tcp", WorkerRole.PREFILL, WorkerRole.MIXED, **FEW)
    prefill, mixed = (pool.workers[role] for role in (WorkerRole.PREFILL, WorkerRole.MIXED))
    try:
        until(lambda: prefill.node.ensure_link(mixed.ref) and mixed.node.ensure_link(prefill.ref))
        pool.ask(pool.job(PROMPTS[5], mixed, mixed))
        layout, digests = mixed.engine.layout, chain_hashes(PROMPTS[5], SIZE)
        facts = {"reader": prefill.ref, "shared_id": layout.shared_id, "digests": digests[0]}
        prefixes = pool.prefixes[WorkerRole.MIXED]
        for epoch, first_token in enumerate((-1000 * SIZE, -SIZE)):
            asked = PrefixRequest(RequestId("x"), Epoch(epoch), first_token=first_token, **facts)
            prefixes.takes(MessageReceived(prefill.ref.worker_id, asked), 0.0)
            assert prefixes.is_idle() and num_held(mixed.engine) == 0
        asked = PrefixRequest(RequestId("x"), Epoch(9), first_token=0, **facts)
        prefixes.takes(MessageReceived(prefill.ref.worker_id, asked), 0.0)
        assert not prefixes.is_idle()
    finally:
        pool.close()


def test_answers_move_there_and_back(model) -> None:
    folder, _ = model
    prompts, length = {f"m{i}": prompt for i, prompt in enumerate(PROMPTS[2:5])}, 120
    expected = answers(load_engine(settings(model=folder)), list(prompts.values()), greedy(length))
    movers = Movers(folder, (WorkerRole.DECODE, WorkerRole.DECODE), **{**FEW, "kv_cache_mib": 2})
    a, b = movers.workers
    try:
        assert not a.engine.groups.are_whole
        jobs = {}
        for name, prompt in prompts.items():
            jobs[name] = movers.begin_with(name, prompt, a, greedy(length))
        movers.until(lambda: all(movers.has(name, 10) for name in jobs))
        moving = {name: movers.move(job, a, b) for name, job in jobs.items()}
        movers.until(lambda: all(movers.has(name, 60) for name in jobs))
        for job in moving.values():
            movers.move(job, b, a, epoch=3)
        movers.until(lambda: all(movers.is_over(name) for name in jobs))
        movers.until(movers.is_clean)
        assert [[token.token_id for token in movers.tokens(name)] for name in jobs] == expected
        assert [worker.counters()["migrations_committed"] for worker in (a, b)] == [3, 3]
        assert num_held(a.engine) == num_held(b.engine) == 0
    finally:
        for worker in movers.workers:
            worker.node.close()
