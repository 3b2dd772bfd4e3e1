"""The door: keys, origins, headers, slow readers."""

import asyncio
import json
import logging
import socket
from dataclasses import replace

import pytest

from gateway.http import server as gateway_server
from service.http_protocol import MAX_HEADERS_NBYTES
from tests.gateway.gateway_rig import gateway, pair

pytestmark = pytest.mark.slow

ASK = {"prompt": "one two three", "max_tokens": 3}
KEY, OTHER = "sk-first-1234567890", "sk-second-0987654321"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (None, 401),
        ("", 401),
        (KEY, 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        (f"Basic {KEY}", 401),
        (f"Bearer {KEY[:-1]}", 401),
        (f"Bearer {KEY},{OTHER}", 401),
        ("Bearer \xe9".encode("latin-1"), 401),
        (f"Bearer {KEY}", 200),
        (f"bearer {OTHER}", 200),
    ],
)
async def test_a_key_opens_and_nothing_else_does(checkpoint, caplog, sent, status):
    caplog.set_level(logging.DEBUG)
    locked = gateway(checkpoint, pair(), api_key=f"{KEY}, {OTHER}")
    async with locked as rig, rig.client() as client:
        headers = {} if sent is None else {"Authorization": sent}
        for path in ("/v1/completions", "/v1/nothing", "/tokenize"):
            reply = await client.post(path, json=ASK if path != "/tokenize" else {"prompt": "a"}, headers=headers)
            assert reply.status_code == (404 if status == 200 and "nothing" in path else status)
        assert (await client.get("/v1/models", headers=headers)).status_code == status
        if status == 401:
            assert (reply.headers["www-authenticate"], reply.json()["error"]["type"]) == (
                "Bearer",
                "AuthenticationError",
            )
        for path in ("/health", "/ready", "/metrics", "/version", "/ping"):
            assert (await client.get(path)).status_code == 200
    assert KEY not in caplog.text and OTHER not in caplog.text


async def test_without_keys_everybody_may(checkpoint):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        for shown in ("Bearer whatever", "Bearer", ""):
            headers = {"Authorization": shown}
            assert (await client.post("/v1/completions", json=ASK, headers=headers)).status_code == 200
        head = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \r\nConnection: close\r\n\r\n"
        assert (await raw(rig.url, head)).startswith(b"HTTP/1.1 200")


async def test_what_load_generators_and_routers_of_vllm_send_first_is_answered(checkpoint):
    """aiperf looks for metrics by HEAD; vllm-router has fields of its own, and asks for a rendering beforehand."""
    own = {
        "data_parallel_rank": 0,
        "return_hidden_states": False,
        "bootstrap_room": None,
        "rid": "r",
        "lora_path": None,
    }
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        assert (await client.head("/metrics")).status_code == 200
        ask = ASK | own | {"temperature": 0.699999988079071, "stream_options": None}
        reply = await client.post("/v1/completions", json=ask, headers={"Authorization": "Bearer"})
        assert reply.status_code == 200
        assert (await client.post("/tokenize", json={"prompt": "hi"} | own)).status_code == 200
        assert (await client.post("/render", json=ask)).status_code == 404
        assert len(rig.workers[0].jobs) == 1


@pytest.mark.parametrize(
    ("allowed", "origin", "echoed"),
    [
        ("", "https://a.example", None),
        ("https://a.example", "https://a.example", "https://a.example"),
        ("https://a.example, https://b.example", "https://c.example", None),
        ("*", "https://c.example", "*"),
    ],
)
async def test_other_sites_may_only_if_named(checkpoint, allowed, origin, echoed):
    async with gateway(checkpoint, pair(), cors_origins=allowed) as rig, rig.client() as client:
        reply = await client.post("/v1/completions", json=ASK, headers={"Origin": origin})
        assert reply.status_code == 200
        assert reply.headers.get("access-control-allow-origin") == echoed
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        asked["Access-Control-Request-Headers"] = "authorization,content-type"
        preflight = await client.options("/v1/completions", headers=asked)
        assert (preflight.status_code == 200) == (echoed is not None)


async def raw(url: str, data: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: a\r\n"
        + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 100) for i in range(400))
        + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * 70_000,
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nX-Long: " + b"a" * 40_000 + b"\r\n\r\nhello",
    ],
    ids=["many", "endless", "url", "with a body"],
)
async def test_headers_beyond_the_limit_are_431(checkpoint, head):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        reply = await raw(rig.url, head)
        assert reply.startswith(b"HTTP/1.1 431 ") and b'"code": 431' in reply
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200


@pytest.mark.parametrize("piece", [b"X: y\r\n" * 1000, b"a" * 6000], ids=["many", "endless"])
@pytest.mark.parametrize("keys", ["", "k"])
async def test_headers_behind_a_body_are_limited_too(checkpoint, keys, piece):
    """Without a key one could fill the gateway's memory with them: 80 MB took 1.5 GB."""
    async with gateway(checkpoint, pair(), api_key=keys) as rig:
        host, port = rig.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ")
        with pytest.raises(ConnectionError):
            for _ in range(400):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
        writer.close()


async def test_a_body_may_come_in_many_small_pieces(checkpoint):
    """What parts them is longer than they are, and than headers may be."""
    body = json.dumps(ASK | {"user": "u" * 10_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\nX-Sum: 1\r\n\r\n"
    assert len(pieces) > MAX_HEADERS_NBYTES
    async with gateway(checkpoint, pair()) as rig:
        assert (await raw(rig.url, head + pieces)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"anything"])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_request_that_offers_another_protocol_is_served_in_this_one(checkpoint, protocol, is_chunked):
    """Java's HttpClient offers h2c. Once with the body in one piece with the head, once behind it."""
    body = json.dumps(ASK).encode()
    length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    offer = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n" % protocol
    )
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n%s%s\r\n\r\n" % (offer, length)
    async with gateway(checkpoint, pair()) as rig:
        host, port = rig.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(60):
            for parts in ([head + sent], [head, sent], [head[:50], head[50:] + sent[:3], sent[3:] + head + sent]):
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.02)  # so that parts come as parts
                for _ in range(b"".join(parts).count(b"POST")):
                    assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
                    reply = await reader.readuntil(b"\r\n\r\n")
                    await reader.readexactly(int(reply.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.close()
        assert (await raw(rig.url, b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


async def test_what_is_written_is_sent_at_once(checkpoint):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        await client.get("/health")
        (connection,) = rig.server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_long_body_is_no_header(checkpoint):
    async with gateway(checkpoint, pair()) as rig, rig.client() as client:
        for _ in range(2):
            reply = await client.post("/v1/completions", json=ASK | {"user": "a" * 300_000})
            assert reply.status_code == 200


async def test_a_client_that_does_not_read_is_cut_and_its_workers_freed(checkpoint, monkeypatch):
    monkeypatch.setattr(gateway_server, "UNREAD_TIMEOUT_S", 0.3)
    workers = pair()
    for worker in workers:
        worker.max_model_len = 60_000
    long = replace(checkpoint, config=replace(checkpoint.config, max_model_len=60_000))
    async with gateway(long, workers) as rig:
        host, port = rig.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = b'{"prompt": "one two three", "max_tokens": 50000, "stream": true, "logprobs": 5}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await rig.until(lambda: rig.workers[0].jobs)
        await rig.until(rig.is_idle)
        assert rig.store.ends == ["CANCELLED"]
        await rig.until(lambda: not rig.server.server_state.connections)
        writer.close()
