"""Two mixed workers, with real engines and links, each of which hands over to the other: neither waits for ever for
pages that the other keeps.
"""

import secrets
import time
from collections.abc import Callable, Iterator

import pytest

from contracts.events import Event, Failed, Finished, Tokens
from contracts.ids import Epoch, RequestId
from contracts.node import WorkerRole
from contracts.request import Job, Route
from engine.loader import load_engine
from tests.e2e.tiny import VOCAB, save_tiny
from tests.engine.driving import answers, greedy, random_prompts, settings
from tests.path.cores import GATEWAY, Worker
from worker.messages import CoreFrame, Work

pytestmark = pytest.mark.slow

SMALL = {"block_size": 64, "kv_cache_mib": 1, "max_batched_tokens": 128, "grant_timeout_s": 0.2}  # 32 blocks
TIMEOUT_S = 600.0
DEADLINE_S = 60.0
NUM_REQUESTS, NUM_TOKENS = 12, 80


class Mixed:
    def __init__(self, model: str) -> None:
        secret = secrets.token_hex(8)
        self.workers = [Worker(WorkerRole.MIXED, model, "tcp", secret, worker_id=name, **SMALL) for name in ("a", "b")]
        self.events: list[Event] = []

    def turn_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline, [worker.core._status.report() for worker in self.workers]
            for worker in self.workers:
                worker.core.turn()
                for message in worker.front.heard:
                    if isinstance(message, CoreFrame):
                        self.events += message.events.get(GATEWAY, [])
                worker.front.heard.clear()

    def job(self, number: int, prompt: list[int]) -> Job:
        """Odd ones go the other way."""
        prefill, decode = self.workers[number % 2], self.workers[1 - number % 2]
        route = Route(RequestId(f"r{number}"), Epoch(1), prefill.ref, decode.ref)
        return Job(route, GATEWAY, prompt, greedy(NUM_TOKENS), TIMEOUT_S)

    def post(self, worker: Worker, jobs: list[Job]) -> None:
        worker.front.inbox.append(Work(list(jobs), time.monotonic()))

    @property
    def ends(self) -> list[Event]:
        return [event for event in self.events if isinstance(event, Finished | Failed)]

    def answer(self, number: int) -> list[int]:
        heard = [event for event in self.events if isinstance(event, Tokens) and event.request_id == f"r{number}"]
        tokens = {token.index: token.token_id for event in heard for token in event.tokens}
        return [token_id for _, token_id in sorted(tokens.items())]


@pytest.fixture
def model(tmp_path) -> str:
    return str(save_tiny(tmp_path))


@pytest.fixture
def mixed(model: str) -> Iterator[Mixed]:
    pair = Mixed(model)
    yield pair
    for worker in pair.workers:
        worker.node.close()


@pytest.mark.parametrize(
    ("lengths", "num_held"), [([640], 3), ([250, 700, 1100, 1800], 2)], ids=["alike", "of all lengths"]
)
def test_pools_full_of_prompts_that_wait_for_each_other_get_empty(
    mixed: Mixed, model: str, lengths: list[int], num_held: int
) -> None:
    """Alike, none fits beside three: neither worker can grant, and what waits is decoded where it is until others fit.
    Beside two of different lengths a short one may.
    """
    prompts = random_prompts(VOCAB, [lengths[number // 2 % len(lengths)] for number in range(NUM_REQUESTS)])
    jobs = [mixed.job(number, prompt) for number, prompt in enumerate(prompts)]
    for worker in mixed.workers:
        mixed.post(worker, [job for job in jobs if job.route.prefill == worker.ref])
    mixed.turn_until(lambda: all(_is_full(worker, num_held) for worker in mixed.workers))
    for worker in mixed.workers:
        mixed.post(worker, [job for job in jobs if job.route.decode == worker.ref])
    mixed.turn_until(lambda: len(mixed.ends) == NUM_REQUESTS)
    assert all(isinstance(end, Finished) for end in mixed.ends)
    is_stuck = len(lengths) == 1
    assert any(worker.counters()["handoffs_local"] for worker in mixed.workers) or not is_stuck
    mixed.turn_until(lambda: all(worker.core._status.report().is_clean for worker in mixed.workers))
    expected = answers(load_engine(settings(model=model)), prompts, greedy(NUM_TOKENS))
    assert [mixed.answer(number) for number in range(NUM_REQUESTS)] == expected


def _is_full(worker: Worker, num_held: int) -> bool:
    """Its prompts leave no room for another, or did: on a slow machine the first has given up waiting by then."""
    return worker.engine.stats().num_held >= num_held or worker.counters()["handoffs_local"] > 0
