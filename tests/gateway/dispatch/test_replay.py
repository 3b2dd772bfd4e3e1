"""An answer whose worker is lost goes on elsewhere: no token is missing or doubled."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest
from msgspec.structs import replace

from contracts.errors import Overloaded, RequestError, Unavailable
from contracts.events import Event, Failed, Finished, FinishReason, Prefilled
from contracts.ids import Epoch, RequestId, WorkerId
from contracts.node import WorkerRole
from contracts.request import Job, Route
from coordinator.store.store import Claim, Claimed
from testing.fake_worker import FakeWorker
from testing.memory_store import MemoryStore
from tests.gateway.gateway_rig import SECRET, Rig, coordinated, gateway, pair

pytestmark = pytest.mark.slow

ASK = {"prompt": "one two three 😀 four five", "max_tokens": 60, "stream": True, "logprobs": 0}
PACE_S = 0.01


def spare(name: str, role: WorkerRole, **options) -> FakeWorker:
    return FakeWorker(WorkerId(name), role, SECRET, period_s=PACE_S, **options)


async def rest(lines: AsyncIterator[str]) -> list[dict]:
    data = [line[6:] async for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


async def whole(client: httpx.AsyncClient, ask: dict) -> dict:
    reply = await client.post("/v1/completions", json=ask | {"stream": False})
    assert reply.status_code == 200
    return reply.json()


@pytest.mark.parametrize(
    ("system", "loss"),
    [("pair", "dies"), ("pair", "breaks"), ("pair", "tells"), ("mixed", "dies"), ("mixed", "breaks")],
)
async def test_an_answer_goes_on_behind_what_was_shown(checkpoint, system, loss):
    workers = (
        [*pair(period_s=PACE_S), spare("d1", WorkerRole.DECODE)]
        if system == "pair"
        else [spare(name, WorkerRole.MIXED) for name in ("m0", "m1")]
    )
    lost = workers[1] if system == "pair" else workers[0]
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        expected = await whole(client, ASK)
        shown = []
        ask = ASK | {"stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=ask) as reply:
            lines = reply.aiter_lines()
            while len(shown) < 7:
                if line := await anext(lines):
                    shown.append(json.loads(line[6:]))
            if loss == "dies":
                await lost.stop()
            elif loss == "breaks":
                lost.break_streams()
            else:
                job = lost.jobs[-1]
                lost.publish(job.gateway_id, [Failed(job.request_id, job.epoch, "corrupt", "chunk 1 arrived broken")])
            shown += await rest(lines)
        usage = shown.pop()["usage"]
        choices = [event["choices"][0] for event in shown]
        assert "".join(choice["text"] for choice in choices) == expected["choices"][0]["text"]
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
        assert tokens == expected["choices"][0]["logprobs"]["tokens"]
        assert choices[-1]["finish_reason"] == "length" and usage == expected["usage"]
        job = next(job for worker in workers for job in worker.jobs if job.epoch > 1)
        assert 7 <= job.num_answered < 60 and job.sampling.max_tokens == 60
        assert rig.front.dispatch.num_replays == 1
        await rig.until(rig.is_idle)


async def test_a_pair_that_lost_its_only_decode_worker_waits_for_it(checkpoint):
    """It comes back under its name, as another incarnation."""
    workers = pair(period_s=PACE_S)
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        expected = await whole(client, ASK)
        asking = asyncio.create_task(whole(client, ASK))
        await rig.until(lambda: rig.front.dispatch.num_answering == 1)
        await workers[1].stop()
        await rig.until(lambda: rig.front.dispatch.num_replays == 1)
        again = spare("d0", WorkerRole.DECODE, incarnation="2", model=checkpoint.name)
        await again.start()
        try:
            workers[1] = again
            assert (await asking)["choices"] == expected["choices"]
        finally:
            await again.stop()
        assert [job.num_answered > 0 for job in again.jobs] == [True]


async def test_an_answer_that_loses_three_workers_is_given_up(checkpoint):
    """What it asks for may be what ends them."""
    workers = [spare(f"m{i}", WorkerRole.MIXED) for i in range(4)]
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK | {"stream": False, "max_tokens": 500}))
        for worker in workers[:3]:
            await rig.until(lambda worker=worker: worker.jobs and _num_new(rig) > 3)
            await worker.stop()
        reply = await asking
        assert reply.status_code == 503 and "lost" in reply.text
        assert not workers[3].jobs


def _num_new(rig: Rig) -> int:
    """Tokens of the current attempts."""
    sequencers = [live.answer.sequencer for live in rig.front.dispatch._live.values()]
    return sum(sequencer.next_index - sequencer.first_index for sequencer in sequencers)


@pytest.mark.parametrize(
    "told",
    [
        Failed(RequestId(""), Epoch(0), "internal", "unheard"),
        Finished(RequestId(""), Epoch(1), 99, FinishReason.LENGTH, {}),
    ],
    ids=["unheard", "wrong"],
)
@pytest.mark.parametrize(("extra", "reason"), [({}, "length"), ({"stop_token_ids": [5]}, "stop")])
async def test_an_answer_that_came_whole_is_not_asked_for_again(checkpoint, monkeypatch, extra, reason, told):
    """The worker that was to say that it had ended was lost, or spoke of more tokens."""
    worker, other = workers = [spare(name, WorkerRole.MIXED, script=[9, 8, 7, 5]) for name in ("m0", "m1")]
    monkeypatch.setattr(worker, "_end", lambda job: replace(told, request_id=job.request_id))
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        ask = ASK | {"stream": False, "max_tokens": 9 if extra else 4} | extra
        asking = asyncio.create_task(client.post("/v1/completions", json=ask))
        await rig.until(lambda: _num_new(rig) == 4)
        await worker.stop()
        body = (await asking).json()
        assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == (reason, 4)
        assert not other.jobs


async def test_the_logprobs_of_a_prompt_are_told_once(checkpoint):
    workers = [spare(name, WorkerRole.MIXED) for name in ("m0", "m1")]
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        ask = ASK | {"stream": False, "prompt_logprobs": 1}
        expected = await whole(client, ask)
        asking = asyncio.create_task(whole(client, ask))
        await rig.until(lambda: _num_new(rig) > 3)
        await workers[0].stop()
        assert (await asking)["choices"] == expected["choices"]
        assert [job.sampling.prompt_logprobs for job in workers[1].jobs] == [None]


class DyingWorker(FakeWorker):
    """Breaks its event stream once, behind the first `num_told` tokens of an answer; 0: when it has the prompt."""

    num_told: int | None = None

    async def _answer(self, job: Job) -> None:
        if self.num_told is None:
            return await super()._answer(job)
        told: list[Event] = [*self._scored(job), Prefilled(job.request_id, job.epoch, 0, {})]
        self.publish(job.gateway_id, told + [self._token(job, index) for index in range(self.num_told)])
        await self._written.wait()
        self.num_told = None
        self.break_streams()


SEAMS: dict[str, dict] = {
    "logprobs": {"logprobs": 1},
    "a stop string": {"stop": ["our fi", "never"], "max_tokens": 40},
    "a stop string that is shown": {"stop": ["our fi"], "include_stop_str_in_output": True, "max_tokens": 40},
    "an end": {"stop_token_ids": [8], "min_tokens": 3},
    "echo": {"echo": True, "logprobs": 2},
    "a prompt's logprobs": {"prompt_logprobs": 1},
    "token ids": {"return_token_ids": True},
    "several answers": {"n": 2, "logprobs": 0},
}


@pytest.mark.parametrize("name", SEAMS)
async def test_no_seam_is_seen_wherever_it_is(checkpoint, monkeypatch, name):
    monkeypatch.setattr("gateway.dispatch.worker_link.RECONNECT_S", 0.01)
    monkeypatch.setattr("gateway.dispatch.dispatcher.REPLAY_PERIOD_S", 0.01)
    script = [9, 8, 7, 5, 8] if name == "an end" else ()
    dying = DyingWorker(WorkerId("m0"), WorkerRole.MIXED, SECRET, script=script)
    workers = [dying, spare("m1", WorkerRole.MIXED, script=script)]
    workers[1].period_s = 0.0
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        ask = {"prompt": ASK["prompt"], "max_tokens": 12, "seed": 1} | SEAMS[name]
        expected = await whole(client, ask)
        for num_told in range(expected["usage"]["completion_tokens"] // len(expected["choices"])):
            await rig.until(lambda: not rig.front.dispatch.workers.silent)
            dying.num_told = num_told
            body = await whole(client, ask)
            assert (body["choices"], body["usage"]) == (expected["choices"], expected["usage"]), num_told
            assert dying.num_told is None and len(workers[1].jobs) > num_told


async def test_the_pause_is_accounted_for(checkpoint):
    workers = [spare(name, WorkerRole.MIXED) for name in ("m0", "m1")]
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(whole(client, ASK))
        await rig.until(lambda: _num_new(rig) > 3)
        (answer,) = (live.answer for live in rig.front.dispatch._live.values())
        await workers[0].stop()
        await asking
        told, span_s = answer.stages_s, (answer.last_s or 0.0) - (answer.first_s or 0.0)
        assert told["replay"] + told["decode"] == pytest.approx(span_s)
        assert told["replay"] in [pytest.approx(gap_s) for gap_s in answer.gaps_s]
        assert answer.servers == {"prefill": "m1", "decode": "m1"}
        assert b'tandem_gateway_stage_seconds_count{stage="replay"} 1.0' in rig.front.metrics.text()
        assert b"tandem_gateway_replays_total 1.0" in rig.front.metrics.text()


async def _deaf(rig: Rig, worker: FakeWorker) -> None:
    """The registry lists it, and it does not speak to us."""
    worker.secret = "another"
    worker.break_streams()
    await rig.until(lambda: worker.worker_id in rig.front.dispatch.workers.silent)


@pytest.mark.parametrize("is_begun", [True, False])
async def test_who_does_not_speak_is_passed_over_from_the_start(checkpoint, monkeypatch, is_begun):
    workers = [spare(f"m{i}", WorkerRole.MIXED) for i in range(3)]
    if not is_begun:
        monkeypatch.setattr(workers[0], "_answer", lambda job: asyncio.sleep(3600))
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(whole(client, ASK))
        await rig.until(lambda: workers[0].jobs and (_num_new(rig) > 3 or not is_begun))
        await _deaf(rig, workers[1])
        await workers[0].stop()
        await asking
        assert [epoch for _, epoch in rig.store.placed] == [1, 2] and workers[2].jobs
        assert rig.front.dispatch.num_replays == is_begun


async def test_nothing_new_is_placed_on_who_does_not_speak(checkpoint):
    """The registry lists a worker that this gateway can't reach, for as long as that lasts."""
    workers = [spare(name, WorkerRole.MIXED) for name in ("m0", "m1")]
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        await _deaf(rig, workers[0])
        await whole(client, ASK)
        assert [epoch for _, epoch in rig.store.placed] == [1] and not workers[0].jobs


async def test_where_nobody_speaks_what_was_not_begun_is_sent_nevertheless(checkpoint, monkeypatch):
    """The gateway itself was deaf for a moment, and all were lost to it."""
    workers = [spare(name, WorkerRole.MIXED) for name in ("m0", "m1")]
    monkeypatch.setattr(workers[0], "_answer", lambda job: asyncio.sleep(3600))
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(whole(client, ASK))
        await rig.until(lambda: workers[0].jobs)
        for worker in reversed(workers):
            worker.break_streams()
        await asking


async def test_a_placement_whose_answer_was_lost_is_not_taken_for_the_next(checkpoint, monkeypatch):
    """The worker that it chose has died since.

    The store would answer the same attempt with the same worker again.
    """
    store, workers = MemoryStore(alive_s=600.0), [spare(f"m{i}", WorkerRole.MIXED) for i in range(3)]
    async with coordinated(checkpoint, workers, store) as rig, rig.client() as client:
        expected = await whole(client, ASK)
        asking = asyncio.create_task(whole(client, ASK))
        await rig.until(lambda: _num_new(rig) > 3)
        take, asked = store.claim, []

        async def forgetful(claim: Claim, prefixes: Sequence[tuple[bytes, bytes]]) -> Claimed:
            claimed = await take(claim, prefixes)
            asked.append(claim.epoch)
            if len(asked) == 1:
                assert claimed.route is not None
                taken = claim.workers[claim.routes[claimed.route].prefill].worker_id
                chosen = next(worker for worker in workers if worker.worker_id == taken)
                await _deaf(rig, chosen)
                raise Unavailable("Redis does not answer")
            return claimed

        monkeypatch.setattr(store, "claim", forgetful)
        lost = next(worker for worker in workers if worker.num_running)
        await lost.stop()
        assert (await asking)["choices"] == expected["choices"]
        assert asked == [2, 3] and rig.front.dispatch.num_replays == 1


@pytest.mark.parametrize(
    "reason",
    [RequestError("no worker takes so many"), Overloaded("full"), Unavailable("none")],
    ids=lambda error: error.code,
)
async def test_a_place_is_waited_for_whatever_is_missing(checkpoint, monkeypatch, reason):
    """The one that is large enough may be the one that was lost."""
    workers = [spare(name, WorkerRole.MIXED) for name in ("m0", "m1")]
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(whole(client, ASK))
        await rig.until(lambda: _num_new(rig) > 3)
        place, asked = rig.store.place, []

        async def later(request_id, epoch, *args) -> Route:
            asked.append(epoch)
            if len(asked) < 3:
                raise reason
            return await place(request_id, epoch, *args)

        monkeypatch.setattr(rig.store, "place", later)
        await workers[0].stop()
        await asking
        assert asked == [2, 3, 4]


async def test_who_speaks_again_is_told_that_the_answer_went_on_elsewhere(checkpoint):
    """The cancel that was sent when it was lost did not reach it."""
    workers = [spare(name, WorkerRole.MIXED) for name in ("m0", "m1")]
    lost = workers[0]
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(whole(client, ASK | {"max_tokens": 400}))
        await rig.until(lambda: _num_new(rig) > 3)
        lost.secret = "another"
        lost.break_streams()
        await rig.until(lambda: workers[1].jobs)
        await rig.until(lambda: not rig.front.dispatch._tasks)
        assert lost.num_running and not lost.cancels
        lost.secret = SECRET
        await rig.until(lambda: not lost.num_running)
        assert not asking.done() and [cancel.epoch for cancel in lost.cancels] == [1]
        asking.cancel()
