"""A real worker at work: what a gateway hears of its requests, what its metrics say, how it fails and how it leaves."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.events import Failed, Finished, Prefilled, Tokens
from contracts.ids import Epoch, RequestId
from contracts.request import Cancel
from coordinator.store.local_server import RedisServer
from tests.e2e.tiny import save_tiny
from tests.waiting import is_gone, until
from tests.worker.worker_rig import Gateway, RunningWorker, connected, running_worker, starved

pytestmark = pytest.mark.slow

R = RequestId("r")
LONG = 1900  # tokens: more than any test waits for


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def worker(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningWorker]:
    """Shared by the tests that leave it as it was: its core is soon said to hang."""
    with running_worker(tmp_path_factory.mktemp("worker"), model, "--hang-timeout-s", "2") as found:
        until(found.core)
        yield found


@pytest.fixture
def mortal(model: str, tmp_path: Path) -> Iterator[RunningWorker]:
    with running_worker(tmp_path, model, "--drain-timeout-s", "60") as found:
        until(found.core)
        yield found


async def test_a_request_is_told_from_the_first_token_to_its_one_end(worker: RunningWorker) -> None:
    async def body(gateway: Gateway) -> None:
        assert await gateway.post(gateway.job("r", num_tokens=20, max_tokens=8)) == 202
        await gateway.until(lambda: gateway.ends("r"))
        prefilled, *rest = gateway.events
        assert isinstance(prefilled, Prefilled) and set(prefilled.stages_s) == {"queue", "prefill"}
        tokens = [token.index for event in rest if isinstance(event, Tokens) for token in event.tokens]
        assert tokens == list(range(8))
        (end,) = gateway.ends("r")
        assert isinstance(end, Finished) and (end.num_tokens, end.reason) == (8, "length")
        (longest,) = end.stages_s.keys() - {"queue", "prefill", "decode"}
        assert longest == "longest_decode_step" and 0.0 < end.stages_s[longest] < end.stages_s["decode"]

    await connected(worker, body)
    worker.wait_clean()


async def test_the_metrics_count_what_was_done(worker: RunningWorker) -> None:
    worker.wait_clean()
    before = worker.metrics()

    async def body(gateway: Gateway) -> None:
        jobs = [gateway.job(f"m{number}", num_tokens=33, max_tokens=5) for number in range(3)]
        assert await gateway.post(*jobs, Cancel(RequestId("nobody"), Epoch(1), "why")) == 202
        for number in range(3):
            await gateway.until(lambda number=number: gateway.ends(f"m{number}"))

    await connected(worker, body)
    worker.wait_clean()
    after = worker.metrics()
    grown = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    hits = grown.pop("tandem_worker_prefix_hit_tokens_total", 0.0)
    assert grown.pop("tandem_worker_steps_total") >= 5
    assert grown.pop("tandem_worker_prefix_query_tokens_total") == 3 * 33
    assert grown.pop("tandem_worker_prefill_tokens_total") == 3 * 33 - hits
    assert grown.pop("tandem_worker_decode_tokens_total") == 3 * 4
    assert grown.pop("tandem_worker_jobs_taken_total") == 3
    assert grown.pop("tandem_worker_cancels_taken_total") == 1
    assert grown.pop("tandem_worker_local_requests_total") == 3
    others = {name for name in grown if "_collection" not in name}  # of garbage, at any time
    assert others <= {"tandem_worker_cached_blocks"}


def test_the_names_that_dashboards_use_are_there(worker: RunningWorker) -> None:
    names = {name.removeprefix("tandem_worker_") for name in worker.metrics()}
    gauges = {
        "up",
        "running",
        "waiting",
        "queue_tokens",
        "free_tokens",
        "cached_blocks",
        "held",
        "reserved",
        "requests",
    }
    prefill = {"handoffs_offered", "handoffs_committed", "handoffs_aborted", "handoffs_local", "commit_wait_seconds"}
    decode = {
        "kv_handoffs_received_granted",
        "kv_handoffs_received_committed",
        "kv_handoffs_received_aborted",
        "kv_handoffs_received_waited",
        "kv_handoffs_received_without_draft",
        "chunks_bad",
    }
    counters = prefill | decode | {"steps", "preemptions", "stale_messages", "quarantined", "kv_saved_tokens"}
    assert gauges | {"requests"} | {f"{name}_total" for name in counters} <= names


async def test_a_cancel_ends_it_without_a_word_and_frees_everything(worker: RunningWorker) -> None:
    async def body(gateway: Gateway) -> None:
        await gateway.post(gateway.job("r", max_tokens=LONG))
        await gateway.until(lambda: any(isinstance(event, Tokens) for event in gateway.events))
        await gateway.post(Cancel(R, Epoch(1), "the client left"))
        worker.wait_clean()
        assert gateway.ends("r") == []

    await connected(worker, body)


async def test_a_deadline_is_kept_by_the_core(worker: RunningWorker) -> None:
    async def body(gateway: Gateway) -> None:
        await gateway.post(gateway.job("r", max_tokens=LONG, timeout_s=0.3))
        await gateway.until(lambda: gateway.ends("r"))
        (end,) = gateway.ends("r")
        assert isinstance(end, Failed) and (end.code, end.message) == ("deadline_exceeded", "not done within 0.3 s")

    await connected(worker, body)
    worker.wait_clean()


async def test_a_prompt_that_can_never_fit_fails_alone(worker: RunningWorker) -> None:
    async def body(gateway: Gateway) -> None:
        await gateway.post(gateway.job("huge", num_tokens=100_000), gateway.job("small"))
        await gateway.until(lambda: gateway.ends("huge") and gateway.ends("small"))
        assert [type(end) for end in gateway.ends("huge")] == [Failed]
        assert [type(end) for end in gateway.ends("small")] == [Finished]

    await connected(worker, body)


def test_a_core_that_stands_still_is_unhealthy_until_it_turns_again(worker: RunningWorker) -> None:
    os.kill(worker.core_pid, signal.SIGSTOP)
    try:
        until(lambda: worker.status_of("/health")[0] == 503)
        status, words = worker.status_of("/health")
        assert status == 503 and words.startswith("the engine core has made no turn for ")
        assert worker.status_of("/ready")[0] == 503
        assert worker.metrics()["tandem_worker_up"] == 0.0
    finally:
        os.kill(worker.core_pid, signal.SIGCONT)
    until(lambda: worker.status_of("/health") == (200, "ok"))
    until(lambda: worker.status_of("/ready") == (200, "ready"))


async def test_a_core_that_stands_still_ends_the_streams_of_those_who_wait_for_it(model: str, tmp_path: Path) -> None:
    async def body(gateway: Gateway) -> None:
        await gateway.post(gateway.job("r", max_tokens=LONG))
        await gateway.until(lambda: any(isinstance(event, Tokens) for event in gateway.events))
        os.kill(worker.core_pid, signal.SIGSTOP)
        await gateway.until(lambda: not gateway.is_open)
        assert gateway.ends("r") == []

    with running_worker(tmp_path, model, "--hang-timeout-s", "3") as worker:
        until(worker.core)
        await connected(worker, body)
        os.kill(worker.core_pid, signal.SIGCONT)


def test_a_core_that_hangs_for_good_is_killed_and_its_worker_ends(model: str, tmp_path: Path) -> None:
    with running_worker(tmp_path, model, "--hang-timeout-s", "1") as worker:
        until(worker.core)
        os.kill(worker.core_pid, signal.SIGSTOP)
        assert worker.process.wait(60) == 3
        said = worker.log.read_text()
        assert "and is killed" in said and "the engine core was killed by this worker" in said


def test_a_worker_that_was_paused_goes_on(model: str, tmp_path: Path) -> None:
    """For longer than a core may hang, as containers and virtual machines are: with its core, which is not to blame."""
    with running_worker(tmp_path, model, "--hang-timeout-s", "2") as worker:
        until(worker.core)
        for pid in (worker.process.pid, worker.core_pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5.0)
        os.kill(worker.process.pid, signal.SIGCONT)
        until(lambda: worker.status_of("/health")[0] in (200, 503))  # the front has had its turn, the core has not
        os.kill(worker.core_pid, signal.SIGCONT)
        until(lambda: worker.status_of("/health") == (200, "ok"))
        assert "is killed" not in worker.log.read_text()


async def test_a_core_that_gets_no_cpu_is_not_killed_for_it(model: str, tmp_path: Path) -> None:
    """On a host that stands still one turn takes longer than a core may hang, although it is well."""

    async def body(gateway: Gateway) -> None:
        await gateway.post(gateway.job("r", max_tokens=LONG))
        await gateway.until(lambda: any(isinstance(event, Tokens) for event in gateway.events))
        with starved(worker.core_pid):
            await asyncio.sleep(10.0)
        await gateway.until(lambda: gateway.ends("r"))
        assert isinstance(gateway.ends("r")[0], Finished)

    with running_worker(tmp_path, model, "--hang-timeout-s", "3") as worker:
        until(worker.core)
        await connected(worker, body)
        assert "is killed" not in worker.log.read_text()


async def test_when_the_core_is_killed_the_stream_ends_and_the_worker_says_why(mortal: RunningWorker) -> None:
    async def body(gateway: Gateway) -> None:
        await gateway.post(gateway.job("r", max_tokens=LONG))
        await gateway.until(lambda: any(isinstance(event, Tokens) for event in gateway.events))
        os.kill(mortal.core_pid, signal.SIGKILL)
        await gateway.until(lambda: not gateway.is_open)
        assert gateway.ends("r") == []  # the gateway ends it: a worker that lost its core has nothing to say of it

    await connected(mortal, body)
    assert mortal.process.wait(60) == 3
    assert "the engine core was killed by SIGKILL (the kernel does that when memory runs out)" in mortal.log.read_text()


async def test_told_to_stop_it_takes_nothing_new_and_finishes_what_runs(mortal: RunningWorker) -> None:
    async def body(gateway: Gateway) -> None:
        await gateway.post(gateway.job("r", max_tokens=LONG))
        await gateway.until(lambda: any(isinstance(event, Tokens) for event in gateway.events))
        mortal.process.send_signal(signal.SIGTERM)
        await gateway.until(lambda: mortal.status_of("/ready") == (503, "draining"))
        assert await gateway.post(gateway.job("late")) == 503
        await gateway.until(lambda: gateway.ends("r"))
        (end,) = gateway.ends("r")
        assert isinstance(end, Finished) and end.num_tokens == LONG

    await connected(mortal, body)
    assert mortal.process.wait(60) == 0
    until(lambda: is_gone(mortal.core_pid))


async def test_told_twice_it_does_not_wait(mortal: RunningWorker) -> None:
    async def body(gateway: Gateway) -> None:
        await gateway.post(gateway.job("r", max_tokens=LONG))
        await gateway.until(lambda: any(isinstance(event, Tokens) for event in gateway.events))
        mortal.process.send_signal(signal.SIGTERM)
        await gateway.until(lambda: mortal.status_of("/ready") == (503, "draining"))
        mortal.process.send_signal(signal.SIGTERM)
        await gateway.until(lambda: not gateway.is_open)
        assert gateway.ends("r") == []

    await connected(mortal, body)
    assert mortal.process.wait(60) == 0


async def test_what_does_not_end_in_time_is_given_up(model: str, tmp_path: Path) -> None:
    with running_worker(tmp_path, model, "--drain-timeout-s", "0.1") as worker:

        async def body(gateway: Gateway) -> None:
            await gateway.post(gateway.job("r", max_tokens=LONG))
            await gateway.until(lambda: any(isinstance(event, Tokens) for event in gateway.events))
            worker.process.send_signal(signal.SIGTERM)
            await gateway.until(lambda: not gateway.is_open)

        await connected(worker, body)
        assert worker.process.wait(60) == 0
        assert "1 requests were still running after" in worker.log.read_text()


async def test_without_redis_it_goes_on_and_joins_again_when_it_is_back(model: str, tmp_path: Path) -> None:
    """Fault 10 and 11: Redis goes away and comes back empty."""
    with RedisServer() as redis, running_worker(tmp_path, model, "--redis-url", redis.url) as worker:
        until(lambda: worker.status_of("/ready") == (200, "ready"))
        redis.stop()
        until(lambda: worker.status_of("/ready") == (503, "not in the registry"))
        assert worker.status_of("/health") == (200, "ok")

        async def body(gateway: Gateway) -> None:
            await gateway.post(gateway.job("r"))
            await gateway.until(lambda: gateway.ends("r"))
            assert isinstance(gateway.ends("r")[0], Finished)

        await connected(worker, body)
        redis.start()
        until(lambda: worker.status_of("/ready") == (200, "ready"))
        assert "joining again" in worker.log.read_text()
