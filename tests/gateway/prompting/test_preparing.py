"""What comes before placement, and what waits for it: prompts and grammars that take long, a registry that is away."""

import asyncio
import threading

import pytest

from contracts.errors import Unavailable
from contracts.ids import Epoch, RequestId
from contracts.request import Cancel, Job, Route
from contracts.sampling import SamplingParams
from gateway.tokenization.tokenizer import HUGE_CHARS
from tests.gateway.gateway_rig import GATEWAY, gateway, pair
from tests.waiting import async_until

pytestmark = pytest.mark.slow


def asked(length: int, **options) -> dict:
    return {"prompt": "one", "max_tokens": 4, "structured_outputs": {"regex": f"[a-z]{{{length}}}"}} | options


class Trying:
    """Trials that go on until they are told to end."""

    def __init__(self, rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.may_end = threading.Event()
        monkeypatch.setattr(rig.front.prompting.trials, "_tried", self._try)

    def _try(self, question) -> str:
        self.seen.append(question.grammar)
        assert self.may_end.wait(60)
        return ""


@pytest.fixture
def trying(rig, monkeypatch):
    found = Trying(rig, monkeypatch)
    yield found
    found.may_end.set()


async def test_a_request_ends_in_its_time_whatever_grammars_others_bring(checkpoint, monkeypatch):
    async with gateway(checkpoint, pair(), request_timeout_s=1.0) as rig, rig.client() as client:
        trying = Trying(rig, monkeypatch)
        replies = await asyncio.gather(*(client.post("/v1/completions", json=asked(length)) for length in range(3, 9)))
        trying.may_end.set()
        assert {reply.status_code for reply in replies} == {504}
        assert "grammar took longer than 1 s" in replies[0].json()["error"]["message"]
        assert len(trying.seen) == 1, "what nobody waits for is not begun"


async def test_a_grammar_whose_client_left_is_not_tried(rig, client, trying):
    staying = asyncio.create_task(client.post("/v1/completions", json=asked(3)))
    await async_until(lambda: trying.seen)
    leaving = [asyncio.create_task(client.post("/v1/completions", json=asked(length))) for length in range(4, 9)]
    await async_until(lambda: rig.front.prompting.trials.thread._work_queue.qsize() == 5)
    for task in leaving:
        task.cancel()
    left = rig.front.metrics.requests.labels("disconnected")
    await async_until(lambda: left._value.get() == 5)
    trying.may_end.set()
    assert (await staying).status_code == 200
    assert len(trying.seen) == 1


@pytest.mark.parametrize("path", ["tokenize", "detokenize"])
async def test_a_huge_text_whose_client_left_keeps_no_others_waiting(rig, client, path):
    """They are tokenized one at a time: six of 5 MB that nobody waited for kept the next one waiting for 50 s."""
    huge, may_end = rig.front.prompting._huge, threading.Event()
    huge.submit(may_end.wait, 60)
    body = {"prompt": "a" * (HUGE_CHARS + 1)} if path == "tokenize" else {"tokens": [5] * (HUGE_CHARS + 1)}
    leaving = asyncio.create_task(client.post(f"/{path}", json=body))
    await async_until(lambda: huge._work_queue.qsize() == 1)
    leaving.cancel()
    left = rig.front.metrics.requests.labels("disconnected")
    await async_until(lambda: left._value.get() == 1)
    may_end.set()


async def test_a_grammar_that_is_known_waits_for_none_that_are_tried(rig, client, monkeypatch):
    assert (await client.post("/v1/completions", json=asked(2))).status_code == 200
    trying = Trying(rig, monkeypatch)
    others = [asyncio.create_task(client.post("/v1/completions", json=asked(length))) for length in range(3, 9)]
    await async_until(lambda: rig.front.prompting.trials.thread._work_queue.qsize() == 5)
    assert (await client.post("/v1/completions", json=asked(2))).status_code == 200
    trying.may_end.set()
    assert {reply.status_code for reply in await asyncio.gather(*others)} == {200}


async def test_a_grammar_that_is_tried_ends_with_the_gateway(rig, client):
    """The interpreter waits for its threads at the end."""
    prompting = rig.front.prompting
    assert (await client.post("/v1/completions", json=asked(3))).status_code == 200
    patterns = [{"type": "string", "pattern": f"a{{0,{index}}}.*"} for index in range(30)]
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"allOf": patterns}}}
    endless = {"prompt": "one", "max_tokens": 4, "response_format": schema}
    asking = asyncio.create_task(client.post("/v1/completions", json=endless))
    await async_until(lambda: prompting.trials.thread._work_queue.qsize() == 0 and prompting.trials._lock.locked())
    prompting.close()
    await async_until(lambda: not prompting.trials._lock.locked())
    assert (await asking).status_code == 400


async def test_a_choice_that_waits_for_a_place_outlives_a_registry_that_is_away(checkpoint, monkeypatch):
    async with gateway(checkpoint, pair(period_s=0.02)) as rig, rig.client() as client:
        rig.store.room, place, num_away = 1, rig.store.place, 0

        async def away(*args):
            nonlocal num_away
            num_away += 1
            raise Unavailable("Redis does not answer")

        body = {"prompt": "one two", "max_tokens": 100, "n": 2}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await rig.until(lambda: rig.workers[1].num_running == 1)
        monkeypatch.setattr(rig.store, "place", away)
        await rig.until(lambda: num_away >= 2)
        monkeypatch.setattr(rig.store, "place", place)
        reply = await asking
        assert reply.status_code == 200 and len(reply.json()["choices"]) == 2


async def test_a_choice_that_waits_for_a_place_does_not_wait_for_ever(checkpoint, monkeypatch):
    monkeypatch.setattr("gateway.serving.generation_run.REPLAY_WAIT_S", 0.0)
    async with gateway(checkpoint, pair(period_s=0.02)) as rig, rig.client() as client:
        rig.store.room = 1

        async def away(*args):
            raise Unavailable("Redis does not answer")

        body = {"prompt": "one two", "max_tokens": 1500, "n": 2}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        await rig.until(lambda: rig.workers[1].num_running == 1)
        monkeypatch.setattr(rig.store, "place", away)
        assert (await asking).status_code == 503


async def test_a_worker_that_does_not_speak_to_us_gets_cancels_and_no_job(rig, monkeypatch):
    """It may not have missed the former stream, and would answer into that one."""
    monkeypatch.setattr("gateway.dispatch.worker_link.CONNECT_TIMEOUT_S", 0.01)
    worker, workers = rig.workers[0], rig.front.dispatch.workers
    ref = worker.node.info.ref
    job = Job(Route(RequestId("r"), Epoch(1), ref, ref), GATEWAY, [1], SamplingParams(max_tokens=1, seed=0), 10.0)
    workers._links[ref.worker_id]._opened.clear()
    cancel = Cancel(RequestId("other"), Epoch(1), "left")
    refused, taken = await asyncio.gather(workers.send(ref, job), workers.send(ref, cancel), return_exceptions=True)
    assert isinstance(refused, Unavailable) and taken is None
    assert worker.jobs == [] and worker.cancels == [cancel]
