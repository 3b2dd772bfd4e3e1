"""The process: starts or says why not, shows the state, reaps under a lock, goes on without Redis."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from contracts.errors import ConfigError, RegistryError, Unavailable
from contracts.ids import Epoch, RequestId
from coordinator import main, reaper
from coordinator.metrics import RedisTimes
from coordinator.reaper import GRACE_S, PERIOD_S, Reaper
from coordinator.service import make_app
from coordinator.settings import CoordinatorSettings
from coordinator.store.local_server import RedisServer, find_bundled, find_server
from coordinator.store.redis_store import RedisStore
from coordinator.store.store import Lead, Reaped, Store
from testing.memory_store import MemoryStore
from tests.coordinator.coordinator_rig import ALIVE_LOAD, ask, fresh_pool, pair, place
from tests.environment import plain_environment
from tests.waiting import async_until, is_gone, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SECRET = {"Authorization": "Bearer s"}


@asynccontextmanager
async def client(store: Store) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(store, "s", RedisTimes())
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://c") as opened:
        yield opened


class AbsentStore(MemoryStore):
    """Nobody answers."""

    async def ping(self) -> None:
        raise Unavailable("Redis does not answer")

    async def workers(self):
        raise Unavailable("Redis does not answer")

    async def lead(self, candidate: str, ttl_s: float) -> Lead:
        raise Unavailable("Redis does not answer")


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_nodes_are_shown_to_those_who_know_the_secret():
    store = MemoryStore()
    await pair(store)
    await place(store, ask("r"))
    async with client(store) as http:
        refused = await http.get("/nodes")
        assert refused.status_code == 401 and "TANDEM_SECRET" in refused.text
        decode, prefill = (await http.get("/nodes", headers=SECRET)).json()
    assert (decode["node"]["info"]["worker_id"], decode["reserved_tokens"]) == ("d0", 150)
    assert (prefill["node"]["alive"], prefill["pending_tokens"]) == (True, 100)


async def test_metrics_tell_workers_credits_and_states():
    store = MemoryStore()
    await pair(store)
    await place(store, ask("r"))
    await place(store, ask("s"))
    await store.finish(RequestId("s"), Epoch(1))
    async with client(store) as http:
        found = samples((await http.get("/metrics")).text)
    assert found["tandem_coordinator_redis_up",] == 1
    assert found["tandem_coordinator_workers", "prefill", "alive"] == 1
    assert found["tandem_coordinator_credit_reserved_tokens", "d0"] == 150
    assert found["tandem_coordinator_requests", "PLACED"] == 1
    assert found["tandem_coordinator_requests", "QUEUED"] == found["tandem_coordinator_ended_total", "FAILED"] == 0
    assert found["tandem_coordinator_ended_total", "FINISHED"] == 1
    assert found["tandem_coordinator_placed_total",] == 2


async def test_without_redis_it_is_well_but_not_ready():
    async with client(AbsentStore()) as http:
        await async_until(lambda: _knows(http))
        assert (await http.get("/health")).status_code == 200
        ready = await http.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "unavailable")
        assert (await http.get("/nodes", headers=SECRET)).status_code == 503
        assert samples((await http.get("/metrics")).text)["tandem_coordinator_redis_up",] == 0


async def test_a_redis_that_takes_no_writes_is_down_and_no_worker_is_told_dead():
    with RedisServer() as server, closing(redis.Redis.from_url(server.url)) as connection:
        store = RedisStore(server.url, fresh_pool())
        async with client(store) as http:
            await pair(store)
            connection.config_set("maxmemory", 1)
            await async_until(lambda: _knows(http))
            found = samples((await http.get("/metrics")).text)
            assert found["tandem_coordinator_redis_up",] == 0
            assert not any(name.startswith("tandem_coordinator_workers") for name, *_ in found)
        await store.close()


async def test_a_reaper_that_ended_makes_it_sick():
    """Nothing else would show it: requests of dead gateways would hold their credits for good."""

    class Broken(MemoryStore):
        async def lead(self, candidate: str, ttl_s: float) -> Lead:
            raise ValueError("what nobody foresaw")

    async with client(Broken()) as http:

        async def is_sick() -> bool:
            return (await http.get("/health")).status_code == 503

        await async_until(is_sick)
        assert "reaper" in (await http.get("/health")).json()["status"]


async def _knows(http: httpx.AsyncClient) -> bool:
    return not (await http.get("/health")).json()["redis"]


async def test_it_reaps_while_it_runs():
    store = MemoryStore()
    await pair(store)
    await place(store, ask("r", lease_s=0.0))

    async def is_reaped() -> bool:
        return (await store.counts()).reaped == 1

    async with client(store):
        await async_until(is_reaped)


async def test_only_the_leader_reaps():
    store = MemoryStore()
    one, two = Reaper(store), Reaper(store)
    await one.turn()
    await two.turn()
    assert (one.is_leader, two.is_leader) == (True, False)


async def test_another_takes_over_at_once_when_the_leader_stops():
    store = MemoryStore()
    one, two = Reaper(store), Reaper(store)
    task = asyncio.create_task(one.run())
    await async_until(lambda: one.is_leader)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await two.turn()
    assert two.is_leader


class CountingStore(AbsentStore):
    """Away while `is_away`; counts how often it is asked to end who is silent."""

    is_away, num_reaped = False, 0

    async def lead(self, candidate: str, ttl_s: float) -> Lead:
        return Lead.STILL if not self.is_away else await super().lead(candidate, ttl_s)

    async def reap(self, candidate: str) -> list[Reaped]:
        self.num_reaped += 1
        return []


@pytest.mark.parametrize(("away_s", "waits"), [(0.4, False), (4.0, True)])
async def test_behind_an_outage_nobody_is_ended_before_all_had_the_time_to_say_that_they_live(
    monkeypatch: pytest.MonkeyPatch, away_s: float, waits: bool
):
    """At its start, too: perhaps Redis starts with it. One call that failed is no outage."""
    store, clock = CountingStore(), SimpleNamespace(now=100.0)
    monkeypatch.setattr(reaper, "time", SimpleNamespace(monotonic=lambda: clock.now))
    one = Reaper(store)

    async def reaps(seconds: float) -> int:
        before, until_s = store.num_reaped, clock.now + seconds
        while clock.now < until_s:
            clock.now += PERIOD_S
            await one.turn()
        return store.num_reaped - before

    assert (await reaps(GRACE_S), one.is_leader) == (0, True)
    assert await reaps(2.0) >= 9
    store.is_away = True
    assert (await reaps(away_s), one.is_leader) == (0, False)
    store.is_away = False
    assert (await reaps(GRACE_S) == 0) == waits
    assert await reaps(2.0) >= 9


async def test_when_the_stores_clock_leaps_nobody_is_ended_before_all_had_the_time_to_say_that_they_live(
    monkeypatch: pytest.MonkeyPatch,
):
    """Behind a suspended machine, say: its wall clock is set, and the monotonic one stood still."""
    here, there = SimpleNamespace(now=100.0), SimpleNamespace(now=100.0)
    monkeypatch.setattr(reaper, "time", SimpleNamespace(monotonic=lambda: here.now))
    store = MemoryStore(clock=lambda: there.now)
    one = Reaper(store)
    await pair(store)

    async def go_on(seconds: float) -> None:
        until_s = here.now + seconds
        while here.now < until_s:
            here.now, there.now = here.now + PERIOD_S, there.now + PERIOD_S
            for worker in await store.nodes():
                await store.heartbeat(worker.info.worker_id, worker.info.incarnation, ALIVE_LOAD)
            await one.turn()

    await go_on(2 * GRACE_S)
    await place(store, ask("r"))
    there.now += 3600.0
    await one.turn()
    assert await store.renew([RequestId("r")], 10.0) == 1
    await go_on(2 * GRACE_S)
    counts = await store.counts()
    assert (one.is_leader, counts.reaped, counts.buried) == (True, 0, 0)


async def test_losing_redis_is_said_once(caplog: pytest.LogCaptureFixture):
    one = Reaper(AbsentStore())
    await one.turn()
    await one.turn()
    assert [record.message for record in caplog.records] == ["Redis does not answer"]
    assert not one.is_connected


def run(*options: str, before: Callable[[], None] | None = None, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "coordinator", *options],
        cwd=ROOT,
        env=plain_environment() | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=before,
    )


@contextmanager
def coordinator(
    ready_file: Path, redis_url: str, pool: str, before: Callable[[], None] | None = None
) -> Iterator[tuple[subprocess.Popen[str], dict]]:
    options = ("--ready-file", str(ready_file), "--redis-url", redis_url, "--pool", pool)
    process = run(*options, before=before, TANDEM_SECRET="s")
    try:
        until(lambda: ready_file.exists() or process.poll() is not None, 30.0)
        assert process.poll() is None, process.communicate()
        yield process, json.loads(ready_file.read_text())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("options", "secret", "words"),
    [
        (["--redis-url", "redis://127.0.0.1:1/0"], "s", "Redis does not answer at redis://127.0.0.1:1/0"),
        ([], "", "secret is empty"),
        (
            ["--port", "70000"],
            "s",
            "port is '70000': it must be less than or equal to 65535 (set by --port or TANDEM_PORT)",
        ),
        (["--redis-url", "http://x"], "s", "redis_url is 'http://x'"),
    ],
)
def test_what_is_wrong_is_one_line(options: list[str], secret: str, words: str):
    process = run(*options, TANDEM_SECRET=secret)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert said.startswith("tandem coordinator: ") and words in said and said.count("\n") == 1


async def test_a_redis_that_is_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class LateStore(MemoryStore):
        num_late = 3

        async def ping(self) -> None:
            self.num_late -= 1
            if self.num_late >= 0:
                raise RegistryError("Redis does not answer at redis://r", "does not answer")

    store, ready_file = LateStore(), tmp_path / "ready"
    monkeypatch.setattr(main, "connect", lambda *_: store)
    monkeypatch.setattr("coordinator.store.connect.START_RETRY_S", 0.001)
    settings = CoordinatorSettings.model_validate({"secret": SecretStr("s"), "ready_file": ready_file})
    running = asyncio.create_task(main._run(settings))
    await async_until(lambda: ready_file.exists() or running.done())
    assert not running.done() and store.num_late == -1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_stops_when_told(tmp_path: Path, any_server: RedisServer, number: signal.Signals):
    with coordinator(tmp_path / "ready", any_server.url, fresh_pool()) as (process, facts):
        assert facts["pid"] == process.pid
        assert httpx.get(f"{facts['url']}/ready").status_code == 200
        process.send_signal(number)
        assert process.wait(20) == 0
    assert not (tmp_path / "ready").exists()


def test_more_clients_than_a_shell_lets_it_have_files_are_answered(tmp_path: Path, any_server: RedisServer):
    with ExitStack() as opened:
        service = coordinator(tmp_path / "ready", any_server.url, fresh_pool(), before=few_files)
        _, facts = opened.enter_context(service)
        for _ in range(60):
            http = opened.enter_context(httpx.Client(base_url=facts["url"]))
            assert http.get("/ready").status_code == 200  # and its connection stays open


def few_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, most))


async def test_when_the_leader_is_killed_another_reaps(tmp_path: Path, any_server: RedisServer):
    pool = fresh_pool()
    store = RedisStore(any_server.url, pool, alive_s=600.0)
    await pair(store)

    async def is_reaped() -> bool:
        return (await store.counts()).reaped == 1

    with (
        coordinator(tmp_path / "one", any_server.url, pool) as (first, _),
        coordinator(tmp_path / "two", any_server.url, pool),
    ):
        first.kill()
        await place(store, ask("r", lease_s=0.0))
        await async_until(is_reaped)
    await store.close()


def test_a_server_is_found():
    assert os.access(find_server(), os.X_OK)
    bundled = find_bundled()
    assert bundled is not None and bundled.name == "valkey-server"


def test_a_server_that_does_not_start_says_why(tmp_path: Path):
    program = tmp_path / "server"
    program.write_text("#!/bin/sh\necho no luck today\nexit 1\n")
    program.chmod(0o700)
    with pytest.raises(ConfigError, match="no luck today"), RedisServer(program):
        raise AssertionError("it must not start")


def test_another_server_on_its_port_is_not_taken_for_it():
    """It may have come between the choice of the port and the start."""
    with RedisServer() as other:
        ours = RedisServer()
        ours.port = other.port
        with pytest.raises(ConfigError, match=f"did not start on port {other.port}"), ours:
            raise AssertionError("it must not start")


def test_the_server_dies_with_its_parent():
    code = "from coordinator.store.local_server import RedisServer as R; s = R().__enter__(); print(s.pid, flush=True)"
    parent = subprocess.Popen(
        [sys.executable, "-c", f"{code}; import time; time.sleep(60)"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
        parent.wait(60)
    until(lambda: is_gone(pid), 10.0)
