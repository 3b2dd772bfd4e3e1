"""The connections to one Redis server, each lent to one call at a time."""

import asyncio
from typing import Any

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError, ReadOnlyError

EXCHANGE_TIMEOUT_S, CONNECT_TIMEOUT_S = 0.25, 0.5
"""The longest that a server may take for one command, and for a new connection with its handshake."""
MAX_CONNECTIONS = 32
"""More calls than this at once wait for one another: Redis runs scripts one at a time anyway."""


class RedisConnections:
    """Connections of redis-py without its client.

    Its layers (pool, retries, timeouts, measuring) cost more than the call, and a request makes three. Owned by
    the event loop.
    """

    def __init__(self, url: str) -> None:
        """Raise ValueError for a URL that is none of Redis, or has parameters that no connection has."""
        self._pool = ConnectionPool.from_url(  # pyright: ignore[reportUnknownMemberType]
            url, socket_timeout=None, socket_connect_timeout=CONNECT_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)
        self._idle: list[AbstractConnection] = []
        self._is_closed = False

    async def call(self, *command: Any) -> Any:
        """Return the server's reply to an idempotent command.

        It is sent again, on a new connection, if no reply comes. Raises RedisError, and OSError where a wait for the
        server was too long.
        """
        async with self._free:
            try:
                return await self._exchange(command, self._idle.pop() if self._idle else await self._connected())
            except AuthenticationError:  # a ConnectionError to redis-py, but the server did answer
                raise
            except (ConnectionError, OSError, ReadOnlyError):
                # The server may be another than that of the last call: it restarted, or its name leads elsewhere now.
                await self._drop_idle()
                return await self._exchange(command, await self._connected())

    async def close(self) -> None:
        """Close the connections; one that is lent is closed once its call ends."""
        self._is_closed = True
        await self._drop_idle()

    async def _exchange(self, command: tuple[Any, ...], connection: AbstractConnection) -> Any:
        """Send on a connection that no other call has, and put it back for the next one.

        Not so if its reply is still to come, or if it leads to a replica.
        """
        is_replica = False
        try:
            async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                await connection.send_packed_command(connection.pack_command(*command))
                # Whatever interrupts either closes the connection.
                return await connection.read_response()  # pyright: ignore[reportUnknownVariableType]
        except ReadOnlyError:
            is_replica = True
            raise
        finally:
            if is_replica or self._is_closed:
                await connection.disconnect(nowait=True)
            elif connection.is_connected:
                self._idle.append(connection)

    async def _connected(self) -> AbstractConnection:
        connection = self._pool.make_connection()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)
