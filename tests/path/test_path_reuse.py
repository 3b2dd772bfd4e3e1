"""A prompt pulls its prefix from another worker: real engines and links in one process, and each way to fail."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from contracts.errors import Overloaded
from contracts.events import Failed, Finished, Prefilled, Tokens
from contracts.handoff import Grant, Offer
from contracts.ids import Epoch, RequestId, WorkerId
from contracts.layout import KVGroup
from contracts.node import WorkerRole
from contracts.request import Cancel, Job, Route
from contracts.sampling import SamplingParams
from engine.cache.load_plan import MAX_DELAY_SHARE
from engine.sequence import Status
from kv_transfer.events import MessageReceived
from tests.e2e.tiny import save_tiny
from tests.path.cores import DEADLINE_S, GATEWAY, Worker
from tests.waiting import until
from worker.core.peer_prefixes import PeerPrefixes
from worker.core.prefix_puller import HOST_PACE, PrefixPuller, Pull
from worker.core.role_handler import AttemptId, attempt_key
from worker.messages import CoreFrame, Work

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=70, seed=0, temperature=0.0, ignore_eos=True)
PROMPT = [2 + i % 200 for i in range(300)]
NEXT = [7] * 20
BLOCK = 16
SLOW, FAST, UNKNOWN = 10.0, 1e9, 0.0
"""Tokens a second at which any pull pays, and none."""


@dataclass
class Answer:
    tokens: list[int]
    cached: int


class Pool:
    """Workers that take their turns one after the other; those in `silent` take none."""

    def __init__(
        self,
        model: str,
        transfer: str,
        *roles: WorkerRole,
        device_dtype: str = "",
        beside: Sequence[KVGroup] = (),
        **changes: Any,
    ) -> None:
        facts = model, transfer, "secret", device_dtype, beside
        self.workers = {role: Worker(role, *facts, worker_id=role.value, **changes) for role in roles}
        self.silent: set[WorkerRole] = set()
        self.tokens_per_s = SLOW
        self.prefixes = {role: self._prefixes(worker) for role, worker in self.workers.items()}
        self._num_asked = 0

    def _prefixes(self, worker: Worker) -> PeerPrefixes:
        facts = worker.ref.worker_id, worker.engine, worker.node, worker.ledger, worker.roles
        prefixes = PeerPrefixes(*facts, lambda: self.tokens_per_s)
        worker.core.use_peers(prefixes)
        return prefixes

    def job(self, prompt: list[int], prefill: Worker, decode: Worker, source: Worker | None = None) -> Job:
        self._num_asked += 1
        name = RequestId(f"r{self._num_asked}")
        route = Route(name, Epoch(1), prefill.ref, decode.ref, source.ref if source else None)
        return Job(route, GATEWAY, prompt, GREEDY, DEADLINE_S)

    def ask(self, job: Job, until: Callable[[], object] = lambda: False) -> Answer:
        """Return the answer, or what there is of it once `until` holds."""
        parts = {job.route.prefill.worker_id, job.route.decode.worker_id}
        for worker in self.workers.values():
            if worker.ref.worker_id in parts:
                worker.front.inbox.append(Work([job], time.monotonic()))
        answer, is_over, deadline = Answer([], -1), False, time.monotonic() + DEADLINE_S
        while not (is_over and self.is_idle()) and not until():
            assert time.monotonic() < deadline, f"no end: {answer}, {self.counters()}"
            for event in self.turn():
                match event:
                    case Tokens():
                        answer.tokens += [token.token_id for token in event.tokens]
                    case Prefilled():
                        answer.cached = event.cached_tokens
                    case Failed():
                        raise AssertionError(event.message)
                    case Finished():
                        is_over = True
        return answer

    def turn(self) -> list:
        events = []
        for role, worker in self.workers.items():
            if role not in self.silent:
                worker.core.turn()
                frames = [message for message in worker.front.heard if isinstance(message, CoreFrame)]
                events += [event for frame in frames for event in frame.events.get(GATEWAY, [])]
                worker.front.heard.clear()
        return events

    def is_idle(self) -> bool:
        return all(
            self.prefixes[role].is_idle() and worker.is_idle()
            for role, worker in self.workers.items()
            if role not in self.silent
        )

    def counters(self) -> dict[str, float]:
        """Return those of the worker that pulls."""
        return self.prefixes[WorkerRole.PREFILL].counters()

    def assert_clean(self) -> None:
        """Raise AssertionError if a page is lost, or held by nobody."""
        for worker in self.workers.values():
            worker.engine.check()
            assert worker.engine.pool.num_held == 0
            assert worker.engine.sequences.count(Status.RESERVED) == 0

    def close(self) -> None:
        for worker in self.workers.values():
            worker.node.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(params=["shm", "tcp"])
def transfer(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pool(model: str, transfer: str) -> Iterator[Pool]:
    """Yield a prefill worker, which pulls, and a mixed one, from which it does."""
    pool = Pool(model, transfer, WorkerRole.PREFILL, WorkerRole.MIXED)
    prefill, mixed = (pool.workers[role] for role in (WorkerRole.PREFILL, WorkerRole.MIXED))
    until(lambda: prefill.node.ensure_link(mixed.ref) and mixed.node.ensure_link(prefill.ref))
    yield pool
    pool.close()


def first_turn(pool: Pool) -> list[int]:
    """Return the prompt of the second turn of a conversation, whose first the mixed worker has answered."""
    mixed = pool.workers[WorkerRole.MIXED]
    return [*PROMPT, *pool.ask(pool.job(PROMPT, mixed, mixed)).tokens, *NEXT]


def second_turn(pool: Pool, prompt: list[int]) -> Job:
    prefill, mixed = pool.workers[WorkerRole.PREFILL], pool.workers[WorkerRole.MIXED]
    return pool.job(prompt, prefill, mixed, mixed)


@pytest.fixture(scope="module")
def expected(model: str) -> Callable[[list[int]], list[int]]:
    """Return a function that gives the answer of a worker which computes all of a prompt."""

    def answer(prompt: list[int]) -> list[int]:
        pool = Pool(model, "tcp", WorkerRole.MIXED)
        mixed = pool.workers[WorkerRole.MIXED]
        try:
            return pool.ask(pool.job(prompt, mixed, mixed)).tokens
        finally:
            pool.close()

    return answer


def test_prompt_and_answer_come_from_who_decoded(pool: Pool, expected: Callable[[list[int]], list[int]]) -> None:
    prompt = first_turn(pool)
    answer = pool.ask(second_turn(pool, prompt))
    num_blocks = (len(PROMPT) + GREEDY.max_tokens - 1) // BLOCK
    assert answer.cached == num_blocks * BLOCK
    assert answer.tokens == expected(prompt)
    assert pool.counters()["kv_peer_hit_blocks"] == num_blocks
    assert pool.counters()["kv_peer_loads"] == 1
    pool.assert_clean()
    again = pool.ask(second_turn(pool, prompt))  # nothing is missing: nobody is asked
    assert (again.tokens, pool.counters()["kv_peer_loads"]) == (answer.tokens, 1)


@pytest.mark.parametrize("tokens_per_s", [FAST, UNKNOWN])
def test_what_is_not_worth_it_is_not_pulled(pool: Pool, tokens_per_s: float) -> None:
    prompt = first_turn(pool)
    pool.tokens_per_s = tokens_per_s
    assert pool.ask(second_turn(pool, prompt)).cached == 0
    assert sum(pool.counters()[f"kv_peer_{name}"] for name in ("loads", "refused", "given_up", "failed")) == 0
    pool.assert_clean()


def test_nobody_waits_for_a_peer_that_has_nothing(pool: Pool, expected: Callable[[list[int]], list[int]]) -> None:
    answer = pool.ask(second_turn(pool, PROMPT))
    assert (answer.tokens, answer.cached) == (expected(PROMPT), 0)
    assert pool.counters()["kv_peer_refused"] == 1
    pool.assert_clean()


def test_a_peer_that_does_not_answer_is_given_up(pool: Pool) -> None:
    """Its late offer is refused, nothing of the pull stays at either end, and no other peer is thought slow for it."""
    prompt = first_turn(pool)
    pool.tokens_per_s = 1000.0
    pool.silent = {WorkerRole.MIXED}
    job = second_turn(pool, prompt)
    pool.ask(job, until=lambda: is_computing(pool))
    assert pool.counters()["kv_peer_given_up"] == 1
    late_s = pool.workers[WorkerRole.PREFILL].engine.sequences[attempt_key(*_id(job))].late_s
    assert late_s >= MAX_DELAY_SHARE * len(prompt) / 1000, "tiers here may not take their tenth as well"
    assert job.route.source is not None
    rate_of = pool.prefixes[WorkerRole.PREFILL]._puller._rate_of
    silent, another = rate_of(job.route.source.worker_id), rate_of(WorkerId("another"))
    assert silent.nbytes_per_s < another.nbytes_per_s == HOST_PACE.nbytes_per_s
    pool.silent = set()
    pool.ask(pool.job(NEXT, pool.workers[WorkerRole.MIXED], pool.workers[WorkerRole.MIXED]))
    pool.assert_clean()


def _id(job: Job) -> AttemptId:
    return job.request_id, job.epoch


def is_computing(pool: Pool) -> bool:
    return pool.workers[WorkerRole.PREFILL].engine.has_work()


def test_a_cancel_in_the_middle_leaves_nothing(pool: Pool) -> None:
    prompt = first_turn(pool)
    job, prefill = second_turn(pool, prompt), pool.workers[WorkerRole.PREFILL]
    pool.ask(job, until=lambda: prefill.engine.sequences.count(Status.RESERVED))
    for worker in pool.workers.values():
        worker.front.inbox.append(Work([Cancel(job.request_id, job.epoch, "the client left")], time.monotonic()))
    pool.turn()
    pool.ask(pool.job(NEXT, pool.workers[WorkerRole.MIXED], pool.workers[WorkerRole.MIXED]))
    assert not is_computing(pool) and len(prefill.ledger) == 0
    pool.assert_clean()


def granted(pool: Pool, job: Job) -> tuple[PrefixPuller, Pull]:
    """Ask until the pull of a job has its pages, and return it: what is sent for it has not been looked at yet."""
    pool.tokens_per_s = SLOW / 100  # however busy the machine is, it does not fall behind
    pool.ask(job, until=lambda: pool.workers[WorkerRole.PREFILL].engine.sequences.count(Status.RESERVED))
    puller = pool.prefixes[WorkerRole.PREFILL]._puller
    (pull,) = puller._open.values()
    return puller, pull


def hear(pool: Pool, puller: PrefixPuller, offer: Offer) -> None:
    event = MessageReceived(pool.workers[WorkerRole.MIXED].ref.worker_id, offer)
    assert puller.takes(event, time.monotonic())


def finish(pool: Pool) -> list[int]:
    """Return the tokens of the answer under way."""
    tokens, is_over, deadline = list[int](), False, time.monotonic() + DEADLINE_S
    while not is_over:
        assert time.monotonic() < deadline
        for event in pool.turn():
            tokens += [token.token_id for token in event.tokens] if isinstance(event, Tokens) else []
            is_over = is_over or isinstance(event, Finished)
    return tokens


def test_pages_that_a_peer_writes_to_behind_its_last_chunk_are_held(
    pool: Pool, expected: Callable[[list[int]], list[int]]
) -> None:
    """It sends more than it said: that is being written as the pull is committed."""
    prompt = first_turn(pool)
    prefill, mixed = pool.workers[WorkerRole.PREFILL], pool.workers[WorkerRole.MIXED]
    _, pull = granted(pool, second_turn(pool, prompt))
    link = prefill.node._table.incoming(mixed.ref.worker_id)
    assert link is not None and pull.reservation is not None and link.grants.enter(pull.id)
    assert finish(pool) == expected(prompt)
    assert pool.counters()["kv_peer_load_seconds"] > 0 == pool.counters()["kv_peer_loads"]
    assert prefill.engine.pool.num_held == len(pull.reservation.blocks)
    assert link.grants.leave(pull.id)
    link._on_drained(pull.id)
    until(lambda: pool.turn() is not None and pool.is_idle())
    assert pool.counters()["kv_peer_loads"] == 1
    pool.assert_clean()


@pytest.mark.parametrize("num_more", [BLOCK, 0, -1, -BLOCK])
def test_a_second_offer_of_other_than_fewer_blocks_that_tiers_had_ends_a_pull(
    pool: Pool, num_more: int, expected: Callable[[list[int]], list[int]]
) -> None:
    """All of the first one was ready: nothing of it may be missing."""
    prompt = first_turn(pool)
    puller, pull = granted(pool, second_turn(pool, prompt))
    assert pull.offer is not None
    hear(pool, puller, msgspec.structs.replace(pull.offer, num_tokens=pull.offer.num_tokens + num_more))
    assert pool.counters()["kv_peer_failed"] == 1
    assert finish(pool) == expected(prompt)
    until(lambda: pool.turn() is not None and pool.is_idle())
    pool.assert_clean()


def test_a_second_offer_of_fewer_blocks_ends_a_pull_with_what_came(
    pool: Pool, expected: Callable[[list[int]], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its first chunk, which was all that was ready."""
    prompt = first_turn(pool)
    server, mixed = pool.prefixes[WorkerRole.MIXED]._server, pool.workers[WorkerRole.MIXED]
    offer_of, send, num_sent = server._offer_of, mixed.node.send_chunk, 8 * BLOCK
    monkeypatch.setattr(
        server, "_offer_of", lambda *facts: msgspec.structs.replace(offer_of(*facts), num_ready=num_sent)
    )
    monkeypatch.setattr(
        mixed.node,
        "send_chunk",
        lambda *facts, **named: facts[3] or send(*facts, **named),  # that of index 0
    )
    puller, pull = granted(pool, second_turn(pool, prompt))
    assert pull.offer is not None
    hear(pool, puller, msgspec.structs.replace(pull.offer, num_tokens=num_sent))
    assert finish(pool) == expected(prompt)
    until(lambda: pool.turn() is not None and pool.is_idle())
    assert pool.counters()["kv_peer_failed"] == 0 and pool.counters()["kv_peer_hit_blocks"] == 8
    pool.assert_clean()


@pytest.mark.parametrize("num_ready", [-BLOCK, 5, 4096])
def test_an_offer_of_which_nonsense_is_ready_is_refused(
    pool: Pool, num_ready: int, expected: Callable[[list[int]], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = first_turn(pool)
    server = pool.prefixes[WorkerRole.MIXED]._server
    offer_of = server._offer_of
    monkeypatch.setattr(
        server, "_offer_of", lambda *facts: msgspec.structs.replace(offer_of(*facts), num_ready=num_ready)
    )
    answer = pool.ask(second_turn(pool, prompt))
    assert (answer.tokens, answer.cached, pool.counters()["kv_peer_failed"]) == (expected(prompt), 0, 1)
    pool.assert_clean()


def test_an_offer_that_is_late_for_a_pull_that_was_given_up_is_refused(pool: Pool) -> None:
    prompt = first_turn(pool)
    job = second_turn(pool, prompt)
    puller, pull = granted(pool, job)
    assert pull.offer is not None
    for worker in pool.workers.values():
        worker.front.inbox.append(Work([Cancel(job.request_id, job.epoch, "the client left")], time.monotonic()))
    until(lambda: pool.turn() is not None and pool.is_idle())
    hear(pool, puller, pull.offer)
    assert pool.prefixes[WorkerRole.PREFILL].is_idle()
    pool.assert_clean()


def test_without_room_it_is_computed_in_its_turn(pool: Pool) -> None:
    prompt = first_turn(pool)
    engine = pool.workers[WorkerRole.PREFILL].engine
    taken = engine.pool.allocate(engine.pool.num_available - 3)
    job = second_turn(pool, prompt)
    pool.ask(job, until=lambda: pool.counters()["kv_peer_failed"])
    engine.pool.release(taken)
    while not pool.is_idle():
        pool.turn()
    pool.assert_clean()


@pytest.mark.parametrize("num_chunks", [0, 1])
def test_a_peer_that_dies_in_the_middle(
    pool: Pool,
    num_chunks: int,
    expected: Callable[[list[int]], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What came before is kept, the rest is computed, and the answer goes on at the worker that computed it."""
    prompt = first_turn(pool)
    mixed, prefill = pool.workers[WorkerRole.MIXED], pool.workers[WorkerRole.PREFILL]
    server = pool.prefixes[WorkerRole.MIXED]._server
    send, sent = mixed.node.send_chunk, []

    def send_some(*facts: object, **named: object) -> None:
        if len(sent) < num_chunks:
            sent.append(facts)
            send(*facts, **named)  # type: ignore[arg-type]

    def grant_and_die(id_: tuple, grant: Grant) -> None:
        monkeypatch.setattr(mixed.node, "send_chunk", send_some)
        on_grant(id_, grant)

    on_grant = server._on_grant
    monkeypatch.setattr(server, "_on_grant", grant_and_die)
    job = pool.job(prompt, prefill, prefill, mixed)
    pool.ask(job, until=lambda: len(sent) == num_chunks and prefill.engine.sequences.count(Status.RESERVED))
    deadline = time.monotonic() + DEADLINE_S
    while num_chunks and not next(iter(pool.prefixes[WorkerRole.PREFILL]._puller._open.values())).chunks.num_chunks:
        assert time.monotonic() < deadline
        pool.turn()
    mixed.node.close()
    pool.silent = {WorkerRole.MIXED}
    tokens: list[int] = []
    while not pool.is_idle() or not tokens:
        assert time.monotonic() < deadline
        for event in pool.turn():
            tokens += [token.token_id for token in event.tokens] if isinstance(event, Tokens) else []
    assert tokens == expected(prompt)
    assert pool.counters()["kv_peer_hit_blocks"] == 8 * num_chunks
    assert pool.counters()["kv_peer_failed"] == 1
    prefill.engine.check()
    assert prefill.engine.pool.num_held == 0


def test_a_worker_of_another_model_gives_nothing(
    model: str, tmp_path_factory: pytest.TempPathFactory, expected: Callable[[list[int]], list[int]]
) -> None:
    """No link to it comes up, and no prompt waits for one."""
    other = str(save_tiny(tmp_path_factory.mktemp("other"), seed=1))
    pool, foreign = Pool(model, "tcp", WorkerRole.PREFILL), Worker(WorkerRole.MIXED, other, "tcp", "secret")
    prefill = pool.workers[WorkerRole.PREFILL]
    answer = pool.ask(pool.job(PROMPT, prefill, prefill, foreign))
    assert (answer.tokens, answer.cached) == (expected(PROMPT), 0)
    until(lambda: prefill.node.bad_paths == (foreign.ref.incarnation,) and pool.turn() is not None)
    assert not prefill.node.ensure_link(foreign.ref)
    pool.assert_clean()
    pool.close()
    foreign.node.close()


def test_a_link_for_reuse_that_is_refused_ends_no_other(
    model: str, transfer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill worker that takes no more links keeps the one on which it hands over."""
    pool = Pool(model, transfer, WorkerRole.PREFILL, WorkerRole.MIXED)
    prefill, mixed = (pool.workers[role] for role in (WorkerRole.PREFILL, WorkerRole.MIXED))

    def refuse(*facts: object) -> None:
        raise Overloaded("no room for another peer")

    monkeypatch.setattr(prefill.node._table, "place", refuse)
    before = pool.ask(pool.job(PROMPT, prefill, mixed))
    until(lambda: mixed.node.ensure_link(prefill.ref) or prefill.ref.incarnation in mixed.node.bad_paths)
    assert not mixed.node.ensure_link(prefill.ref) and prefill.node.ensure_link(mixed.ref)
    prompt = [*PROMPT, *before.tokens, *NEXT]
    assert pool.ask(pool.job(prompt, prefill, mixed, mixed)).cached == len(PROMPT) // BLOCK * BLOCK
    assert pool.counters()["kv_peer_refused"] == 1
    pool.assert_clean()
    pool.close()
