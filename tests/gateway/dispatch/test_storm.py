"""Faulty workers and impatient clients over real sockets: whatever happens, each request ends once with true text, and
nothing is left: no task, no connection, no credit."""

import asyncio
import itertools
import json
import math
from collections import Counter
from random import Random

import aiohttp
import pytest
from aiohttp import web

from contracts.codec import frame
from contracts.events import EventFrame, Failed, Token, Tokens
from contracts.ids import GatewayId, Incarnation, WorkerId
from contracts.node import WorkerRole
from contracts.request import Cancel, Job
from gateway.dispatch import attempt_budget, worker_link
from testing.fake_worker import FakeWorker
from testing.memory_store import MemoryStore
from tests.gateway.gateway_rig import SECRET, coordinated

pytestmark = pytest.mark.slow

PROMPT = "one two three 😀 four five"
FAULTS = ["none"] * 24 + ["fail", "stall", "gap", "twice", "shuffled", "absurd", "deaf", "die", "late", "stall"]


class FaultyWorker(FakeWorker):
    """Does one thing wrong for most jobs, and now and then breaks its event stream in one of the ways there are."""

    random = Random(0)
    is_calm = False

    async def _jobs(self, request: web.Request) -> web.Response:
        chance = 1.0 if self.is_calm else self.random.random()
        if chance < 0.03:
            return web.json_response({}, status=self.random.choice([400, 429, 500, 503]))
        if chance < 0.05 and request.transport is not None:
            request.transport.abort()
        if chance < 0.08:
            await super()._jobs(request)
            return web.json_response({}, status=503)  # took it, and says it did not
        return await super()._jobs(request)

    def _cancel(self, cancel: Cancel) -> None:
        if self.is_calm or self.random.random() < 0.9:
            super()._cancel(cancel)
        else:
            self.cancels.append(cancel)  # and goes on answering

    async def _answer(self, job: Job) -> None:
        fault = "none" if self.is_calm else self.random.choice(FAULTS)
        if fault == "die":
            self.break_streams()
        elif fault == "stall":
            await asyncio.sleep(3600)
        elif fault == "fail":
            self.publish(job.gateway_id, [Failed(job.request_id, job.epoch, "out_of_blocks", "told to")])
        elif fault == "none":
            await super()._answer(job)
        else:
            await self._disturbed(job, fault)

    async def _disturbed(self, job: Job, fault: str) -> None:
        is_second = job.route.prefill.worker_id != self.worker_id
        indexes = list(range(job.num_answered + is_second, job.sampling.max_tokens))
        if fault == "gap" and indexes:
            indexes.remove(self.random.choice(indexes))
        if fault == "shuffled":
            self.random.shuffle(indexes)
        if fault == "absurd":
            self.publish(
                job.gateway_id, [Tokens(job.request_id, job.epoch, [Token(0, self.random.choice([-1, 1 << 40]))])]
            )
        if fault == "late":
            await asyncio.sleep(0.3)
        events = [self._token(job, index) for index in indexes] + [self._end(job)]
        for event in events * (2 if fault == "twice" else 1):
            self.publish(job.gateway_id, [event])
        if fault == "deaf":
            self.publish(job.gateway_id, [Failed(job.request_id, job.epoch, "internal", "after the end")])

    async def _frames(self, gateway_id: GatewayId):
        async for data in super()._frames(gateway_id):
            if self.is_calm or self.random.random() > 0.0005:
                yield data
            else:
                yield self._broken(data)

    def _broken(self, data: bytes) -> bytes:
        wrong = EventFrame(self.worker_id, Incarnation("2"), 0, [])
        ways = [data + data, frame(wrong), b"\xff" * 64, frame([1, 2]), data[:-1], data[: len(data) // 2] + b"\x00" * 9]
        return self.random.choice(ways)


def workers(random: Random) -> list[FaultyWorker]:
    roles = [
        ("p0", WorkerRole.PREFILL),
        ("p1", WorkerRole.PREFILL),
        ("d0", WorkerRole.DECODE),
        ("d1", WorkerRole.DECODE),
        ("m0", WorkerRole.MIXED),
    ]
    made = [FaultyWorker(WorkerId(name), role, SECRET, period_s=0.001) for name, role in roles]
    for worker in made:
        worker.random = random
    return made


async def ask(session: aiohttp.ClientSession, random: Random, expected: str, num_tokens: int) -> str:
    """What became of it, in a word. Asserts that whatever text came is right."""
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "stream": random.random() < 0.7, "n": random.choice([1, 1, 2])}
    patience_s = random.choice([0.05, 0.3, 10, 10, 10])
    try:
        timeout = aiohttp.ClientTimeout(total=patience_s)
        async with session.post("/v1/completions", json=body, timeout=timeout) as reply:
            data = await reply.read()
    except TimeoutError:
        return "left"
    if reply.status != 200:
        error = json.loads(data)["error"]
        assert error["code"] == reply.status, error
        return str(reply.status)
    return _streamed(data, body["n"], expected) if body["stream"] else _whole(data, body["n"], expected)


def _whole(data: bytes, n: int, expected: str) -> str:
    reply = json.loads(data)
    assert [choice["text"] for choice in reply["choices"]] == [expected] * n
    return "200"


def _streamed(data: bytes, n: int, expected: str) -> str:
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    texts, finished = [""] * n, Counter()
    for event in events:
        body = json.loads(event.removeprefix("data: "))
        if "error" in body:
            assert event is events[-1]
            assert all(expected.startswith(text) for text in texts)
            return "broken off"
        choice = body["choices"][0]
        texts[choice["index"]] += choice["text"]
        finished[choice["index"]] += choice["finish_reason"] is not None
    assert texts == [expected] * n
    assert finished == dict.fromkeys(range(n), 1)
    return "200"


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_leaves_true_answers_and_nothing_else(checkpoint, tokenizer, monkeypatch, seed):
    monkeypatch.setattr(worker_link, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(attempt_budget, "REPLAY_WAIT_S", 0.5)
    random, store = Random(seed), MemoryStore(alive_s=math.inf)
    ids, num_tokens = tokenizer.encode(PROMPT).ids, 20
    expected = tokenizer.decode(list(itertools.islice(itertools.cycle(ids), num_tokens)))
    tasks = asyncio.all_tasks()
    faulty = workers(random)
    async with coordinated(checkpoint, faulty, store, request_timeout_s=2.0) as rig:
        async with aiohttp.ClientSession(rig.url) as session:
            limit = asyncio.Semaphore(24)

            async def one() -> str:
                async with limit:
                    return await ask(session, random, expected, num_tokens)

            seen = Counter(await asyncio.gather(*(one() for _ in range(200))))
            assert {"200", "left"} < set(seen), seen
            for worker in faulty:
                worker.is_calm = True
                worker.break_streams()
            await rig.until(lambda: rig.front.dispatch.num_inflight == 0 and len(rig.front.dispatch.workers.nodes) == 5)
            calm = await asyncio.gather(*(ask(session, _patient(), expected, num_tokens) for _ in range(10)))
            assert calm == ["200"] * 10
        await rig.until(lambda: rig.front.admission.num_taken == 0 and not rig.server.server_state.connections)
        await _settled(store)
    async with asyncio.timeout(60):
        while left := asyncio.all_tasks() - tasks:
            await asyncio.wait(left)


def _patient() -> Random:
    return Random(1)  # streams one answer and waits


async def _settled(store: MemoryStore) -> None:
    async with asyncio.timeout(60):
        while (counts := await store.counts()).states:
            await asyncio.sleep(0.01)
    assert {(w.pending_tokens, w.reserved_tokens) for w in await store.workers()} == {(0, 0)}
    assert counts.reaped == 0
    assert sum(counts.ended.values()) <= counts.placed
