"""Clients that leave, workers that refuse, break or go silent: every answer ends once, and both workers are freed."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest

from contracts.errors import RegistryError, Unavailable
from contracts.events import Failed, Token, Tokens
from contracts.ids import Epoch, Incarnation, RequestId, WorkerId
from contracts.layout import KVLayout
from contracts.node import Node, NodeLoad, WorkerRole
from contracts.request import Cancel, Job, WorkerRef
from coordinator.store.store import Claim, Claimed, PoolUpdate
from gateway.dispatch import attempt_budget
from gateway.tokenization.detokenizer import Detokenizer
from testing.fake_worker import FakeWorker
from testing.memory_store import MemoryStore
from tests.gateway.gateway_rig import GATEWAY, SECRET, Rig, coordinated, gateway, pair
from tests.nodes import ways

pytestmark = pytest.mark.slow

ASK = {"prompt": "one two three", "max_tokens": 500}
SPARE = {"p1": WorkerRole.PREFILL, "d1": WorkerRole.DECODE}


async def test_a_client_that_leaves_frees_both(checkpoint):
    async with gateway(checkpoint, pair(period_s=0.02)) as rig:
        for stream in (True, False):
            async with rig.client() as client:
                if stream:
                    await _hang_up(client)
                else:
                    await rig.leave(client, ASK, lambda: rig.workers[1].num_running)
            await rig.until(rig.is_idle)
        assert all(len({cancel.request_id for cancel in worker.cancels}) == 2 for worker in rig.workers)


async def _hang_up(client: httpx.AsyncClient) -> None:
    async with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as reply:
        await anext(reply.aiter_lines())


async def test_an_answer_whose_decode_worker_stays_away_ends_with_an_error_event(checkpoint, monkeypatch):
    monkeypatch.setattr("gateway.dispatch.attempt_budget.REPLAY_WAIT_S", 0.3)
    async with gateway(checkpoint, pair(period_s=0.02)) as rig, rig.client() as client:
        async with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            await rig.workers[1].stop()
            data = [line[6:] async for line in lines if line]
        assert data[-1] == "[DONE]"
        assert json.loads(data[-2])["error"]["code"] == 503
        await rig.until(rig.is_idle)


async def test_an_answer_outlives_the_prefill_worker_that_began_it(checkpoint):
    async with gateway(checkpoint, pair(period_s=0.02)) as rig, rig.client() as client:
        ask = ASK | {"stream": True, "max_tokens": 40}
        async with client.stream("POST", "/v1/completions", json=ask) as reply:
            lines = reply.aiter_lines()
            for _ in range(6):
                await anext(lines)
            await rig.workers[0].stop()
            data = [line[6:] async for line in lines if line]
        assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"


async def test_after_token_0_decode_is_given_time_to_tell_what_it_has(checkpoint, monkeypatch):
    monkeypatch.setattr("gateway.dispatch.dispatcher.LOOK_S", 0.3)
    monkeypatch.setattr("gateway.dispatch.attempt_budget.REPLAY_WAIT_S", 0.3)
    async with gateway(checkpoint, pair(period_s=3600.0)) as rig, rig.client() as client:
        async with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            await rig.workers[0].stop()
            await rig.until(lambda: rig.front.dispatch.num_losses == 1)
            assert rig.front.dispatch.num_inflight == 1
            data = [line[6:] async for line in lines if line]
        assert json.loads(data[-2])["error"]["code"] == 503
        await rig.until(lambda: rig.front.dispatch.num_inflight == 0)
        assert rig.front.dispatch.num_losses == 1  # however often it was looked for since


async def test_an_answer_of_which_decode_told_in_that_time_stays_there(checkpoint, monkeypatch):
    prefill, decode = workers = pair(period_s=3600.0)
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await rig.until(lambda: decode.jobs and rig.front.dispatch.num_answering == 1)
        await prefill.stop()
        await rig.until(lambda: rig.front.dispatch.num_losses == 1)
        decode.publish(GATEWAY, [_tokens(decode, 1)])
        await rig.until(lambda: _decoders(rig) == [decode.worker_id])
        [live] = rig.front.dispatch._live.values()
        rig.front.dispatch._move_undecoded(live, live.route)  # its time is over
        assert not live.is_orphaned and not live.is_moving and live.tries.num_replays == 0
        asking.cancel()


async def test_a_gateway_that_was_paused_in_that_time_hears_first_what_decode_told(checkpoint, monkeypatch):
    """When it goes on, the time is over and nothing was read yet."""
    prefill, decode = workers = pair(period_s=3600.0)
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await rig.until(lambda: decode.jobs and rig.front.dispatch.num_answering == 1)
        loop, due = asyncio.get_running_loop(), list[Callable[[], None]]()
        on_time = loop.call_later

        def call_later(delay_s: float, callback: Callable[..., None], *args: Any) -> asyncio.TimerHandle:
            is_the_grace = getattr(callback, "__self__", None) is rig.front.dispatch
            if is_the_grace:
                due.append(partial(callback, *args))
            return on_time(3600.0 if is_the_grace else delay_s, callback, *args)

        monkeypatch.setattr(loop, "call_later", call_later)
        await prefill.stop()
        await rig.until(lambda: due)
        due.pop()()  # as overdue timers are: before anything is read
        assert not any(live.is_moving for live in rig.front.dispatch._live.values())
        decode.publish(GATEWAY, [_tokens(decode, 1)])
        await rig.until(lambda: _decoders(rig) == [decode.worker_id])
        while due:
            due.pop()()
        [live] = rig.front.dispatch._live.values()
        assert not live.is_orphaned and not live.is_moving and live.tries.num_replays == 0
        asking.cancel()


@pytest.mark.parametrize("is_heard_again", [False, True])
async def test_what_prefill_decodes_itself_is_lost_with_it(checkpoint, monkeypatch, is_heard_again):
    """Decode had no pages. The tokens that prefill told while nobody heard it are drawn once more."""
    monkeypatch.setattr("gateway.dispatch.attempt_budget.REPLAY_WAIT_S", 0.3)
    monkeypatch.setattr("gateway.dispatch.dispatcher.LOOK_S", 0.1 if is_heard_again else 720.0)
    prefill, _ = workers = pair(period_s=3600.0)
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        async with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            if is_heard_again:
                prefill.break_streams()
                await rig.until(lambda: rig.front.dispatch.num_losses == 1)
                await rig.until(lambda: len(rig.front.dispatch.workers.nodes) == 2)
                prefill.publish(GATEWAY, [_tokens(prefill, 3, 4)])
                await rig.until(lambda: [job.num_answered for job in prefill.jobs] == [0, 1])
                return
            else:
                prefill.publish(GATEWAY, [_tokens(prefill, 1, 2)])
                await anext(lines)  # the blank one between two events
                await anext(lines)
                await prefill.stop()
            data = [line[6:] async for line in lines if line]
        assert json.loads(data[-2])["error"]["code"] == 503
        assert (rig.front.dispatch.num_losses, rig.front.dispatch.num_inflight) == (1, 0)


def _tokens(worker: FakeWorker, *indexes: int) -> Tokens:
    """Return tokens of the job that the worker was given last."""
    job = worker.jobs[-1]
    return Tokens(job.request_id, job.epoch, [Token(index, job.token_ids[index % 3]) for index in indexes])


def _decoders(rig: Rig) -> list[WorkerId | None]:
    return [live.decoder for live in rig.front.dispatch._live.values()]


async def test_prefill_lost_before_its_token_was_heard_is_replaced_though_decode_has_all(checkpoint, monkeypatch):
    prefill, decode = workers = pair()
    workers.append(FakeWorker(WorkerId("p1"), WorkerRole.PREFILL, SECRET))
    monkeypatch.setattr(prefill, "_answer", lambda job: asyncio.sleep(3600))
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK | {"max_tokens": 3}))
        await rig.until(lambda: prefill.jobs and _decoders(rig) == [decode.worker_id])
        prefill.break_streams()
        reply = await asking
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 3
        assert [job.epoch for job in decode.jobs] == [1, 2]


async def test_who_decoded_at_the_former_place_does_not_count_at_the_next(checkpoint, monkeypatch):
    prefill, decode = workers = pair(period_s=3600.0)
    other = FakeWorker(WorkerId("d1"), WorkerRole.DECODE, SECRET, period_s=3600.0)
    workers.append(other)
    answer = prefill._answer
    monkeypatch.setattr(prefill, "_answer", lambda job: answer(job) if job.epoch == 2 else asyncio.sleep(3600))
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await rig.until(lambda: decode.jobs and prefill.jobs)
        decode.publish(GATEWAY, [_tokens(decode, 1)])
        await rig.until(lambda: _decoders(rig) == [decode.worker_id])
        decode.break_streams()
        await rig.until(lambda: other.jobs and rig.front.dispatch.num_answering == 1)
        other.break_streams()
        await rig.until(lambda: len(prefill.jobs) == 3)
        assert [job.num_answered for job in prefill.jobs] == [0, 0, 1]
        asking.cancel()


async def test_a_gateway_that_was_paused_loses_no_worker(checkpoint, monkeypatch):
    """What its workers said meanwhile is read before their silence is judged."""
    monkeypatch.setattr("gateway.dispatch.worker_link.HEARTBEAT_TIMEOUT_S", 0.6)
    monkeypatch.setattr("testing.fake_worker.HEARTBEAT_S", 0.1)
    async with gateway(checkpoint, pair(period_s=0.02)) as rig, rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK | {"max_tokens": 40}))
        await rig.until(lambda: rig.front.dispatch.num_answering == 1)
        time.sleep(1.0)  # the loop is held, as by SIGSTOP
        reply = await asking
        assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 40)
        assert rig.front.dispatch.num_losses == 0
        assert [len(worker.jobs) for worker in rig.workers] == [1, 1]


class Unheard(msgspec.Struct, tag="unheard"):
    """An event of a release that this one does not know."""

    request_id: str = ""


async def test_events_that_are_not_understood_are_the_loss_of_the_worker_and_it_is_heard_again(checkpoint):
    async with gateway(checkpoint, pair(period_s=0.02)) as rig, rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK | {"max_tokens": 40}))
        await rig.until(lambda: rig.front.dispatch.num_answering == 1)
        rig.workers[1].publish(GATEWAY, [Unheard()])  # type: ignore[list-item]
        reply = await asking
        assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 40)
        first, second = rig.workers[1].jobs
        assert first.epoch < second.epoch and second.num_answered > 0


async def test_an_answer_that_can_not_be_made_text_fails_alone(checkpoint, monkeypatch):
    push = Detokenizer.push

    def fragile(self: Detokenizer, token_id: int) -> str:
        if token_id == 7:
            raise Exception("Invalid prefix encountered")
        return push(self, token_id)

    monkeypatch.setattr(Detokenizer, "push", fragile)
    async with gateway(checkpoint, pair(period_s=0.02)) as rig, rig.client() as client:
        asks = ({"prompt": prompt, "max_tokens": 8} for prompt in ([5, 6], [7, 8]))
        good, bad = await asyncio.gather(*(client.post("/v1/completions", json=ask) for ask in asks))
        assert (good.status_code, bad.status_code) == (200, 500)
        assert "made text" in bad.json()["error"]["message"]
        await rig.until(rig.is_idle)


async def test_tokens_of_what_has_ended_here_are_cancelled_once_more(checkpoint):
    async with gateway(checkpoint, pair()) as rig:
        for index in range(3):
            rig.workers[1].publish(GATEWAY, [Tokens(RequestId("old"), Epoch(2), [Token(index, 5)])])
            await rig.until(lambda seen=index + 1: rig.front.dispatch.num_unknown == seen)
        await rig.until(lambda: rig.workers[1].cancels)
        assert [(cancel.request_id, cancel.epoch) for cancel in rig.workers[1].cancels] == [("old", 2)]
        assert rig.workers[0].cancels == []


async def test_a_refused_job_is_placed_once_more_without_the_refuser(checkpoint):
    workers = [FakeWorker(WorkerId(f"m{i}"), WorkerRole.MIXED, SECRET, refuse=503 * (i == 0)) for i in range(2)]
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        reply = await client.post("/v1/completions", json=ASK | {"max_tokens": 3})
        assert reply.status_code == 200
        assert [epoch for _, epoch in rig.store.placed] == [1, 2]
        workers[1].refuse = 503
        assert (await client.post("/v1/completions", json=ASK)).status_code == 503


async def test_the_deadline_answers_504(checkpoint):
    async with gateway(checkpoint, pair(period_s=0.1), request_timeout_s=0.3) as rig:
        async with rig.client() as client:
            assert (await client.post("/v1/completions", json=ASK)).status_code == 504
        await rig.until(rig.is_idle)


@pytest.mark.parametrize("lost", ["m0", "m1"])
async def test_before_the_first_token_a_request_outlives_a_worker(checkpoint, monkeypatch, lost):
    """m0 takes the job and says nothing; then it dies, or m1, which has nothing to do with it."""
    workers = [FakeWorker(WorkerId(name), WorkerRole.MIXED, SECRET) for name in ("m0", "m1")]
    monkeypatch.setattr(workers[0], "_answer", lambda job: asyncio.sleep(3600))
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK | {"max_tokens": 3}))
        await rig.until(lambda: workers[0].jobs)
        dying = next(worker for worker in workers if worker.worker_id == lost)
        dying.break_streams()
        await rig.until(lambda: asking.done() if lost == "m0" else rig.front.dispatch.workers.troubles)
        if lost == "m0":
            assert (await asking).status_code == 200
            assert [epoch for _, epoch in rig.store.placed] == [1, 2]
            assert [job.route.epoch for job in workers[1].jobs] == [2]
        else:
            assert not asking.done()
            asking.cancel()
            assert [epoch for _, epoch in rig.store.placed] == [1]


@pytest.mark.parametrize("teller", ["p0", "d0"])
async def test_a_handoff_that_fails_before_the_first_token_is_made_with_another(checkpoint, monkeypatch, teller):
    """Each of the two tells of the other, one twice: it counts once."""
    monkeypatch.setattr(attempt_budget, "HANDOFF_RETRY_S", 0.0)
    workers = pair() + [FakeWorker(WorkerId(name), role, SECRET) for name, role in SPARE.items()]
    for worker in workers:
        monkeypatch.setattr(worker, "_answer", lambda job: asyncio.sleep(3600))
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await rig.until(lambda: workers[0].jobs and workers[1].jobs)
        first, second = sorted(workers[:2], key=lambda worker: worker.worker_id != teller)
        for worker in (first, first, second):
            _fail(worker, "peer_lost")
        await rig.until(lambda: [job.epoch for job in first.jobs] == [1, 2])
        assert [job.epoch for job in second.jobs] == [1]
        assert [epoch for _, epoch in rig.store.placed] == [1, 2]
        _fail(first, "peer_lost")
        assert (await asking).status_code == 503  # twice is enough
        await rig.until(rig.is_idle)


def _fail(worker: FakeWorker, code: str) -> None:
    job = worker.jobs[-1]
    worker.publish(GATEWAY, [Failed(job.request_id, job.epoch, code, "connection refused")])


@pytest.mark.parametrize("code", ["peer_lost", "corrupt"])
async def test_the_only_peer_is_tried_again_while_it_lives(checkpoint, monkeypatch, code):
    """A link that was reset is made anew; prefill tells of each try until then."""
    workers = pair()
    answer, silent = workers[0]._answer, lambda job: asyncio.sleep(3600)
    monkeypatch.setattr(workers[0], "_answer", silent)
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK | {"max_tokens": 3}))
        for num_tries in (1, 2, 3):
            await rig.until(lambda num_tries=num_tries: len(workers[0].jobs) == len(workers[1].jobs) == num_tries)
            if num_tries == 3:
                monkeypatch.setattr(workers[0], "_answer", answer)
            _fail(workers[num_tries % 2], code)
        assert (await asking).status_code == 200
        assert len(workers[0].jobs) == len(workers[1].jobs) == 4
        await rig.until(rig.is_idle)


async def test_kv_that_arrives_broken_whenever_it_is_tried_is_no_fault_of_the_gateway(checkpoint, monkeypatch):
    monkeypatch.setattr(attempt_budget, "HANDOFF_RETRY_S", 0.5)
    workers = pair()
    monkeypatch.setattr(workers[0], "_answer", lambda job: asyncio.sleep(3600))
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK))
        num_failed = 0
        while not asking.done():
            if len(workers[0].jobs) == len(workers[1].jobs) > num_failed:
                num_failed += 1
                _fail(workers[1], "corrupt")
            await asyncio.sleep(0.01)
        reply = await asking
        assert reply.status_code == 503 and num_failed >= 2
        assert "arrived damaged" in reply.text and "connection refused" not in reply.text
        await rig.until(rig.is_idle)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_decode_is_told_of_an_answer_that_ended_without_it(rig, client, max_tokens):
    """Its job would stay until its deadline, if the link between the two was lost meanwhile."""
    reply = await client.post("/v1/completions", json=ASK | {"max_tokens": max_tokens})
    assert reply.status_code == 200
    await rig.until(rig.is_idle)
    await rig.front.dispatch.stop()  # when all cancels are sent
    told = [cancel.reason for cancel in rig.workers[1].cancels]
    assert ("answered without decode" in told) == (max_tokens == 1)
    assert "answered without decode" not in [cancel.reason for cancel in rig.workers[0].cancels]


async def test_a_worker_that_starts_again_between_two_looks_is_found(checkpoint):
    """Under its name; its former self is still known to the gateway, and the registry places on the new one."""
    workers = pair()
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        _look_no_more(rig)
        again = _started_again(checkpoint)
        await again.start()
        rig.store.workers = [again, workers[1]]
        reply = await client.post("/v1/completions", json=ASK | {"max_tokens": 3})
        assert (reply.status_code, len(again.jobs)) == (200, 1)
        await again.stop()


async def test_a_worker_that_is_gone_and_does_not_answer_keeps_nobody_from_looking_for_others(checkpoint, monkeypatch):
    """What was sent to it is waited for by those who sent it alone."""
    workers, thawed = pair(), asyncio.Event()

    async def frozen(body):
        await thawed.wait()
        return Unavailable("it was frozen")

    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        looking = rig.front.dispatch.workers
        link = looking._links[WorkerId("p0")]
        monkeypatch.setattr(link, "_try_post", frozen)
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK | {"max_tokens": 3}))
        await rig.until(lambda: link._posting)
        again = _started_again(checkpoint)
        spare = FakeWorker(WorkerId("p1"), WorkerRole.PREFILL, SECRET, model=checkpoint.name)
        await asyncio.gather(again.start(), spare.start())
        rig.store.workers = [again, spare, workers[1]]
        await rig.until(lambda: looking.ref(WorkerId("p0")) == again.node.info.ref)
        looked_s = looking._looked_s
        try:
            await rig.until(lambda: looking._looked_s > looked_s)
        finally:
            thawed.set()
        assert ((await asking).status_code, len(spare.jobs)) == (200, 1)
        await asyncio.gather(again.stop(), spare.stop())


async def test_a_look_at_the_registry_that_another_has_overtaken_changes_nothing(checkpoint, monkeypatch):
    """Its answer is older: a worker that has started again since would be taken for gone."""
    workers = pair()
    async with gateway(checkpoint, workers) as rig:
        _look_no_more(rig)
        looking, nodes, may_go_on = rig.front.dispatch.workers, rig.store.nodes, asyncio.Event()

        async def late():
            found = await nodes()
            await may_go_on.wait()
            return found

        monkeypatch.setattr(rig.store, "nodes", late)
        overtaken = asyncio.create_task(looking._poll())
        await asyncio.sleep(0)
        monkeypatch.setattr(rig.store, "nodes", nodes)
        again = _started_again(checkpoint)
        await again.start()
        rig.store.workers = [again, workers[1]]
        await looking._poll()
        may_go_on.set()
        await overtaken
        assert looking.ref(WorkerId("p0")) == again.node.info.ref
        await again.stop()


def _started_again(checkpoint) -> FakeWorker:
    """The prefill worker of a pair, under its name."""
    return FakeWorker(WorkerId("p0"), WorkerRole.PREFILL, SECRET, incarnation=Incarnation("2"), model=checkpoint.name)


def _look_no_more(rig: Rig) -> None:
    """The gateway looks at the registry only where it has to."""
    looking = rig.front.dispatch.workers._task
    assert looking is not None
    looking.cancel()


async def test_where_the_registry_is_is_not_told_when_a_worker_is_looked_for_there(checkpoint, monkeypatch):
    """It gave the place, and does not answer any more when the gateway wants to know where that is."""

    async def silent():
        raise RegistryError("Redis does not answer at redis://10.0.0.1:6379", "does not answer")

    workers = pair()
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        _look_no_more(rig)
        rig.store.workers = [FakeWorker(WorkerId("p1"), WorkerRole.PREFILL, SECRET), workers[1]]
        monkeypatch.setattr(rig.store, "nodes", silent)
        reply = await client.post("/v1/completions", json=ASK)
        assert (reply.status_code, reply.json()["error"]["message"]) == (503, "the worker is not connected")


async def test_a_job_that_comes_after_its_request_went_elsewhere_is_cancelled(checkpoint, monkeypatch):
    """Its cancel came before it."""
    workers = [*pair(period_s=0.02), FakeWorker(WorkerId("d1"), WorkerRole.DECODE, SECRET)]
    for silent in workers[:2]:  # or what they tell of it would have them cancelled, too
        monkeypatch.setattr(silent, "_answer", lambda job: asyncio.sleep(3600))
    held = asyncio.Event()
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        send = rig.front.dispatch.workers.send

        async def slowly(ref: WorkerRef, message: Job | Cancel) -> None:
            if ref.worker_id == "d0" and isinstance(message, Job):
                await held.wait()
            await send(ref, message)

        monkeypatch.setattr(rig.front.dispatch.workers, "send", slowly)
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await rig.until(lambda: workers[0].jobs)
        _fail(workers[0], "peer_lost")
        await rig.until(lambda: workers[2].jobs and workers[1].cancels)
        held.set()
        await rig.until(lambda: workers[1].jobs and not workers[1].num_running)
        assert [cancel.epoch for cancel in workers[1].cancels] == [1, 1]
        asking.cancel()


@pytest.mark.parametrize(("code", "words"), [("peer_lost", "was lost; send"), ("internal", "the gateway's log")])
async def test_a_pair_without_another_fails_with_its_own_code(checkpoint, monkeypatch, caplog, code, words):
    monkeypatch.setattr(attempt_budget, "HANDOFF_RETRY_S", 0.0)
    workers = pair()
    monkeypatch.setattr(workers[0], "_answer", lambda job: asyncio.sleep(3600))
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await rig.until(lambda: workers[0].jobs and workers[1].jobs)
        _fail(workers[0], code)
        reply = await asking
        assert reply.status_code == (503 if code == "peer_lost" else 500) and words in reply.text
        assert "connection refused" in caplog.text and "connection refused" not in reply.text
        await rig.until(rig.is_idle)


async def test_without_a_decode_worker_it_is_not_ready(checkpoint):
    workers = pair()
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        assert (await client.get("/ready")).status_code == 200
        rig.store.dead = {WorkerId("d0")}
        await rig.until(lambda: len(rig.front.dispatch.workers.nodes) == 1)
        assert (await client.get("/ready")).status_code == 503


async def test_while_the_registry_does_not_answer_it_is_not_ready(checkpoint, monkeypatch, caplog):
    """What runs needs none."""
    monkeypatch.setattr("gateway.dispatch.worker_pool.BLIND_S", 0.2)
    monkeypatch.setattr("gateway.dispatch.worker_pool.POLL_PERIOD_S", 0.01)
    store = MemoryStore(alive_s=600.0)
    async with coordinated(checkpoint, pair(), store) as rig, rig.client() as client:
        workers, pool = rig.front.dispatch.workers, store.pool
        await rig.until(lambda: not workers.is_blind and workers.can_serve())

        async def unavailable(since_us: int, is_full: bool) -> AsyncGenerator[PoolUpdate, None]:
            raise Unavailable("Redis does not answer")
            yield PoolUpdate(now_us=since_us, rows=[], is_full=is_full)  # a generator, as the store's

        monkeypatch.setattr(store, "pool", unavailable)
        await rig.until(lambda: workers.is_blind)
        reply = await client.get("/ready")
        assert reply.status_code == 503 and "the registry (Redis) does not answer" in reply.text
        monkeypatch.setattr(store, "pool", pool)
        await rig.until(lambda: not workers.is_blind)
        assert (await client.get("/ready")).status_code == 200
    assert [record.message for record in caplog.records][:2] == [
        "registry not reachable, going on with the workers known: Redis does not answer",
        "the registry answers again",
    ]


async def test_a_gateway_that_stops_says_nothing_of_the_registry(checkpoint, caplog):
    """It lists the workers as before; who reads that it does not looks for a fault where none is."""
    caplog.set_level("INFO", "gateway.dispatch.worker_link")
    async with coordinated(checkpoint, pair(), MemoryStore(alive_s=600.0)) as rig:
        await rig.until(rig.front.dispatch.workers.can_serve)
    records = [record for record in caplog.records if record.name == "gateway.dispatch.worker_link"]
    assert {record.levelname for record in records} == {"INFO"}
    said = [record.message for record in records]
    assert sorted(said) == [f"worker {name} is not connected: this gateway stops" for name in ("d0", "p0")]


@pytest.mark.parametrize("is_orderly", [True, False])
async def test_a_worker_that_leaves_in_order_is_no_warning(checkpoint, caplog, is_orderly):
    """It is out of the registry before its stream ends; one that dies is not."""
    caplog.set_level("INFO", "gateway.dispatch.worker_link")
    async with gateway(checkpoint, pair()) as rig:
        await rig.until(rig.front.dispatch.workers.can_serve)
        _look_no_more(rig)
        if is_orderly:
            rig.store.dead.add(rig.workers[1].worker_id)
        await rig.workers[1].stop()
        await rig.until(lambda: any("d0 is not connected" in record.message for record in caplog.records))
        levels = {record.levelname for record in caplog.records if "d0" in record.message}
        assert levels == ({"INFO"} if is_orderly else {"WARNING"})


async def test_leases_that_are_not_renewed_are_said_once_for_each_reason(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr("gateway.dispatch.dispatcher.RENEW_PERIOD_S", 0.01)
    store, workers = MemoryStore(alive_s=600.0), pair()
    monkeypatch.setattr(workers[1], "_answer", lambda job: asyncio.sleep(3600))
    async with coordinated(checkpoint, workers, store) as rig, rig.client() as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await rig.until(lambda: workers[1].jobs)
        renew, num_asked = store.renew, 0

        async def away(request_ids: Sequence[RequestId], lease_s: float) -> int:
            nonlocal num_asked
            num_asked += 1
            what = "does not answer" if num_asked <= 3 else "refuses"
            raise RegistryError(f"Redis {what}", what)

        monkeypatch.setattr(store, "renew", away)
        await rig.until(lambda: num_asked > 6)
        monkeypatch.setattr(store, "renew", renew)
        await rig.until(lambda: any("renewed again" in record.message for record in caplog.records))
        asking.cancel()
    assert [record.message for record in caplog.records if "leases" in record.message] == [
        "leases not renewed: Redis does not answer",
        "leases not renewed: Redis refuses",
        "leases are renewed again",
    ]


@pytest.mark.parametrize("what", ["does not answer", "refuses"])
async def test_clients_are_not_told_where_the_registry_is(checkpoint, monkeypatch, caplog, what):
    monkeypatch.setattr("gateway.dispatch.registry_client.PATIENCE_S", 0.0)
    store = MemoryStore(alive_s=600.0)
    async with coordinated(checkpoint, pair(), store) as rig, rig.client() as client:

        async def away(claim: Claim, prefixes: Sequence[tuple[bytes, bytes]]) -> Claimed:
            raise RegistryError(f"Redis {what} at redis://10.0.0.5", what)

        claim = store.claim
        for _ in range(2):
            monkeypatch.setattr(store, "claim", away)
            for _ in range(2):
                reply = await client.post("/v1/completions", json=ASK | {"max_tokens": 3})
                words = f"the registry (Redis) {what}, so nothing new can be placed"
                assert reply.status_code == 503 and reply.json()["error"]["message"] == words
            monkeypatch.setattr(store, "claim", claim)
            assert (await client.post("/v1/completions", json=ASK | {"max_tokens": 3})).status_code == 200
    told = [record.message for record in caplog.records if "redis://" in record.message]
    assert told == [f"requests are not placed: Redis {what} at redis://10.0.0.5"] * 2


@pytest.mark.parametrize("is_taken", [True, False], ids=["the answer is lost", "the call is lost"])
async def test_a_request_waits_for_a_registry_that_is_silent_for_a_moment(checkpoint, monkeypatch, is_taken):
    """On a busy host Redis may have no CPU for longer than a call waits."""
    monkeypatch.setattr("gateway.dispatch.registry_client.PATIENCE_S", 60.0)
    store = MemoryStore(alive_s=600.0)
    async with coordinated(checkpoint, pair(), store) as rig, rig.client() as client:
        take, num_asked = store.claim, 0

        async def silent(claim: Claim, prefixes: Sequence[tuple[bytes, bytes]]) -> Claimed:
            nonlocal num_asked
            num_asked += 1
            if num_asked > 2:
                return await take(claim, prefixes)
            if is_taken:
                await take(claim, prefixes)
            raise RegistryError("Redis does not answer", "does not answer")

        monkeypatch.setattr(store, "claim", silent)
        assert (await client.post("/v1/completions", json=ASK | {"max_tokens": 3})).status_code == 200
        assert num_asked == 3 and (await store.counts()).placed == 1


@pytest.mark.parametrize("index", [0, 1])
async def test_while_the_only_worker_of_a_kind_drains_it_is_not_ready(checkpoint, index):
    store, workers = MemoryStore(alive_s=600.0), pair()
    name, incarnation = workers[index].worker_id, workers[index].incarnation
    async with coordinated(checkpoint, workers, store) as rig, rig.client() as client:
        assert (await client.get("/ready")).status_code == 200
        await store.heartbeat(name, incarnation, NodeLoad(draining=True))
        await rig.until(lambda: not rig.front.dispatch.workers.can_serve())
        reply = await client.get("/ready")
        assert reply.status_code == 503 and f"{name}: it drains" in reply.text
        await store.heartbeat(name, incarnation, NodeLoad())
        await rig.until(rig.front.dispatch.workers.can_serve)


async def test_while_nobody_could_answer_the_registry_is_looked_at_more_often(checkpoint, monkeypatch):
    monkeypatch.setattr("gateway.dispatch.worker_pool.POLL_PERIOD_S", 3600.0)
    workers: list[FakeWorker] = []
    async with gateway(checkpoint, workers) as rig:
        late = FakeWorker(WorkerId("m0"), WorkerRole.MIXED, SECRET, model=checkpoint.name)
        await late.start()
        workers.append(late)
        await rig.until(rig.front.dispatch.workers.can_serve)


async def test_a_registry_that_can_not_be_reached_is_not_asked_more_often(checkpoint, monkeypatch):
    monkeypatch.setattr("gateway.dispatch.worker_pool.SEARCH_PERIOD_S", 0.0)
    async with gateway(checkpoint, []) as rig:
        monkeypatch.setattr("gateway.dispatch.worker_pool.POLL_PERIOD_S", 3600.0)
        asked = []

        async def away() -> list[Node]:
            asked.append(True)
            raise Unavailable("Redis is away")

        monkeypatch.setattr(rig.store, "nodes", away)
        await rig.until(lambda: asked)
        await asyncio.sleep(0.05)
        assert len(asked) == 1


@pytest.mark.parametrize(
    "there, words",
    [
        (slice(1, 2), "no live prefill worker that"),
        (slice(0, 1), "no live decode worker that"),
        (slice(0), "no live prefill worker and no live decode worker that"),
    ],
    ids=["prefill", "decode", "both"],
)
async def test_what_is_missing_is_said(checkpoint, there, words):
    async with gateway(checkpoint, pair()[there]) as rig, rig.client() as client:
        reply = await client.get("/ready")
        assert reply.status_code == 503
        assert reply.json()["error"]["message"] == f"{words} is connected and takes work"


async def test_a_worker_of_another_model_is_passed_over_and_named(checkpoint):
    workers = pair()
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        strangers = [FakeWorker(WorkerId(name), WorkerRole.MIXED, SECRET, model="another") for name in ("x0", "x1")]
        rig.store.workers = [*strangers, *workers]
        await rig.until(lambda: rig.front.dispatch.workers.troubles)
        words = f"it serves another, this gateway speaks for {checkpoint.name}: name the same model for both"
        assert rig.front.dispatch.workers.troubles == [f"{name}: {words}" for name in ("x0", "x1")]
        reply = await client.post("/v1/completions", json=ASK | {"max_tokens": 3})
        assert reply.status_code == 200
        assert [epoch for _, epoch in rig.store.placed] == [1] and not any(one.jobs for one in strangers)


def _layout(dtype: str) -> KVLayout:
    return KVLayout.uniform(model="m", num_layers=1, num_kv_heads=1, head_dim=2, block_size=16, dtype=dtype)


async def test_a_pair_that_can_not_exchange_kv_is_not_ready_and_the_field_is_named(checkpoint):
    workers = pair()
    for worker, dtype in zip(workers, ("float32", "bfloat16"), strict=True):
        worker.layout = _layout(dtype)
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        reply = await client.get("/ready")
        assert reply.status_code == 503
        assert "the prefill and the decode workers can't exchange KV; d0: it can't take" in reply.text
        assert "d0: it can't take the KV of p0: groups[0].dtype is bfloat16 here, float32 there" in reply.text


async def test_a_pair_whose_transfers_do_not_meet_is_not_ready_until_they_do(checkpoint):
    _, decode = workers = pair()
    decode.ways = ways("fake", by="shm@a")
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        reply = await client.get("/ready")
        assert reply.status_code == 503
        assert "d0: it can't take the KV of p0: transfer is shm here, tcp there: leave --transfer at" in reply.text
    decode.ways = ways("fake", by="shm@a tcp")
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        assert (await client.get("/ready")).status_code == 200


async def test_a_pair_whose_decode_takes_the_other_layout_is_ready(checkpoint):
    prefill, decode = workers = pair()
    prefill.layout, decode.layout = _layout("bfloat16"), _layout("float8_e4m3fn")
    decode.ways = ways(decode.layout.layout_id, prefill.layout.layout_id)
    async with gateway(checkpoint, workers) as rig, rig.client() as client:
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/v1/completions", json=ASK | {"max_tokens": 3})).status_code == 200


async def test_a_worker_that_the_registry_forgets_ends_what_it_runs(checkpoint):
    async with gateway(checkpoint, pair(period_s=0.02)) as rig, rig.client() as client:
        async with client.stream("POST", "/v1/completions", json=ASK | {"max_tokens": 60, "stream": True}) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            rig.store.dead = {WorkerId("d0")}
            await rig.until(lambda: len(rig.front.dispatch.workers.nodes) == 1)
            data = [line[6:] async for line in lines if line]
        assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"
        assert (await client.get("/ready")).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_ours_ends_the_answer_and_is_counted_once(checkpoint, monkeypatch, stream):
    told = itertools.count()

    def choice(self, piece):
        if not stream or next(told) == 2:
            raise LookupError("of ours")
        return {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": piece.finish}

    monkeypatch.setattr("gateway.api.openai.completions.CompletionFormatter._choice", choice)
    async with gateway(checkpoint, pair(period_s=0.005)) as rig, rig.client() as client:
        reply = await client.post("/v1/completions", json=ASK | {"max_tokens": 9, "stream": stream})
        *_, error, done = [reply.text, ""] if not stream else reply.text.removesuffix("\n\n").split("\n\n")
        assert (reply.status_code, done) == ((200, "data: [DONE]") if stream else (500, ""))
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 500
        await rig.until(rig.is_idle)
        text = (await client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("tandem_gateway_requests_total")]
        counts = [line for line in lines if not line.endswith(" 0.0")]
        assert counts == ['tandem_gateway_requests_total{code="internal"} 1.0']
