"""Stores to test: the twin, a Redis and a Valkey, whichever of them this machine has."""

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from coordinator.store.local_server import RedisServer, find_bundled
from coordinator.store.redis_store import RedisStore
from coordinator.store.store import Store
from testing.memory_store import MemoryStore
from tests.coordinator.coordinator_rig import fresh_pool


def program(kind: str) -> Path:
    found = shutil.which("redis-server") if kind == "redis" else find_bundled()
    if not found:
        pytest.skip(f"no {kind} server on this machine")
    return Path(found)


@pytest.fixture(scope="session")
def any_server() -> Iterator[RedisServer]:
    """Whichever `tandem up` would take."""
    with RedisServer() as running:
        yield running


@pytest.fixture
async def redis_store(any_server: RedisServer) -> AsyncIterator[RedisStore]:
    store = RedisStore(any_server.url, fresh_pool())
    yield store
    await store.close()


@pytest.fixture(scope="session")
def valkey() -> Iterator[RedisServer]:
    with RedisServer(program("valkey")) as running:
        yield running


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    with RedisServer(program("redis")) as running:
        yield running


@pytest.fixture(params=["memory", "redis", "valkey"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """Its workers never die of silence."""
    async for opened in opened_store(request, alive_s=600.0):
        yield opened


@pytest.fixture(params=["memory", "redis", "valkey"])
async def mortal_store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """Its workers are dead after a second of silence, and forgotten after another."""
    async for opened in opened_store(request, alive_s=1.0):
        yield opened


async def opened_store(request: pytest.FixtureRequest, alive_s: float) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore(alive_s=alive_s, stale_record_kept_s=1.0)
        return
    server: RedisServer = request.getfixturevalue(request.param)
    opened = RedisStore(server.url, fresh_pool(), alive_s=alive_s, stale_record_kept_s=1.0)
    yield opened
    await opened.close()
