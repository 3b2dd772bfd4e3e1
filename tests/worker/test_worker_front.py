"""The worker's HTTP face, with a core that only remembers what it was sent."""

import asyncio
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from contracts.codec import encode
from contracts.errors import RequestError, TandemError, Unavailable
from contracts.ids import Epoch, GatewayId, RequestId
from contracts.node import WorkerRole
from contracts.request import AdapterRef, Cancel, Job, Route
from contracts.sampling import SamplingParams
from process.thread_times import ThreadTimes
from tests.worker.fronts import make_state, make_status
from worker.front import app as front
from worker.front import worker_state
from worker.front.app import MAX_BODY_NBYTES, make_app
from worker.front.serve import CORE_DIED, _work
from worker.front.worker_state import WorkerState
from worker.messages import AdapterReply, LoadAdapter, UnloadAdapter

AUTH = {"authorization": "Bearer s3cret"}


def make_job(gateway: str = "g") -> Job:
    ref = make_state().info.ref
    route = Route(RequestId("r"), Epoch(1), ref, ref)
    return Job(route, GatewayId(gateway), [1, 2], SamplingParams(max_tokens=1, seed=0), 10.0)


class Roles:
    """Stands where Membership does: the registry that it would ask raises `error`, if any."""

    def __init__(self, state: WorkerState, error: TandemError | None = None) -> None:
        self._state, self._error = state, error

    async def change(self, role: WorkerRole) -> None:
        if self._error is not None:
            raise self._error
        self._state.info = msgspec.structs.replace(self._state.info, role=role)

    async def change_adapters(self, adapters: tuple[AdapterRef, ...]) -> None:
        if self._error is not None:
            raise self._error
        self._state.info = msgspec.structs.replace(self._state.info, adapters=adapters)


def app_of(state: WorkerState, error: TandemError | None = None) -> FastAPI:
    roles = Roles(state, error)
    return make_app(state, roles.change, roles.change_adapters)


@pytest.fixture
def state() -> WorkerState:
    return make_state()


@pytest.fixture
async def client(state):
    transport = httpx.ASGITransport(app=app_of(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://w", headers=AUTH) as client:
        yield client


async def listen(state: WorkerState):
    listener = state.streams.listen(GatewayId("g"))
    await anext(listener)
    return listener


async def test_jobs_go_to_the_core(state, client):
    listener = await listen(state)
    cancel = Cancel(RequestId("r"), Epoch(1), "why")
    response = await client.post("/jobs", content=encode([make_job(), cancel]))
    assert response.status_code == 202
    assert state.core.sent[0].jobs == [make_job(), cancel]
    metrics = (await client.get("/metrics")).text
    assert "tandem_worker_jobs_taken_total 1.0" in metrics and "tandem_worker_cancels_taken_total 1.0" in metrics
    await listener.aclose()


async def test_a_job_nobody_listens_for_is_refused(state, client):
    response = await client.post("/jobs", content=encode([make_job("stranger")]))
    assert response.status_code == 409
    assert "stranger" in response.json()["error"]["message"]
    assert state.core.sent == []


async def test_a_job_that_comes_late_is_refused_and_a_cancel_with_it_is_taken(state, client):
    """A network that was cut brings what was sent before, when the gateway has given it up and has another stream."""
    listener = state.streams.listen(make_job().gateway_id, 2)
    await anext(listener)
    cancel = Cancel(RequestId("r"), Epoch(1), "why")
    response = await client.post("/jobs", params={"stream": 1}, content=encode([make_job(), cancel]))
    assert response.status_code == 409 and "stream 1" in response.json()["error"]["message"]
    assert [work.jobs for work in state.core.sent] == [[cancel]]
    response = await client.post("/jobs", params={"stream": 2}, content=encode([make_job()]))
    assert response.status_code == 202
    await listener.aclose()


@pytest.mark.parametrize("body", [b"", b"{}", b"\xc1", encode([{"type": "job"}]), encode("x")])
async def test_a_body_that_is_no_jobs_gets_words(client, body):
    response = await client.post("/jobs", content=body)
    assert response.status_code == 400
    assert "msgpack" in response.json()["error"]["message"]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_over_the_limit_is_refused_whether_its_length_is_told_or_not(state, client, is_chunked):
    async def parts():
        for _ in range(33):
            yield bytes(1 << 20)

    response = await client.post("/jobs", content=parts() if is_chunked else bytes(33 << 20))
    assert response.status_code == 413 and response.json()["error"]["code"] == "too_large"
    assert str(MAX_BODY_NBYTES) in response.json()["error"]["message"] and state.core.sent == []


async def test_a_secret_may_have_any_letters(state):
    state.secret = "geheimnis\u00df \u6f22"
    headers = [(b"authorization", f"Bearer {state.secret}".encode())]
    transport = httpx.ASGITransport(app=app_of(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://w", headers=headers) as friend:
        assert (await friend.post("/drain")).status_code == 202
    assert state.draining


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}])
@pytest.mark.parametrize("path", ["/jobs", "/drain", "/role"])
async def test_without_the_secret_nothing_is_done(state, headers, path):
    transport = httpx.ASGITransport(app=app_of(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://w", headers=headers) as stranger:
        response = await stranger.post(path, content=encode([make_job()]))
    assert response.status_code == 401
    assert state.core.sent == [] and not state.draining


async def test_a_draining_worker_takes_cancels_but_no_jobs(state, client):
    listener = await listen(state)
    assert (await client.post("/drain")).status_code == 202
    assert (await client.post("/jobs", content=encode([make_job()]))).status_code == 503
    assert (await client.post("/jobs", content=encode([Cancel(RequestId("r"), Epoch(1), "x")]))).status_code == 202
    assert state.load.draining
    cancel = Cancel(RequestId("r"), Epoch(1), "left")
    assert (await client.post("/jobs", content=encode([cancel, make_job()]))).status_code == 503
    assert state.core.sent[-1].jobs == [cancel]  # it runs here, whatever it travelled with
    await listener.aclose()


async def test_a_role_is_changed_at_once_and_what_runs_of_the_former_is_told(state, client):
    state.on_status(msgspec.structs.replace(make_status(1), gauges={"requests_as_prefill": 2.0, "requests": 3.0}))
    assert state.num_of_former_role == 0
    response = await client.post("/role", json={"role": "decode"})
    assert (response.status_code, response.json()) == (
        200,
        {"role": "decode", "was": "prefill", "num_of_former_role": 2},
    )
    health = (await client.get("/health")).json()
    assert (health["role"], health["num_of_former_role"], state.load.num_of_former_role) == ("decode", 2, 2)
    assert (await client.get("/ready")).json()["status"] != "draining"
    assert (await client.post("/role", json={"role": "mixed"})).json()["num_of_former_role"] == 0  # it has both sides


@pytest.mark.parametrize("body", ["", "{}", '{"role": "both"}', '{"role": "decode", "now": true}', '"decode"', "\xff"])
async def test_what_is_no_role_gets_words(state, client, body):
    response = await client.post("/role", content=body.encode("latin-1"))
    assert response.status_code == 400 and "prefill, decode, mixed" in response.json()["error"]["message"]
    assert state.info.role is WorkerRole.PREFILL


@pytest.mark.parametrize(("error", "status"), [(RequestError("the last"), 409), (Unavailable("Redis is away"), 503)])
async def test_a_role_that_the_registry_refuses_is_not_taken(state, error, status):
    transport = httpx.ASGITransport(app=app_of(state, error))
    async with httpx.AsyncClient(transport=transport, base_url="http://w", headers=AUTH) as client:
        response = await client.post("/role", json={"role": "decode"})
    assert response.status_code == status and str(error) in response.json()["error"]["message"]


async def test_a_draining_worker_changes_no_role(state, client):
    await client.post("/drain")
    assert (await client.post("/role", json={"role": "decode"})).status_code == 409


SQL = AdapterRef("sql", b"x" * 16)


@pytest.mark.parametrize(
    ("body", "sent", "reply", "status"),
    [
        ({"name": "sql", "path": "/a"}, LoadAdapter(0, "sql", "/a"), AdapterReply(0, (SQL,)), 200),
        ({"name": "sql"}, UnloadAdapter(0, "sql"), AdapterReply(0, ()), 200),
        ({"name": "sql", "path": "/a"}, LoadAdapter(0, "sql", "/a"), AdapterReply(0, (), "r is 0"), 400),
    ],
)
async def test_adapters_are_loaded_by_the_core_and_stated(state, client, body, sent, reply, status):
    before = state.info.adapters
    asking = asyncio.create_task(client.post("/adapters", json=body))
    while not state.core.sent:
        await asyncio.sleep(0)
    assert state.core.sent == [sent]
    state.adapter_calls.answer(msgspec.structs.replace(reply, number=7))  # another's
    state.adapter_calls.answer(reply)
    response = await asking
    assert response.status_code == status
    assert state.info.adapters == (before if reply.error else reply.adapters)
    assert reply.error in response.text


async def test_adapters_that_the_registry_does_not_hear_of_are_told_again(state):
    transport = httpx.ASGITransport(app=app_of(state, Unavailable("Redis is away")))
    async with httpx.AsyncClient(transport=transport, base_url="http://w", headers=AUTH) as client:
        asking = asyncio.create_task(client.post("/adapters", json={"name": "sql"}))
        while not state.core.sent:
            await asyncio.sleep(0)
        state.adapter_calls.answer(AdapterReply(0, ()))
        response = await asking
        assert response.status_code == 503 and "repeat the call" in response.json()["error"]["message"]
        assert (await client.post("/adapters", content=b"[]")).status_code == 400
        assert (await client.post("/adapters", json={"name": "x"}, headers={"authorization": ""})).status_code == 401


async def test_health_follows_the_turns_of_the_core(state, client):
    state.on_status(make_status(1))
    assert (await client.get("/health")).status_code == 200
    state.status_s -= 2 * state.hang_timeout_s
    state.on_status(make_status(1))
    hung = await client.get("/health")
    assert hung.status_code == 503 and "no turn" in hung.json()["status"]
    assert 'role="prefill",worker="w"} 0.0' in (await client.get("/metrics")).text
    state.on_status(make_status(2))
    assert (await client.get("/health")).status_code == 200


async def test_a_worker_that_was_paused_takes_what_came_meanwhile(state, client, monkeypatch):
    """It is read before the front, let alone the core, had its next turn."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(front, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(worker_state, "time", SimpleNamespace(monotonic=lambda: clock.now))
    listener = await listen(state)
    state.on_status(make_status(1))
    state.goes_on(1.0)
    clock.now += 10 * state.hang_timeout_s
    assert (await client.post("/jobs", content=encode([make_job()]))).status_code == 202
    assert (await client.get("/health")).status_code == 200
    state.goes_on(1.0)
    assert state.silent_s == 1.0  # those that the front saw
    await listener.aclose()


def test_a_core_that_gets_no_cpu_is_not_silent(state, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(worker_state, "time", SimpleNamespace(monotonic=lambda: clock.now))
    state.on_status(make_status(1))
    state.goes_on(1.0)
    looks = [
        (0.0, True, 1.0),  # the first tells nothing yet
        (0.0, True, 2.0),
        (0.25, True, 2.25),
        (1.25, True, 3.25),  # it ran all the time: it loops
        (1.25, False, 4.25),  # it sleeps: it waits for what does not come
        (1.25, True, 4.25),
    ]
    for cpu_s, is_runnable, silent_s in looks:
        clock.now += 1.0
        state.core.threads = ThreadTimes({1: cpu_s}, is_runnable)
        state.goes_on(1.0)
        assert state.silent_s == silent_s
    state.on_status(make_status(2))
    assert state.silent_s == 0.0


async def test_a_core_that_is_to_start_anew_gets_no_more_work_and_its_worker_ends(state, client):
    listener, state.joined = await listen(state), True
    told: list[bool] = []

    async def beat_once() -> None:
        told.append(state.load.draining)

    membership, pumping = SimpleNamespace(beat_once=beat_once), asyncio.create_task(asyncio.sleep(3600))
    working = asyncio.create_task(_work(state, membership, pumping, 0.1))  # type: ignore[arg-type]
    state.on_status(make_status(1))
    assert (await client.get("/ready")).status_code == 200
    state.on_status(msgspec.structs.replace(make_status(2), broken="eth0 came since"))
    ready = await client.get("/ready")
    assert ready.status_code == 503 and "eth0 came since" in ready.json()["status"]
    assert (await client.post("/jobs", content=encode([make_job()]))).status_code == 503
    assert await working == CORE_DIED and told == [True]
    pumping.cancel()
    await listener.aclose()


async def test_a_dead_core_turns_everything_to_503(state, client):
    state.core_alive, state.joined = False, True
    for path in ("/health", "/ready"):
        response = await client.get(path)
        assert response.status_code == 503 and "died" in response.json()["status"]
    assert (await client.post("/jobs", content=encode([make_job()]))).status_code == 503


async def test_ready_once_registered(state, client):
    assert (await client.get("/ready")).status_code == 503
    state.joined = True
    assert (await client.get("/ready")).status_code == 200


async def test_metrics_name_the_way_the_bytes_take(state, client):
    state.on_status(make_status(1))
    state.started_at_s = 12.5
    text = (await client.get("/metrics")).text
    assert 'tandem_worker_up{model="m",role="prefill",worker="w"} 1.0' in text
    assert "tandem_worker_prefill_tokens_total 11.0" in text
    assert "tandem_worker_start_time_seconds 12.5" in text
    assert 'tandem_link_nbytes_total{direction="out",peer="d",state="open",transport="ucx"} 5.0' in text
    assert 'tandem_link_nbytes_per_second{direction="out",peer="d",state="open",transport="ucx"} 7e+09' in text
    assert 'tandem_link_codec_nbytes_total{direction="out",level="4bit",peer="d"} 800.0' in text
    assert 'tandem_link_codec_wire_nbytes_total{direction="out",level="4bit",peer="d"} 100.0' in text
    assert 'tandem_link_codec_seconds_total{direction="out",level="4bit",peer="d"} 0.5' in text


async def test_metrics_have_the_names_of_vllm_for_what_only_a_worker_knows(state, client):
    status = msgspec.structs.replace(
        make_status(1), gauges={"capacity_tokens": 200.0, "free_tokens": 50.0}, counters={"preemptions": 3.0}
    )
    state.on_status(status)
    text = (await client.get("/metrics")).text
    assert 'vllm:kv_cache_usage_perc{engine="w",model_name="m"} 0.75' in text
    assert 'vllm:gpu_cache_usage_perc{engine="w",model_name="m"} 0.75' in text
    assert 'vllm:num_preemptions_total{engine="w",model_name="m"} 3.0' in text


async def test_metrics_count_drafts_under_our_names_and_vllm_s(state, client):
    counters = {"drafts": 5.0, "draft_tokens": 14.0, "accepted_tokens_0": 4.0, "accepted_tokens_1": 2.0}
    state.on_status(msgspec.structs.replace(make_status(1), counters=counters))
    text = (await client.get("/metrics")).text
    own = 'engine="w",model_name="m"'
    for line in (
        "tandem_worker_drafts_total 5.0",
        "tandem_worker_draft_tokens_total 14.0",
        'tandem_worker_accepted_tokens_total{position="0"} 4.0',
        f"vllm:spec_decode_num_drafts_total{{{own}}} 5.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{own}}} 14.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{own}}} 6.0",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{own},position="1"}} 2.0',
    ):
        assert line in text
    assert "accepted_tokens_0" not in text
