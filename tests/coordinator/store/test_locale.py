"""Ties are broken by the bytes of ids, whatever the language of the machine that Redis runs on."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.node import WorkerRole
from coordinator.store.local_server import RedisServer
from coordinator.store.redis_store import RedisStore
from coordinator.store.store import Store
from testing.memory_store import MemoryStore
from tests.coordinator.conftest import program
from tests.coordinator.coordinator_rig import ask, fresh_pool, join, node, place

pytestmark = pytest.mark.slow

LOCALE = "de_DE.UTF-8"  # a < B < ä < Z; by bytes it is B < Z < a < ä
IDS = ["a", "B", "ä", "Z", "A1", "A-1", "a_1"]
BY_BYTES = sorted(IDS, key=str.encode)


@pytest.fixture(scope="module")
def german(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a German locale, once, since it takes more than a second; return the folder that it is in."""
    if not shutil.which("localedef") or not Path("/usr/share/i18n/locales/de_DE").exists():
        pytest.skip("no localedef, or no source of a German locale")
    folder = tmp_path_factory.mktemp("locales")
    command = ["localedef", "--no-archive", "-i", "de_DE", "-f", "UTF-8", str(folder / LOCALE)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture(params=["redis", "valkey"])
def german_server(
    request: pytest.FixtureRequest, german: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RedisServer]:
    """A server that collates as German does."""
    found = program(request.param)
    monkeypatch.setenv("LOCPATH", str(german))
    monkeypatch.setenv("LC_ALL", LOCALE)
    with RedisServer(found) as server:
        yield server


async def ties(store: Store) -> tuple[list[str], list[str]]:
    """The order in which workers that cost the same are listed, and in which they are chosen."""
    await join(store, *(node(name, WorkerRole.MIXED) for name in IDS))
    chosen: list[str] = []
    for name in IDS:
        route = await place(store, ask(name, exclude=tuple(chosen)))
        chosen.append(route.decode.worker_id)
    return [found.info.worker_id for found in await store.nodes()], chosen


def test_the_locale_is_really_another(german_server: RedisServer) -> None:
    """Without this the test below would prove nothing."""
    script = "local t = {'a', 'B'} table.sort(t) return t[1]"
    command = ["redis-cli", "-p", str(german_server.port), "eval", script, "0"]
    if not shutil.which("redis-cli"):
        pytest.skip("no redis-cli")
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip() == "a"


async def test_ids_are_in_the_order_of_their_bytes(german_server: RedisServer) -> None:
    store = RedisStore(german_server.url, fresh_pool())
    try:
        assert await ties(store) == (BY_BYTES, BY_BYTES)
    finally:
        await store.close()


async def test_the_twin_orders_them_the_same_way() -> None:
    assert await ties(MemoryStore()) == (BY_BYTES, BY_BYTES)
