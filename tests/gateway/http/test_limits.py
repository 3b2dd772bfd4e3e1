"""Limits, refusals, wrong secrets, half-open clients: a clear answer or a bounded close, and nothing left behind."""

import asyncio
import json
import logging

import pytest

from contracts.errors import Overloaded, Unavailable
from gateway.admission.limits import BodyMemoryLimit
from gateway.error_codes import NOT_OURS
from gateway.http import server as gateway_server
from gateway.http.app import make_app
from tests.gateway.gateway_rig import gateway, pair

pytestmark = pytest.mark.slow

ASK = {"prompt": "one two three", "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture
async def rig(checkpoint):
    async with gateway_of(checkpoint) as rig:
        yield rig


def gateway_of(checkpoint, **settings):
    return gateway(checkpoint, pair(), **settings)


async def test_above_max_inflight_comes_429_with_retry_after(checkpoint):
    async with gateway_of(checkpoint, max_inflight=2) as rig, rig.client() as client:
        rig.front.admission.take(1)  # another answer
        reply = await client.post("/v1/completions", json=ASK | {"n": 2})
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        rig.front.admission.give_back(1)
        assert (await client.post("/v1/completions", json=ASK | {"n": 2})).status_code == 200


@pytest.mark.parametrize(
    ("path", "ask", "param"),
    [
        ("completions", ASK | {"n": 3}, "n"),
        ("completions", ASK | {"prompt": ["one", "two"], "n": 2}, "n"),
        ("completions", ASK | {"prompt": ["one", "two", "three"]}, "prompt"),
        ("chat/completions", CHAT | {"n": 3}, "n"),
    ],
)
async def test_more_answers_than_there_is_ever_room_for_are_refused_for_good(checkpoint, path, ask, param):
    async with gateway_of(checkpoint, max_inflight=2) as rig, rig.client() as client:
        reply = await client.post(f"/v1/{path}", json=ask)
        assert reply.status_code == 400 and "retry-after" not in reply.headers
        error = reply.json()["error"]
        assert error["param"] == param and "at most 2" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_requests_own_answers_leave_no_room_for_waits_for_them(rig, client, stream):
    rig.store.room = 2
    ask = ASK | {"prompt": ["one", "two", "three"], "n": 2, "stream": stream}
    reply = await client.post("/v1/completions", json=ask)
    assert reply.status_code == 200
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")] if stream else [reply.text]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert sorted(choice["index"] for choice in choices if choice["finish_reason"] == "length") == list(range(6))
    assert len({name for name, _ in rig.store.placed}) == 6
    await rig.until(rig.is_idle)


async def test_a_client_that_leaves_takes_what_still_waits_for_a_place_along(rig, client):
    rig.store.room, rig.workers[1].period_s = 1, 0.05
    await rig.leave(client, ASK | {"n": 3, "max_tokens": 1000}, lambda: rig.store.placed)
    await rig.until(rig.is_idle)
    assert len(rig.store.placed) == 1 and rig.front.admission.num_taken == 0


async def test_a_request_fails_whose_others_find_no_worker_any_more(rig, client, monkeypatch):
    monkeypatch.setattr("gateway.serving.generation_run.REPLAY_WAIT_S", 1.0)
    rig.store.room, rig.workers[1].period_s = 1, 0.05
    asking = asyncio.create_task(client.post("/v1/completions", json=ASK | {"n": 2, "max_tokens": 1000}))
    await rig.until(lambda: rig.store.placed)
    rig.store.room, rig.store.workers = None, rig.workers[:1]
    reply = await asking
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "no decode worker")
    await rig.until(lambda: rig.front.dispatch.num_inflight == 0)


async def test_a_request_fails_though_the_answer_before_the_one_without_a_worker_has_ended(rig, client, monkeypatch):
    """Three answers: the second finds its place late, and has ended when the third finds none."""
    monkeypatch.setattr("gateway.serving.generation_run.REPLAY_WAIT_S", 1.0)
    place, tried = rig.store.place, []

    async def late(request_id, *args):
        number = int(request_id.rpartition("-")[2])
        tried.append(number)
        if number == 1 and tried.count(1) == 1:
            raise Overloaded("full")
        if number == 2:
            await rig.until(lambda: len(rig.store.finished) == 2)
            raise Unavailable("no decode worker")
        return await place(request_id, *args)

    monkeypatch.setattr(rig.store, "place", late)
    reply = await client.post("/v1/completions", json=ASK | {"n": 3, "max_tokens": 3})
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "no decode worker")
    await rig.until(lambda: rig.front.dispatch.num_inflight == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_pool_says_when_to_come_again(rig, client, stream):
    rig.store.overloaded = True
    reply = await client.post("/v1/completions", json=ASK | {"stream": stream})
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")
    assert reply.json()["error"]["type"] == "RateLimitError"


async def test_a_worker_that_is_full_is_429(rig, client):
    for worker in rig.workers:
        worker.refuse = 429
    reply = await client.post("/v1/completions", json=ASK)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    await rig.until(lambda: rig.front.dispatch.num_inflight == 0)


async def test_a_pool_that_is_full_by_the_second_try_says_when_to_come_again(rig, client):
    rig.workers[0].refuse, rig.store.room = 503, 1
    reply = await client.post("/v1/completions", json=ASK)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")
    await rig.until(lambda: rig.front.dispatch.num_inflight == 0)


async def test_a_client_that_leaves_while_it_waits_for_a_place_leaves_none(rig, client, monkeypatch):
    waiting, going, place = asyncio.Event(), asyncio.Event(), rig.store.place

    async def slowly(*args):
        waiting.set()
        await going.wait()
        return await place(*args)

    monkeypatch.setattr(rig.store, "place", slowly)
    await rig.leave(client, ASK, waiting.is_set)
    await rig.until(lambda: b'code="disconnected"} 1.0' in rig.front.metrics.text())
    going.set()
    await rig.until(lambda: rig.store.finished)
    assert rig.store.finished == rig.store.placed
    assert not rig.workers[0].jobs


async def test_a_wrong_secret_is_said(rig, client):
    rig.workers[1].secret = "other"
    rig.workers[1].break_streams()
    await rig.until(
        lambda: any("event stream broke: it refuses our secret" in why for why in rig.front.dispatch.workers.troubles)
    )
    reply = await client.get("/ready")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "TANDEM_SECRET" in reply.json()["error"]["message"]


async def test_counts_only_grow_and_say_so(rig, client):
    assert (await client.post("/v1/completions", json=ASK | {"stop": "two"})).status_code == 200
    text = (await client.get("/metrics")).text
    assert "# TYPE tandem_gateway_cancels_total counter" in text
    assert "tandem_gateway_cancels_total 1.0" in text


async def test_tokens_there_and_back(rig, client):
    tokens = (await client.post("/tokenize", json={"prompt": "Hello there", "return_token_strs": True})).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "Hello there"}
    assert (await client.get("/version")).json() == {"version": "0"}


async def test_one_request_id_used_twice_at_once(rig, client):
    asks = [client.post("/v1/completions", json=ASK, headers={"X-Request-Id": "mine"}) for _ in range(2)]
    replies = await asyncio.gather(*asks)
    assert [(reply.status_code, reply.headers["x-request-id"]) for reply in replies] == [(200, "mine")] * 2
    assert [reply.json()["id"] for reply in replies] == ["cmpl-mine"] * 2
    assert len({request_id for request_id, _ in rig.store.placed}) == 2


REFUSED = {
    400: ("POST", "/v1/completions", "invalid_request"),
    401: ("POST", "/v1/completions", "unauthorized"),
    404: ("GET", "/nowhere", "not_found"),
    405: ("GET", "/v1/completions", "method_not_allowed"),
}


@pytest.mark.parametrize("given", ["", "mine"])
@pytest.mark.parametrize("status", REFUSED)
async def test_what_is_refused_is_counted_and_can_be_found_by_its_id(checkpoint, caplog, status, given):
    caplog.set_level(logging.INFO, "gateway.requests")
    method, path, code = REFUSED[status]
    async with gateway(checkpoint, pair(), api_key="k") as rig, rig.client() as client:
        headers = {"Authorization": "Bearer " + ("wrong" if status == 401 else "k"), "X-Request-Id": given}
        body = ASK | {"max_tokens": -1} if method == "POST" else None
        reply = await client.request(method, path, json=body, headers=headers)
        text = (await client.get("/metrics")).text
    (line,) = [json.loads(record.message) for record in caplog.records if record.name == "gateway.requests"]
    assert (reply.status_code, line["status"], line["code"], line["path"]) == (status, status, code, path)
    assert reply.headers["x-request-id"] == line["id"] and line["id"] == (given or line["id"]) != ""
    assert line["message"] == reply.json()["error"]["message"]
    assert f'tandem_gateway_requests_total{{code="{code}"}} 1.0' in text
    assert code in NOT_OURS


async def test_the_id_in_a_body_is_that_of_its_refusal(client):
    reply = await client.post("/v1/completions", json=ASK | {"model": "other", "request_id": "mine"})
    assert (reply.status_code, reply.headers["x-request-id"]) == (404, "mine")


async def test_each_request_leaves_one_line(rig, client, caplog):
    caplog.set_level(logging.INFO, "gateway.requests")
    await client.post("/v1/completions", json=ASK)
    await client.post("/v1/completions", json=ASK | {"n": 0})
    rig.store.overloaded = True
    await client.post("/v1/completions", json=ASK)

    def statuses():
        lines = (record.getMessage() for record in caplog.records if record.name == "gateway.requests")
        return [json.loads(line)["status"] for line in lines]

    await rig.until(lambda: len(statuses()) == 3)  # a line is written once its answer is: the client may be ahead
    assert statuses() == [200, 400, 429]


async def test_headers_that_never_end_close_the_connection(rig, client, monkeypatch):
    monkeypatch.setattr("service.http_protocol.HEADERS_TIMEOUT_S", 0.2)
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
    with pytest.raises(ConnectionError):
        async with asyncio.timeout(60):
            if not await reader.read():
                raise ConnectionResetError
    writer.close()
    assert (await client.post("/v1/completions", json=ASK)).status_code == 200


@pytest.mark.parametrize(
    ("length", "more"), [(b"Content-Length: 9\r\n", b"a"), (b"Content-Length: 9\r\n", b"a" * 9), (b"", b"\r\n")]
)
async def test_what_is_no_request_does_not_keep_an_idle_connection_open(checkpoint, length, more):
    """A client without a key held a connection for as long as it liked.

    It sent the body of its refused request byte by byte.
    """
    async with gateway_of(checkpoint, api_key="k") as rig:
        rig.server.config.timeout_keep_alive = 1
        host, port = rig.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(60):
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\n%s\r\n" % length)
            assert b" 401 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(more)
            await reader.read()
        writer.close()


async def test_an_answer_outlives_the_idleness_before_it(checkpoint):
    """The idleness began when a part of the request was there already."""
    async with gateway(checkpoint, pair(period_s=0.05)) as rig:
        rig.server.config.timeout_keep_alive = 1
        host, port = rig.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(ASK | {"max_tokens": 40}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n" % len(body)
        async with asyncio.timeout(60):
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" + head)
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"\r\n" + body)
            assert b'"finish_reason":"length"' in await reader.read()
        writer.close()


async def test_bodies_that_do_not_end_leave_room_for_small_ones_and_no_more(rig, client):
    """250 bodies of 8 MB, none of them whole, were the 2 GB that compose.yaml gives a gateway."""
    rig.front.bodies = BodyMemoryLimit(100_000)
    large = ASK | {"user": "u" * 150_000}
    host, port = rig.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n" + b" " * 150_000)
    await rig.until(lambda: rig.front.bodies.nbytes > 80_000)
    reply = await client.post("/v1/completions", json=large)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    assert (await client.post("/v1/completions", json=ASK)).status_code == 200
    writer.close()
    await rig.until(lambda: rig.front.bodies.nbytes == 0)
    assert (await client.post("/v1/completions", json=large)).status_code == 200


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error_of_ours(rig, caplog):
    host, port = rig.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{"prompt":')
    await writer.drain()
    writer.close()
    await rig.until(lambda: b'tandem_gateway_requests_total{code="disconnected"} 1.0' in rig.front.metrics.text())
    await asyncio.sleep(0.1)  # for a server that would complain
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_silent_stream_is_a_loss(rig, client, monkeypatch):
    """Its worker answers whoever asks, and says nothing more: each try lasts as long as the silence may."""
    monkeypatch.setattr("gateway.dispatch.worker_link.HEARTBEAT_TIMEOUT_S", 0.3)
    monkeypatch.setattr("gateway.dispatch.attempt_budget.REPLAY_WAIT_S", 0.2)
    rig.workers[1].period_s = 60.0
    monkeypatch.setattr("testing.fake_worker.HEARTBEAT_S", 60.0)
    reply = await client.post("/v1/completions", json=ASK | {"max_tokens": 50})
    assert reply.status_code == 503
    await rig.until(lambda: rig.front.dispatch.num_losses and rig.front.dispatch.num_inflight == 0)


async def test_a_store_that_fails_is_503(rig, client, monkeypatch):
    async def broken(*args):
        raise Unavailable("no registry")

    monkeypatch.setattr(rig.store, "place", broken)
    reply = await client.post("/v1/completions", json=ASK)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


def test_idle_connections_are_kept_for_longer_than_clients_keep_theirs(rig):
    """aiohttp keeps 15 s, nginx and load balancers 60 s: whoever closes later never loses a request in the race."""
    assert gateway_server.http_config(make_app(rig.front)).timeout_keep_alive > 60


async def test_a_chunked_body_over_the_limit_is_413(checkpoint):
    async def body():
        for _ in range(8):
            yield b" " * 1024

    async with gateway_of(checkpoint, max_body_nbytes=2048) as rig, rig.client() as client:
        assert (await client.post("/v1/completions", content=body())).status_code == 413
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
