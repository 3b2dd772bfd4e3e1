"""What the client sees when things break, and what is left afterwards."""

import asyncio
import os
import random
import re
import signal

import httpx
import openai
import pytest

from bench.load.client import StreamResult, ask, body_of, session
from bench.system.local_system import System, get_json, running
from tests.e2e.sockets_of_processes import reset_tcp
from tests.e2e.tiny import save_tiny
from tests.waiting import is_gone, until

pytestmark = pytest.mark.slow

SOON_S = 30.0
UNENDING = {"ignore_eos": True}  # a random model may end its answer anywhere
QUICK = {"TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "64"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def pair(tiny):
    """For two tests, the second of which ends it."""
    with running("--model", tiny, "--dtype", "float32", **QUICK, TANDEM_TRANSFER="tcp") as system:
        yield system


def is_clean(system: System) -> bool:
    return all(map(is_clean_worker, system.workers()))


def is_clean_worker(worker: dict) -> bool:
    return get_json(f"{worker['url']}/health")["core"]["is_clean"]


@pytest.mark.parametrize(("roles", "count"), [(("decode", "prefill"), "2"), (("decode",), "1")])
def test_an_answer_outlives_the_worker_that_had_it(tiny, roles, count):
    """Greedy and in float32: what another worker goes on with is what the first one would have said. Another, or the
    same one: `tandem up` starts it again.

    It computes in one pass what the first one computed token by token, which rounds otherwise: this answer's two
    likeliest tokens are never closer than 2.6e-3 in float64, 32 times what float32 was off by anywhere. That of
    `[7] * 40` has a tie of 1.1e-5, which fell either way.
    """

    async def answered(system: System) -> StreamResult:
        async with session() as http:
            return await ask(http, system.url, body_of(system.model(), [8] * 40, 1000), 1000)

    async def lose(system: System, role: str) -> tuple[StreamResult, dict]:
        asked = asyncio.create_task(answered(system))
        await asyncio.to_thread(until, lambda: is_answering(system), SOON_S)
        lost = await asyncio.to_thread(serving, system, role)
        os.kill(lost["core_pid"], signal.SIGKILL)
        return await asyncio.wait_for(asked, 60), lost

    with running("--model", tiny, "--dtype", "float32", "--prefill", count, "--decode", count, **QUICK) as system:
        undisturbed = asyncio.run(answered(system))
        for role in roles:
            answer, busy = asyncio.run(lose(system, role))
            assert (undisturbed.error, answer.error) == ("", "")
            assert (answer.num_tokens, answer.text) == (1000, undisturbed.text)
            with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=3) as client:
                ask_more = {"model": system.model(), "prompt": [1, 2, 3], "max_tokens": 4}
                reply = client.completions.create(**ask_more, extra_body=UNENDING)
            assert reply.usage is not None and reply.usage.completion_tokens == 4
            survivors = [worker for worker in system.workers() if worker["id"] != busy["id"]]
            until(lambda those=survivors: all(map(is_clean_worker, those)), SOON_S)
        assert b"tandem_gateway_replays_total 1.0" in httpx.get(f"{system.url}/metrics").content  # of decode alone


def is_answering(system: System) -> bool:
    """Its only request has a token."""
    return bool(re.search(rb"^vllm:num_requests_running\S* 1.0$", httpx.get(f"{system.url}/metrics").content, re.M))


def serving(system: System, role: str) -> dict:
    """The worker that has the only request. Prefill, which has it no more by now: the first."""
    workers = [worker for worker in system.workers() if worker["role"] == role]
    if role == "prefill":
        return workers[0]
    found: list[dict] = []

    def is_known() -> bool:
        found[:] = [w for w in workers if get_json(f"{w['url']}/health")["core"]["gauges"]["requests"]]
        return bool(found)

    until(is_known, SOON_S)
    return found[0]


def one_of(system: System, role: str) -> dict:
    return next(worker for worker in system.workers() if worker["role"] == role)


def test_more_than_fits_is_429_and_the_rest_is_answered(tiny):
    async def crowd(system: System) -> list[str]:
        async with session() as http:
            bodies = [body_of(system.model(), [i % 256] * 200, 50) for i in range(60)]
            asked = (ask(http, system.url, body, 50) for body in bodies)
            return [answer.error for answer in await asyncio.gather(*asked)]

    with running("--model", tiny, "--dtype", "float32", TANDEM_NUM_THREADS="1", TANDEM_KV_CACHE_MIB="1") as system:
        errors = asyncio.run(crowd(system))
        assert all(error == "" or error.startswith("429") for error in errors)
        assert errors.count("") > 0 and any(error.startswith("429") for error in errors)
        until(lambda: is_clean(system), SOON_S)


def test_the_only_link_may_be_reset_under_load(pair):
    """Its requests are tried again with the one peer there is, once the link is back."""

    async def disturbed(system: System) -> list[StreamResult]:
        rng, core = random.Random(2), one_of(system, "prefill")["core_pid"]
        prompts = [[rng.randrange(256) for _ in range(400)] for _ in range(24)]
        async with session() as http:
            asked = [asyncio.ensure_future(ask(http, system.url, body_of(system.model(), p, 30), 30)) for p in prompts]
            for number in (2, 8, 14):
                while sum(one.done() for one in asked) < number:
                    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=0.05)
                # Nobody connects again for answers that have all ended meanwhile.
                await asyncio.to_thread(until, lambda: reset(core) or all(one.done() for one in asked), SOON_S)
            return await asyncio.gather(*asked)

    num_reset = 0

    def reset(core: int) -> bool:
        nonlocal num_reset
        num_now = reset_tcp(core)
        num_reset += num_now
        return num_now > 0

    answers = asyncio.run(disturbed(pair))
    assert num_reset > 0
    assert [answer.error for answer in answers] == [""] * len(answers)
    assert [answer.num_tokens for answer in answers] == [30] * len(answers)
    until(lambda: is_clean(pair), SOON_S)


def test_clients_that_leave_free_both_workers_and_a_killed_supervisor_leaves_none(pair):
    async def storm(system: System) -> list[str]:
        rng, model = random.Random(1), system.model()

        async def one(http, leave_after: int | None) -> str:
            prompt, most = [rng.randrange(256) for _ in range(rng.randrange(4, 300))], rng.randrange(2, 60)
            return (await ask(http, system.url, body_of(model, prompt, most), most, leave_after)).error

        async with session() as http:
            return await asyncio.gather(*(one(http, 1 + i % 7 if i % 2 else None) for i in range(80)))

    errors = asyncio.run(storm(pair))
    assert [error for error in errors if error and not error.startswith("429")] == []
    until(lambda: is_clean(pair), SOON_S)
    pids = [pid for node in pair.nodes() for pid in (node["pid"], node["core_pid"]) if pid]
    assert len(pids) == 7
    os.kill(pair.pid, signal.SIGKILL)
    until(lambda: all(map(is_gone, pids)), SOON_S)
