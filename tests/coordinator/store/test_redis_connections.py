"""Connections to a real server: replies go to their own calls, and old connections keep no call from a new server."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from redis.exceptions import RedisError, ResponseError

from coordinator.store.local_server import RedisServer
from coordinator.store.redis_connections import MAX_CONNECTIONS, RedisConnections
from tests.waiting import async_until


@pytest.fixture
async def connections(any_server: RedisServer) -> AsyncIterator[RedisConnections]:
    opened = RedisConnections(any_server.url)
    yield opened
    await opened.close()


async def at_once(connections: RedisConnections, num_calls: int) -> list[bytes]:
    return await asyncio.gather(*(connections.call("ECHO", f"{index}") for index in range(num_calls)))


async def num_connected(connections: RedisConnections) -> int:
    return len((await connections.call("CLIENT", "LIST", "TYPE", "normal")).splitlines())


async def test_many_calls_at_once_have_their_own_replies_on_few_connections(connections: RedisConnections) -> None:
    before = await num_connected(connections)
    assert await at_once(connections, 200) == [b"%d" % index for index in range(200)]
    assert await num_connected(connections) - before < MAX_CONNECTIONS  # the first is among them


async def test_the_reply_of_a_call_that_was_given_up_is_nobodys() -> None:
    with RedisServer() as server:
        connections = RedisConnections(server.url)
        assert await connections.call("ECHO", "first") == b"first"
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            given_up = asyncio.create_task(connections.call("ECHO", "cancelled"))
            await asyncio.sleep(0.05)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert await at_once(connections, 3) == [b"0", b"1", b"2"]
        await connections.close()


async def test_after_a_restart_each_of_many_old_connections_is_left_at_once() -> None:
    with RedisServer() as server:
        connections = RedisConnections(server.url)
        await at_once(connections, 8)
        server.stop()
        with pytest.raises((RedisError, OSError)):
            await connections.call("PING")
        server.start()
        assert await connections.call("PING")
        await at_once(connections, 8)
        server.stop()
        server.start()
        assert await at_once(connections, 8) == [b"%d" % index for index in range(8)]
        await connections.close()


async def test_a_refused_command_costs_no_connection(connections: RedisConnections) -> None:
    name = await connections.call("CLIENT", "ID")
    with pytest.raises(ResponseError):
        await connections.call("INCR")
    assert await connections.call("CLIENT", "ID") == name


async def test_closing_leaves_no_connection_not_even_one_that_is_lent(
    connections: RedisConnections, any_server: RedisServer
) -> None:
    before = await num_connected(connections)
    other = RedisConnections(any_server.url)
    await at_once(other, 4)
    lent = asyncio.create_task(other.call("BLPOP", "nothing", 0.1))
    await asyncio.sleep(0)
    await other.close()
    assert await lent is None

    async def is_alone() -> bool:
        return await num_connected(connections) == before

    await async_until(is_alone)
