"""The HTTP server of a service: who closes an idle connection, and that it ends with its block."""

import asyncio
import signal
import socket
from contextlib import suppress

import aiohttp
import pytest
from fastapi import FastAPI

from process.sockets import listen
from service import server
from service.http_protocol import MAX_HEADERS_NBYTES
from service.server import serving

REQUEST = b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n"


def make_app() -> FastAPI:
    app = FastAPI()

    @app.get("/ping")
    async def ping() -> str:
        return "pong"

    return app


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(REQUEST)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    await reader.readexactly(len(b'"pong"'))
    return head


async def connect(listener: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])


async def test_our_clients_give_an_idle_connection_up_before_the_server_does():
    """Otherwise a job that is posted just then gets no answer.

    The gateway would take the worker for lost.
    """
    async with aiohttp.TCPConnector(limit=0) as connector:  # as the gateway makes it
        assert float(connector._keepalive_timeout or 0) in range(1, server.KEEP_ALIVE_S // 2)


async def test_the_server_closes_a_connection_that_was_idle_for_its_limit(monkeypatch):
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)
    with listen("127.0.0.1", 0) as listener:
        async with serving(make_app(), listener):
            reader, writer = await connect(listener)
            assert (await ask(reader, writer)).startswith(b"HTTP/1.1 200")
            assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()


async def test_one_connection_takes_many_requests():
    with listen("127.0.0.1", 0) as listener:
        async with serving(make_app(), listener):
            reader, writer = await connect(listener)
            for _ in range(3):
                assert (await ask(reader, writer)).startswith(b"HTTP/1.1 200")
            writer.close()


@pytest.mark.parametrize("first", [b"", REQUEST], ids=["first", "second"])
async def test_headers_without_an_end_are_refused(first):
    """Without the secret one could fill a worker's memory with them."""
    with listen("127.0.0.1", 0) as listener:
        async with serving(make_app(), listener):
            reader, writer = await connect(listener)
            writer.write(first)
            said = b""
            with suppress(ConnectionError):  # it does not read what comes after
                writer.write(b"GET /ping HTTP/1.1\r\nhost: x\r\n")
                for _ in range(MAX_HEADERS_NBYTES // 1000 + 1):
                    writer.write(b"x: " + b"a" * 1000 + b"\r\n")
                    await writer.drain()
                said = await asyncio.wait_for(reader.read(), 60)
            assert b'"code": "headers_too_long"' in said
            writer.close()
            reader, writer = await connect(listener)
            assert (await ask(reader, writer)).startswith(b"HTTP/1.1 200")
            writer.close()


async def test_headers_that_do_not_come_end_the_connection(monkeypatch):
    monkeypatch.setattr("service.http_protocol.HEADERS_TIMEOUT_S", 0.2)
    with listen("127.0.0.1", 0) as listener:
        async with serving(make_app(), listener):
            reader, writer = await connect(listener)
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()


async def test_the_end_of_the_block_is_the_end_of_the_server():
    with listen("127.0.0.1", 0) as listener:
        async with serving(make_app(), listener) as task:
            reader, writer = await connect(listener)
            await ask(reader, writer)
        assert task.done()
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_a_signal_is_left_to_its_owner():
    """uvicorn's own handlers would replace those of the service."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with listen("127.0.0.1", 0) as listener:
        async with serving(make_app(), listener):
            reader, writer = await connect(listener)
            await ask(reader, writer)
            assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
            writer.close()
