"""Running answers move between engine cores, with real engines and links: each goes on exactly once, as if unmoved."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from contracts.errors import Corrupt, OutOfBlocks
from contracts.events import Event, Failed, Finished, Moved, Token, Tokens
from contracts.ids import Epoch, RequestId
from contracts.layout import KVGroup
from contracts.node import WorkerRole
from contracts.request import Cancel, CancelMigration, Job, JobMessage, Route
from contracts.sampling import SamplingParams
from engine.loader import load_engine
from engine.speculative.choice import PROPOSERS
from tests.e2e.tiny import VOCAB, save_tiny
from tests.engine.driving import drain, greedy, random_prompts, request, settings
from tests.engine.speculative.drafting import KnowingProposer
from tests.path.cores import GATEWAY, Worker
from worker.handoff import migration_source
from worker.messages import CoreFrame, Work

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
LENGTH = 120
SAMPLINGS: dict[str, SamplingParams] = {
    "greedy": greedy(LENGTH),
    "drawn": greedy(LENGTH, temperature=1.1, seed=5, top_p=0.9, logprobs=2),
    "second of two": greedy(LENGTH, temperature=1.1, seed=5, choice=1),
    "penalised": greedy(LENGTH, temperature=0.7, seed=6, frequency_penalty=1.5, presence_penalty=0.5),
}
PROMPTS = dict(zip(SAMPLINGS, random_prompts(VOCAB, (37, 64, 5, 90)), strict=True))


class Movers:
    """Workers in one process, and what a gateway hears of them. `besides`: see Worker."""

    def __init__(
        self,
        model: str,
        roles: tuple[WorkerRole, ...],
        besides: Sequence[Sequence[KVGroup]] = ((), (), ()),
        **changes: Any,
    ) -> None:
        secret, names = secrets.token_hex(8), "abc"
        self.workers = [
            Worker(role, model, "tcp", secret, worker_id=name, beside=beside, **changes)
            for name, role, beside in zip(names, roles, besides, strict=False)
        ]
        self.events: list[tuple[Worker, Event]] = []

    def turn(self) -> None:
        for worker in self.workers:
            worker.core.turn()
            for message in worker.front.heard:
                if isinstance(message, CoreFrame):
                    self.events += [(worker, event) for event in message.events.get(GATEWAY, [])]
            worker.front.heard.clear()

    def until(self, is_so: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline, [event for _, event in self.events[-5:]]
            self.turn()

    def post(self, message: JobMessage, *workers: Worker) -> None:
        for worker in workers:
            worker.front.inbox.append(Work([message], time.monotonic()))

    def begin(self, name: str, source: Worker, sampling: SamplingParams | None = None) -> Job:
        return self.begin_with(name, PROMPTS[name], source, sampling or SAMPLINGS[name])

    def begin_with(self, name: str, prompt: list[int], source: Worker, sampling: SamplingParams) -> Job:
        route = Route(RequestId(name), Epoch(1), source.ref, source.ref)
        job = Job(route, GATEWAY, prompt, sampling, DEADLINE_S)
        self.post(job, source)
        return job

    def move(self, job: Job, source: Worker, destination: Worker, epoch: int = 2) -> Job:
        """Ask for the migration of an answer behind the tokens that were read."""
        route = Route(job.request_id, Epoch(epoch), source.ref, destination.ref)
        answered = [token.token_id for token in self.tokens(job.request_id)]
        prompt = job.token_ids[: len(job.token_ids) - job.num_answered]
        token_ids = [*prompt, *answered]
        moving = replace_job(job, route=route, token_ids=token_ids, num_answered=len(answered), is_migration=True)
        self.post(moving, source, destination)
        return moving

    def tokens(self, name: str, epoch: int | None = None) -> list[Token]:
        """The tokens in order, each as it was first read; those that came again are the same."""
        found: dict[int, Token] = {}
        for event in self.of(Tokens, name, epoch):
            for token in event.tokens:
                assert found.setdefault(token.index, token) == token
        return [found[index] for index in sorted(found)]

    def of(self, kind: type, name: str, epoch: int | None = None) -> list:
        events = (event for _, event in self.events if isinstance(event, kind) and event.request_id == name)
        return [event for event in events if epoch in (None, event.epoch)]

    def has(self, name: str, num_tokens: int) -> bool:
        return len(self.tokens(name)) >= num_tokens

    def is_over(self, name: str) -> bool:
        return bool(self.of(Finished, name))

    def is_clean(self) -> bool:
        return all(worker.core._status.report().is_clean for worker in self.workers)


def replace_job(job: Job, **changes) -> Job:
    return Job(**{name: getattr(job, name) for name in Job.__struct_fields__} | changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, list[Token]]:
    engine = load_engine(settings(model=model))
    for name, sampling in SAMPLINGS.items():
        engine.submit(request(name, PROMPTS[name], sampling))
    told = [sampled for output in drain(engine) for sampled in output.sampled]
    return {name: [each.token for each in told if each.request_id == name] for name in SAMPLINGS}


@pytest.fixture(
    params=[(WorkerRole.DECODE, WorkerRole.DECODE), (WorkerRole.MIXED, WorkerRole.MIXED)], ids=["decode", "mixed"]
)
def movers(request: pytest.FixtureRequest, model: str) -> Iterator[Movers]:
    yield from _made(model, request.param)


@pytest.fixture
def guessing(model: str, expected: dict[str, list[Token]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Movers]:
    """Workers whose drafter knows six tokens of ten: of more the answers would end before they have moved back."""
    monkeypatch.setitem(PROPOSERS, "suffix", KnowingProposer)
    monkeypatch.setattr(KnowingProposer, "wrong", 0.4)
    monkeypatch.setattr(KnowingProposer, "vocab", VOCAB)
    KnowingProposer.answers = {
        tuple(PROMPTS[name]): [token.token_id for token in answer] for name, answer in expected.items()
    }
    yield from _made(model, (WorkerRole.DECODE, WorkerRole.DECODE), speculate="suffix", draft_tokens=2)


@pytest.fixture
def pair(model: str) -> Iterator[Movers]:
    yield from _made(model, (WorkerRole.DECODE, WorkerRole.DECODE))


def _made(model: str, roles: tuple[WorkerRole, ...], **changes: Any) -> Iterator[Movers]:
    made = Movers(model, roles, **changes)
    yield made
    for worker in made.workers:
        worker.node.close()


def is_same(found: list[Token], expected: list[Token]) -> bool:
    assert [(token.index, token.token_id) for token in found] == [(token.index, token.token_id) for token in expected]
    assert [token.logprob for token in found] == pytest.approx([token.logprob for token in expected], abs=1e-4)
    return True


def test_answers_move_there_and_back_and_are_those_that_never_moved(movers: Movers, expected: dict[str, list[Token]]):
    move_there_and_back(movers, expected)


def test_answers_that_are_guessed_move_as_well(guessing: Movers, expected: dict[str, list[Token]]):
    move_there_and_back(guessing, expected)
    accepted = [sum(worker.engine.stats().num_accepted_by_place) for worker in guessing.workers]
    assert all(accepted), "guesses were right on both workers"


def move_there_and_back(movers: Movers, expected: dict[str, list[Token]]) -> None:
    a, b = movers.workers
    jobs = {name: movers.begin(name, a) for name in SAMPLINGS}
    movers.until(lambda: all(movers.has(name, 10) for name in jobs))
    moving = {name: movers.move(job, a, b) for name, job in jobs.items()}
    movers.until(lambda: all(movers.of(Moved, name, 1) and movers.of(Tokens, name, 2) for name in jobs))
    movers.until(lambda: all(movers.has(name, 60) for name in jobs))
    for job in moving.values():
        movers.move(job, b, a, epoch=3)
    movers.until(lambda: all(movers.is_over(name) for name in jobs))
    for name in jobs:
        assert is_same(movers.tokens(name), expected[name])
        assert [(end.epoch, end.num_tokens) for end in movers.of(Finished, name)] == [(3, LENGTH)]
        assert len(movers.of(Moved, name)) == 2 and not movers.of(Failed, name)
    movers.until(movers.is_clean)
    assert [worker.counters()["migrations_committed"] for worker in (a, b)] == [4, 4]


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 5, 8])
def test_a_source_whose_migration_is_given_up_keeps_the_answer_or_says_that_it_left(
    pair: Movers, expected: dict[str, list[Token]], num_turns: int
):
    a, b = pair.workers
    job = pair.begin("drawn", a)
    pair.until(lambda: pair.has("drawn", 20))
    pair.move(job, a, b)
    for _ in range(num_turns):
        pair.turn()
    pair.post(CancelMigration(job.request_id, Epoch(2), "given up"), a)
    pair.post(Cancel(job.request_id, Epoch(2), "given up"), b)
    pair.until(lambda: pair.of(Moved, "drawn", 1) or pair.of(Finished, "drawn", 1))
    pair.until(pair.is_clean)
    assert len(pair.of(Moved, "drawn", 1)) + len(pair.of(Finished, "drawn", 1)) == 1
    if pair.of(Finished, "drawn", 1):
        assert is_same(pair.tokens("drawn", 1), expected["drawn"])


def test_what_is_cancelled_while_it_moves_leaves_nothing_behind(pair: Movers):
    a, b = pair.workers
    for num_turns in range(6):
        job = pair.begin("greedy", a)
        pair.until(lambda: pair.tokens("greedy"))
        pair.move(job, a, b)
        for _ in range(num_turns):
            pair.turn()
        pair.post(Cancel(job.request_id, Epoch(2), "its client left"), b)
        pair.post(Cancel(job.request_id, Epoch(1), "its client left"), a)
        pair.until(pair.is_clean)
        pair.events.clear()


def test_a_destination_that_dies_before_the_commit_leaves_the_answer_at_its_source(
    pair: Movers, expected: dict[str, list[Token]]
):
    a, b = pair.workers
    job = pair.begin("penalised", a)
    pair.until(lambda: pair.has("penalised", 20))
    pair.move(job, a, b)
    pair.workers = [a]  # the other makes no turn: it never grants
    for _ in range(5):
        pair.turn()
    b.node.close()
    pair.until(lambda: pair.is_over("penalised"))
    assert pair.of(Failed, "penalised", 2) and not pair.of(Moved, "penalised")
    assert is_same(pair.tokens("penalised"), expected["penalised"])
    pair.until(pair.is_clean)


def test_after_fin_the_gateway_decides(pair: Movers, expected: dict[str, list[Token]]):
    """The destination has all and dies: the source goes on once it is told to, and not by itself."""
    a, b = pair.workers
    job = pair.begin("drawn", a)
    pair.until(lambda: pair.has("drawn", 20))
    pair.move(job, a, b)
    (source,) = (role for role in a.roles if isinstance(role, migration_source.MigrationSource))
    pair.until(
        lambda: source.counters()["migrations_begun"] and all(m.handoff.is_granted for m in source._migrations.values())
    )
    pair.workers = [a]
    pair.until(lambda: all(m.handoff.is_sent for m in source._migrations.values()))
    b.node.close()
    pair.until(lambda: len(pair.of(Failed, "drawn", 2)) > 1)  # reported until it is answered
    num_tokens = len(pair.tokens("drawn"))
    assert num_tokens < LENGTH and not a.engine.has_work()
    pair.post(CancelMigration(job.request_id, Epoch(2), "given up"), a)
    pair.until(lambda: pair.is_over("drawn"))
    assert is_same(pair.tokens("drawn"), expected["drawn"])
    pair.until(pair.is_clean)


def test_a_destination_that_can_not_take_over_what_came_leaves_the_answer_at_its_source(
    pair: Movers, expected: dict[str, list[Token]], monkeypatch: pytest.MonkeyPatch
):
    """Nothing says before that the answer has moved: the gateway tells the source to keep it."""

    def adopt(*_: object) -> None:
        raise Corrupt("tokens that do not follow")

    a, b = pair.workers
    monkeypatch.setattr(b.engine, "adopt", adopt)
    job = pair.begin("drawn", a)
    pair.until(lambda: pair.has("drawn", 20))
    pair.move(job, a, b)
    pair.until(lambda: [worker for worker, event in pair.events if isinstance(event, Failed) and worker is b])
    for _ in range(20):
        pair.turn()
    assert not pair.of(Moved, "drawn")
    pair.post(CancelMigration(job.request_id, Epoch(2), "the destination failed"), a)
    pair.until(lambda: pair.is_over("drawn"))
    assert is_same(pair.tokens("drawn"), expected["drawn"])
    assert [end.epoch for end in pair.of(Finished, "drawn")] == [1]
    pair.until(pair.is_clean)


def test_pages_that_a_source_writes_to_behind_its_fin_are_held(pair: Movers, expected: dict[str, list[Token]]):
    """It sends more than it said: that is being written as the destination takes over."""
    a, b = pair.workers
    job, key = pair.begin("drawn", a), (RequestId("drawn"), Epoch(2))
    pair.until(lambda: pair.has("drawn", 20))
    pair.move(job, a, b)
    pair.until(lambda: (found := b.node._table.incoming(a.ref.worker_id)) and found.grants.find(key))
    link = b.node._table.incoming(a.ref.worker_id)
    assert link is not None and link.grants.enter(key)
    pair.until(lambda: pair.is_over("drawn"))
    assert is_same(pair.tokens("drawn"), expected["drawn"])
    assert b.engine.pool.num_held > 0 == a.engine.pool.num_held
    assert link.grants.leave(key)
    link._on_drained(key)
    pair.until(pair.is_clean)
    assert b.engine.pool.num_held == 0


def test_a_destination_goes_on_alone_with_what_it_has_taken_over(pair: Movers, expected: dict[str, list[Token]]):
    """Its source is lost before Moved is told: the tokens that the destination repeats are all that is needed."""
    a, b = pair.workers
    job = pair.begin("drawn", a)
    pair.until(lambda: pair.has("drawn", 20))
    pair.move(job, a, b)
    pair.until(lambda: pair.of(Tokens, "drawn", 2))
    pair.workers = [b]
    a.node.close()
    pair.until(lambda: pair.is_over("drawn"))
    assert is_same(pair.tokens("drawn"), expected["drawn"])
    pair.until(pair.is_clean)


def test_a_destination_whose_source_is_lost_before_all_has_come_says_so(pair: Movers, monkeypatch: pytest.MonkeyPatch):
    a, b = pair.workers
    monkeypatch.setattr(a.node, "finish", lambda *_: None)  # Fin is lost with it
    job = pair.begin("drawn", a)
    pair.until(lambda: pair.has("drawn", 20))
    pair.move(job, a, b)
    (source,) = (role for role in a.roles if isinstance(role, migration_source.MigrationSource))
    pair.until(lambda: source._migrations and all(m.handoff.is_sent for m in source._migrations.values()))
    pair.workers = [b]
    a.node.close()
    pair.until(lambda: pair.of(Failed, "drawn", 2))
    assert not pair.of(Tokens, "drawn", 2)
    pair.until(pair.is_clean)


def test_what_can_not_move_goes_on(pair: Movers, expected: dict[str, list[Token]], monkeypatch: pytest.MonkeyPatch):
    a, b = pair.workers
    job = pair.begin("greedy", a)
    pair.until(lambda: pair.has("greedy", 10))
    stranger = replace_job(job, route=replace_route(job, "unknown", a, b), is_migration=True)
    late = replace_job(job, route=replace_route(job, "greedy", a, b), is_migration=True)  # it lacks ten tokens
    monkeypatch.setattr(a.core._attempts.get(job.request_id), "recent", [])
    pair.post(stranger, a)
    pair.post(late, a)
    pair.until(lambda: pair.of(Failed, "unknown", 2) and pair.of(Failed, "greedy", 2))
    (failed,) = pair.of(Failed, "greedy", 2)
    assert "its migration begins after 0" in failed.message
    pair.until(lambda: pair.is_over("greedy"))
    assert is_same(pair.tokens("greedy"), expected["greedy"])


def replace_route(job: Job, name: str, source: Worker, destination: Worker) -> Route:
    return Route(RequestId(name), Epoch(2), source.ref, destination.ref)


def test_an_answer_whose_tokens_do_not_fit_a_message_stays(
    pair: Movers, expected: dict[str, list[Token]], monkeypatch: pytest.MonkeyPatch
):
    """A message that is longer than the peer reads would end the link, and every handoff on it."""
    monkeypatch.setattr(migration_source, "MAX_MOVED_NBYTES", 8)
    a, b = pair.workers
    job = pair.begin("drawn", a)
    pair.until(lambda: pair.has("drawn", 20))
    pair.move(job, a, b)
    pair.until(lambda: pair.of(Failed, "drawn", 2))
    assert "do not fit a message" in pair.of(Failed, "drawn", 2)[0].message
    pair.until(lambda: pair.is_over("drawn"))
    assert is_same(pair.tokens("drawn"), expected["drawn"])
    pair.until(pair.is_clean)
    assert a.node.stats()[0].state == "up"


def test_a_destination_without_room_is_given_up(pair: Movers, expected: dict[str, list[Token]]):
    a, b = pair.workers
    with pytest.raises(OutOfBlocks):
        for number in range(1000):
            b.engine.reserve(request(f"other{number}", PROMPTS["drawn"], greedy(8)))
    job = pair.begin("drawn", a)
    pair.until(lambda: pair.has("drawn", 10))
    pair.move(job, a, b)
    pair.until(lambda: pair.of(Failed, "drawn", 2))
    assert any("has no pages for the answer" in failed.message for failed in pair.of(Failed, "drawn", 2))
    pair.until(lambda: pair.is_over("drawn"))
    assert is_same(pair.tokens("drawn"), expected["drawn"])
