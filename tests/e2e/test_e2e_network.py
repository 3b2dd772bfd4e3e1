"""A pair whose network fails: every answer is right or an error, nothing stays held, and it serves again.

Workers are hosts in network namespaces of their own, and KV crosses by tcp.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from typing import Any

import aiohttp
import pytest

from bench.load.client import random_prompt, session
from bench.serving.conversations import Reply, complete
from bench.serving.counter_sums import of_worker
from bench.system import network
from bench.system.leftovers import still_held
from bench.system.local_system import get_json, model_of
from bench.system.network import Network
from bench.system.services import Services
from tests.e2e.tiny import save_tiny
from tests.waiting import async_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(network.missing()), reason=network.missing() or "-"),
]

NUM_TOKENS = 40
PROMPTS = [random_prompt(300, random.Random(number), vocabulary=256) for number in range(4)]
FLAGS = "--transfer", "tcp", "--dtype", "float32"
BRIEF_S, LONGER_THAN_A_CANCEL_IS_TRIED_S = 2.0, 9.0


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with Network(["p", "d"]) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def services(hosts: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("services")
    settings = {"TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "16", "TANDEM_MODEL": str(save_tiny(folder))}
    workers = {"p": ("--role", "prefill", *FLAGS), "d": ("--role", "decode", *FLAGS)}
    with Services(folder, workers, hosts, **settings) as services:
        asyncio.run(services.start_all(90))
        yield services


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with session() as http:
        yield http


@pytest.fixture(scope="module")
def expected(services: Services) -> list[list[int]]:
    async def answers() -> list[list[int]]:
        async with session() as http:
            return [(await ask(http, services, number)).tokens for number in range(len(PROMPTS))]

    answers_found = asyncio.run(answers())
    assert all(len(tokens) == NUM_TOKENS for tokens in answers_found)
    return answers_found


async def ask(http: aiohttp.ClientSession, services: Services, number: int) -> Reply:
    return await complete(http, services.url, model_of(services.url), PROMPTS[number], NUM_TOKENS)


async def all_right_again(http: aiohttp.ClientSession, services: Services, expected: list[list[int]]) -> None:
    """Wait until each prompt is answered, and then until nothing is held; no token may be wrong meanwhile."""
    for number, tokens in enumerate(expected):

        async def is_answered(number: int = number, tokens: list[int] = tokens) -> bool:
            reply = await ask(http, services, number)
            assert reply.error or reply.tokens == tokens
            return not reply.error

        await async_until(is_answered)

    async def is_clean() -> bool:
        return not await still_held(services)

    await async_until(is_clean)


FAULTS: dict[str, Any] = {
    "prefill cut off": lambda hosts: hosts.cut_off("p"),
    "decode cut off": lambda hosts: hosts.cut_off("d"),
    "decode is not heard": lambda hosts: hosts.dropped("d", ""),
    "decode hears nothing": lambda hosts: hosts.dropped("", "d"),
    "no KV": lambda hosts: hosts.dropped("p", "d"),
    "connections reset": lambda hosts: hosts.reset("p", "d"),
    "interface replaced": lambda hosts: hosts.unplugged("d"),
    "slow": lambda hosts: hosts.slow("d", 0.5),
}
IS_HEARD = {"connections reset", "interface replaced", "slow"}
"""Faults that each end notices or that let a cancel through, so that none is tried in vain."""


@pytest.mark.parametrize("name", FAULTS)
async def test_answers_are_right_or_errors_and_nothing_stays_held(
    services: Services, http: aiohttp.ClientSession, hosts: Network, expected: list[list[int]], name: str
) -> None:
    fault: AbstractContextManager[None] = FAULTS[name](hosts)
    asking = [asyncio.create_task(ask(http, services, number)) for number in range(len(PROMPTS))]
    await asyncio.sleep(0.3)
    with fault:
        asking += [asyncio.create_task(ask(http, services, number)) for number in range(len(PROMPTS))]
        await asyncio.sleep(BRIEF_S if name in IS_HEARD else LONGER_THAN_A_CANCEL_IS_TRIED_S)
    replies = await asyncio.gather(*asking)
    for number, reply in enumerate(replies):
        assert reply.error.startswith("HTTP 50") or reply.tokens == expected[number % len(PROMPTS)], reply
    await all_right_again(http, services, expected)


async def test_kv_that_changes_on_the_wire_is_refused(
    services: Services, http: aiohttp.ClientSession, hosts: Network, expected: list[list[int]]
) -> None:
    def num_bad() -> float:
        return of_worker(get_json(f"{services.facts('d')['url']}/health"))["chunks_bad"]

    before = num_bad()
    with hosts.damaged("p", "d", one_of=2):

        async def is_refused() -> bool:
            prompt = random_prompt(400, random.Random(num_asked := len(asked)), vocabulary=256)
            asked.append(num_asked)
            await complete(http, services.url, model_of(services.url), prompt, 2)
            return num_bad() > before

        asked: list[int] = []
        await async_until(is_refused)
    await all_right_again(http, services, expected)
