"""A prompt pulls its prefix from another worker's device, or its tiers: a GPU's code on a CPU."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.kv_store import BlockKey
from contracts.node import WorkerRole
from contracts.request import Cancel
from engine.engine import Engine
from engine.messages import PageChecksums
from kv_transfer.chunks.block_record import max_record_nbytes
from kv_transfer.tiers.host_memory import HostMemoryTier, LentRecord
from tests.engine.device_engines import FUSIBLE
from tests.engine.driving import greedy, request
from tests.engine.tiny_models import save_tiny
from tests.path.cores import Worker
from tests.path.test_path_reuse import GREEDY, NEXT, PROMPT, SLOW, Pool, second_turn
from tests.waiting import PATIENCE_S, until
from worker.core.kv_tiers import KVTiers
from worker.core.open_tiers import pages_of
from worker.messages import Work

pytestmark = pytest.mark.slow

PREFILL, MIXED = WorkerRole.PREFILL, WorkerRole.MIXED
DEVICES = ["", "float32"]
"""A CPU's engine, and a GPU's on the reference kernels."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("fusible")
    save_tiny(folder, "llama", **FUSIBLE)
    return str(folder)


@pytest.fixture(scope="module")
def answers(model: str) -> Iterator[Callable[[list[int]], list[int]]]:
    """Yield a function that gives the answer of a device that computes all of a prompt."""
    pool = Pool(model, "tcp", MIXED, device_dtype="float32")
    mixed = pool.workers[MIXED]

    def answer(prompt: list[int]) -> list[int]:
        blocks = mixed.engine.pool
        blocks.release(blocks.allocate(blocks.num_available))
        return pool.ask(pool.job(prompt, mixed, mixed)).tokens

    yield answer
    pool.close()


def joined(model: str, transfer: str, device_dtype: str) -> Pool:
    """Return a prefill worker, which pulls, and a mixed one, from which it does."""
    pool = Pool(model, transfer, PREFILL, MIXED, device_dtype=device_dtype)
    pool.tokens_per_s = SLOW / 100  # nor is a pull
    prefill, mixed = (pool.workers[role] for role in (PREFILL, MIXED))
    until(lambda: prefill.node.ensure_link(mixed.ref) and mixed.node.ensure_link(prefill.ref))
    return pool


def first_turn(pool: Pool) -> list[int]:
    mixed = pool.workers[MIXED]
    return [*PROMPT, *pool.ask(pool.job(PROMPT, mixed, mixed)).tokens, *NEXT]


def num_blocks(engine: Engine) -> int:
    """Return the full blocks of the first turn that have their KV."""
    return (len(PROMPT) + GREEDY.max_tokens - 1) // engine.layout.block_size


@pytest.mark.parametrize("transfer", ["tcp", "shm", "nvlink", "ucx"])
def test_prompt_and_answer_come_from_the_device_that_decoded(
    model: str, transfer: str, answers: Callable[[list[int]], list[int]]
) -> None:
    pool = joined(model, transfer, "float32")
    prompt = first_turn(pool)
    engine = pool.workers[PREFILL].engine
    found = pool.ask(second_turn(pool, prompt))
    assert (found.tokens, found.cached) == (answers(prompt), num_blocks(engine) * engine.layout.block_size)
    assert pool.counters()["kv_peer_hit_blocks"] == num_blocks(engine)
    assert {link.transport for link in pool.workers[MIXED].node.stats()} == {transfer}
    pool.assert_clean()
    pool.close()


class Unfinished:
    """Checksums that are not done until they are let."""

    def __init__(self, checksums: PageChecksums) -> None:
        self._checksums, self.is_done = checksums, False

    def wait(self) -> np.ndarray:
        assert self.is_done
        return self._checksums.wait()


def test_what_a_device_still_computes_is_sent_once_it_is_there(
    model: str, answers: Callable[[list[int]], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = joined(model, "tcp", "float32")
    prompt, mixed = first_turn(pool), pool.workers[MIXED]
    exports, made = mixed.engine.prefix_exports, list[Unfinished]()
    checksums = exports.checksums

    def unfinished(blocks: list) -> Unfinished:
        found = checksums(blocks)
        assert found is not None
        made.append(Unfinished(found))
        return made[0]

    monkeypatch.setattr(exports, "checksums", unfinished)
    mixed.engine.submit(request("busy", [5, 6, 7], greedy(400)))
    job = second_turn(pool, prompt)
    pool.ask(job, until=lambda: made)
    for _ in range(20):
        pool.turn()
    assert mixed.engine.has_work() and pool.prefixes[MIXED].counters()["kv_peer_sent_blocks"] == 0
    made[0].is_done = True
    while not (pool.is_idle() and pool.counters()["kv_peer_loads"]):
        pool.turn()
    assert pool.counters()["kv_peer_hit_blocks"] == num_blocks(mixed.engine)
    assert pool.ask(second_turn(pool, prompt)).tokens == answers(prompt)
    pool.assert_clean()
    pool.close()


def with_tiers(
    worker: Worker,
    clock: Callable[[], float] = lambda: 0.0,
    make: Callable[..., HostMemoryTier] = HostMemoryTier,
) -> KVTiers:
    """Give a worker a memory tier, from which no load is late: the clock stands still."""
    engine, nbytes = worker.engine, max_record_nbytes(worker.engine.layout)
    host = make(100 * nbytes, nbytes, block_size=engine.layout.block_size)
    facts = engine.layout, pages_of(engine), engine.pool.generations, lambda: SLOW, worker.front.wake, clock
    tiers = KVTiers([host], *facts)
    worker.core.use_tiers(tiers)
    return tiers


def evict(engine: Engine, num_kept: int = 0) -> None:
    """Let the cache have none of what it had, but for so many blocks of the first turn."""
    kept = engine.pool.find_by_digest([engine.pool._cached[block][0] for block in engine.pool._cached][:num_kept])
    engine.pool.retain(kept)
    engine.pool.release(engine.pool.allocate(engine.pool.num_available))
    engine.pool.release(kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_kept", [0, 2])
def test_what_only_the_tiers_of_a_peer_hold_comes_from_there(
    model: str, device: str, num_kept: int, answers: Callable[[list[int]], list[int]], tmp_path: Path
) -> None:
    """The first blocks are in its cache, or none is."""
    pool = joined(model, "tcp", device)
    engine = pool.workers[MIXED].engine
    tiers = with_tiers(pool.workers[MIXED])
    prompt = first_turn(pool)
    until(lambda: tiers.is_idle)
    evict(engine, num_kept)
    found = pool.ask(second_turn(pool, prompt))
    count = num_blocks(engine)
    assert (found.tokens, found.cached) == (answers(prompt), count * engine.layout.block_size)
    sent = pool.prefixes[MIXED].counters()
    assert (sent["kv_peer_sent_blocks"], sent["kv_peer_sent_tier_blocks"]) == (count, count - num_kept)
    until(lambda: tiers.is_idle)
    tiers.close()
    pool.assert_clean()
    pool.close()


class HeldTier(HostMemoryTier):
    """It gives nothing of blocks before it is let."""

    def __init__(self, *facts: Any, **options: Any) -> None:
        super().__init__(*facts, **options)
        self.may_give = threading.Event()

    def lend(self, keys: Sequence[BlockKey]) -> list[LentRecord]:
        assert self.may_give.wait(PATIENCE_S)
        return super().lend(keys)


def held_pull(model: str, transfer: str, device: str) -> tuple[Pool, KVTiers, HeldTier, list[int]]:
    """Return workers of which one has two blocks in its cache and the others in a tier, and what the other pulls."""
    pool = joined(model, transfer, device)
    mixed, held = pool.workers[MIXED], list[HeldTier]()
    tiers = with_tiers(mixed, make=lambda *facts, **options: held.append(HeldTier(*facts, **options)) or held[0])
    prompt = first_turn(pool)
    until(lambda: tiers.is_idle)
    evict(mixed.engine, 2)
    return pool, tiers, held[0], prompt


def num_here(pool: Pool) -> int:
    """Return how many tokens of its pull the puller has by now; 0 if there is none."""
    pulls = pool.prefixes[PREFILL]._puller._open.values()
    return max((pull.chunks.next_token for pull in pulls), default=0)


@pytest.mark.parametrize(("transfer", "device"), [("tcp", ""), ("shm", ""), ("tcp", "float32"), ("nvlink", "float32")])
def test_what_a_peer_has_at_once_does_not_wait_for_its_tiers(
    model: str, transfer: str, device: str, answers: Callable[[list[int]], list[int]]
) -> None:
    pool, tiers, tier, prompt = held_pull(model, transfer, device)
    engine = pool.workers[MIXED].engine
    size, count = engine.layout.block_size, num_blocks(engine)
    job = second_turn(pool, prompt)
    pool.ask(job, until=lambda: num_here(pool) == 2 * size)
    assert pool.prefixes[MIXED].counters()["kv_peer_sent_blocks"] == 2
    tier.may_give.set()
    until(lambda: pool.turn() is not None and pool.counters()["kv_peer_loads"])
    assert pool.counters()["kv_peer_hit_blocks"] == count
    sent = pool.prefixes[MIXED].counters()
    assert (sent["kv_peer_sent_blocks"], sent["kv_peer_sent_tier_blocks"]) == (count, count - 2)
    until(lambda: pool.turn() is not None and pool.is_idle() and tiers.is_idle)
    assert pool.ask(second_turn(pool, prompt)).tokens == answers(prompt)
    tiers.close()
    pool.assert_clean()
    pool.close()


@pytest.mark.parametrize("transfer", ["tcp", "shm"])
def test_a_pull_that_is_over_leaves_nothing_where_its_tiers_hang(model: str, transfer: str) -> None:
    """What came before is kept; the tier gives the rest to nobody."""
    pool, tiers, tier, prompt = held_pull(model, transfer, "")
    job = second_turn(pool, prompt)
    pool.ask(job, until=lambda: num_here(pool))
    pool.workers[PREFILL].front.inbox.append(Work([Cancel(job.request_id, job.epoch, "the client left")], 0.0))
    pool.workers[MIXED].front.inbox.append(Work([Cancel(job.request_id, job.epoch, "the client left")], 0.0))
    until(lambda: pool.turn() is not None and pool.is_idle())
    pool.assert_clean()
    assert pool.counters()["kv_peer_hit_blocks"] == 2 == pool.prefixes[MIXED].counters()["kv_peer_sent_blocks"]
    tier.may_give.set()
    tiers.close()
    pool.assert_clean()
    pool.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_damaged_block_of_a_peers_tier_ends_what_comes_from_there(
    model: str, device: str, answers: Callable[[list[int]], list[int]]
) -> None:
    pool = joined(model, "tcp", device)
    engine = pool.workers[MIXED].engine
    tiers = with_tiers(pool.workers[MIXED])
    prompt = first_turn(pool)
    until(lambda: tiers.is_idle)
    evict(engine)
    host = tiers._loaders["host"].tier
    assert isinstance(host, HostMemoryTier)
    digests = second_digests(engine, prompt)
    slot, nbytes = host._slots[tiers._key(digests[3])]
    host._arena[slot * max_record_nbytes(engine.layout) + nbytes - 5] ^= 1
    found = pool.ask(second_turn(pool, prompt))
    assert found.tokens == answers(prompt) and found.cached == 3 * engine.layout.block_size
    assert tiers.counters()["kv_host_refused_blocks"] == 1
    until(lambda: tiers.is_idle)
    tiers.close()
    pool.assert_clean()
    pool.close()


def second_digests(engine: Engine, tokens: list[int]) -> list[bytes]:
    from contracts.ids import RequestId
    from engine.sequence import Sequence

    size = engine.layout.block_size
    return Sequence(RequestId("digests"), tokens, greedy()).extend_digests(size, len(tokens) // size)


def test_a_reader_that_is_gone_leaves_nothing_of_a_load_for_it(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies while the blocks it asked for are being loaded."""
    pool = joined(model, "tcp", "float32")
    mixed, prefill = pool.workers[MIXED], pool.workers[PREFILL]
    tiers = with_tiers(mixed)
    prompt = first_turn(pool)
    until(lambda: tiers.is_idle)
    evict(mixed.engine)
    monkeypatch.setattr(tiers, "finished_for_peers", lambda: [])
    monkeypatch.setattr(tiers, "num_loaded", lambda _: 0)
    server = pool.prefixes[MIXED]._server
    pool.ask(second_turn(pool, prompt), until=lambda: any(reader.is_loading for reader in server._open.values()))
    assert not server.is_idle and mixed.engine.pool.num_held == num_blocks(mixed.engine)
    prefill.node.close()
    pool.silent = {PREFILL}
    until(lambda: pool.turn() is not None and server.is_idle)
    mixed.engine.check()
    assert mixed.engine.pool.num_held == 0
    tiers.close()
    mixed.node.close()
