"""Load by users and by rate against a server that answers as told, and the arithmetic of what is reported."""

import asyncio
import gc
from collections import Counter

import pytest

from bench.load.client import StreamResult, session
from bench.load.generator import (
    Lengths,
    Measured,
    Point,
    TargetServer,
    first_model,
    interactivity,
    measure,
    percentile,
    rows_of,
    version_of,
)
from contracts.errors import Unavailable
from tests.bench.completions import served
from tests.waiting import async_until

pytestmark = pytest.mark.slow

SHORT = Lengths(8, 4)


async def measured(url: str, point: Point, seed: int = 0) -> Measured:
    found, told = Measured(point), []
    async with asyncio.timeout(60), session(total_s=None) as http:
        await measure(http, TargetServer(url, "m", quiet_s=1.0), found, seed, told.append)
    assert told == found.answers
    return found


@pytest.mark.parametrize("point", [Point(SHORT, 3, None, 7), Point(SHORT, None, 200.0, 7), Point(SHORT, 9, None, 2)])
async def test_as_many_requests_as_asked_for_after_a_warm_up(point: Point):
    async with served("good") as server:
        found = await measured(server.url, point)
    assert len(found.answers) == len(found.good) == point.num_requests
    assert len(server.bodies) == point.num_requests + point.num_warm
    assert found.wall_s > 0
    assert all(len(body["prompt"]) == 8 and body["max_tokens"] == 4 for body in server.bodies)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == len(server.bodies)


async def test_prompts_are_written_and_garbage_is_collected_before_the_first_is_sent(monkeypatch):
    gc.unfreeze()  # what pytest had collected was frozen before the first test
    order = []
    monkeypatch.setattr("bench.load.generator.random_prompt", lambda *args: order.append("prompt") or [1] * 8)
    monkeypatch.setattr("bench.load.generator.ask", lambda *args, **kinds: answered())

    async def answered() -> StreamResult:
        order.append("kept" if gc.get_freeze_count() else "looked at")
        return StreamResult(num_tokens=4)

    async with session(total_s=None) as http:
        await measure(http, TargetServer("", "m"), Measured(Point(SHORT, 3, None, 3)), 0, lambda answer: None)
    assert order == [*["prompt"] * 3, *["prompt"] * 3, *["looked at"] * 3, *["kept"] * 3]
    assert gc.get_freeze_count() == 0


async def test_users_wait_for_their_answers_and_arrivals_do_not():
    async def most_at_once(point: Point) -> int:
        async with served("good", "good", "hanging") as server:
            asking = asyncio.create_task(measured(server.url, point))
            await async_until(lambda: len(server.bodies) >= point.num_warm + 2)
            await asyncio.sleep(0.3)  # time for more, if more were to come
            num_open = len(server.bodies) - point.num_warm
            await asking
        return num_open

    assert await most_at_once(Point(SHORT, 2, None, 6)) == 2
    assert await most_at_once(Point(SHORT, None, 1000.0, 6)) == 6


async def test_the_same_seed_sends_the_same_prompts_whatever_was_sent_before():
    async def prompts(seed: int, *points: Point) -> list[list[int]]:
        async with served("good") as server:
            for point in points:
                server.bodies.clear()
                await measured(server.url, point, seed)
        return sorted(body["prompt"] for body in server.bodies)

    one, other = Point(SHORT, 2, None, 4), Point(SHORT, None, 500.0, 4)
    assert await prompts(1, one) == await prompts(1, other, one)
    assert await prompts(1, one) != await prompts(2, one)


async def test_replicas_take_turns_and_each_is_warmed_up():
    async with served("good") as one, served("good") as other:
        found = Measured(Point(SHORT, 1, None, 6))
        async with session(total_s=None) as http:
            await measure(http, TargetServer(one.url, "m", replicas=(other.url,)), found, 0, lambda answer: None)
    assert len(found.good) == 6
    assert len(one.bodies) == len(other.bodies) == 3 + 1


async def test_failures_are_counted_by_reason_and_are_in_no_other_figure():
    ways = ["good"] * 3 + ["refused", "unfinished", "refused", "hanging", "good"]
    async with served(*ways) as server:
        found = await measured(server.url, Point(SHORT, 1, None, 10))
    assert found.reasons == Counter({"HTTP 429": 2, "no finish_reason": 1, "silent": 1})
    values = {row.name: row.value for row in rows_of(found, num_gpus=0)}
    assert (values["requests"], values["failed"], values["failed: HTTP 429"]) == (10, 4, 2)
    assert values["output"] == pytest.approx(6 * 4 / found.wall_s)


async def test_a_server_that_answers_nobody_is_told_before_anything_is_measured():
    async with served("refused") as server:
        with pytest.raises(Unavailable, match=r"none of 2 requests to warm up was answered; the first: 429 .*too much"):
            await measured(server.url, Point(SHORT, 2, None, 50))
    assert len(server.bodies) == 2


async def test_what_was_measured_before_a_cancel_is_there():
    async with served("good", "good", "good", "hanging") as server:
        found = Measured(Point(SHORT, 1, None, 50))
        async with session(total_s=None) as http:
            measuring = asyncio.create_task(measure(http, TargetServer(server.url, "m"), found, 0, lambda answer: None))
            await async_until(lambda: len(server.bodies) >= 4)
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)
    assert len(found.good) == 2 and found.wall_s > 0


def answer(ttft_s: float, *gaps_s: float, reason: str = "") -> StreamResult:
    return StreamResult(ttft_s, list(gaps_s), ttft_s + sum(gaps_s), len(gaps_s) + 1, reason)


def test_the_figures_of_answers_made_up_by_hand():
    point = Point(Lengths(1024, 3), 2, None, 3)
    answers = [answer(0.1, 0.01, 0.03), answer(0.3, 0.02, 0.02), answer(9.0, reason="silent")]
    rows = rows_of(Measured(point, answers, wall_s=2.0), num_gpus=2)
    values = {row.name: row.value for row in rows}
    assert all(row.params == {"lengths": "1k/3", "users": 2} for row in rows)
    assert (values["TTFT p50"], values["TTFT p99"]) == (pytest.approx(300), pytest.approx(300))
    assert (values["ITL p50"], values["ITL p90"]) == (pytest.approx(20), pytest.approx(30))
    assert values["E2E p99"] == pytest.approx(0.34)
    assert values["output"] == 3.0
    assert values["input and output"] == 2 * values["input and output per GPU"] == pytest.approx(2 * 1027 / 2.0)
    assert values["interactivity"] == pytest.approx(1 / 0.02)


def test_answers_that_ended_early_are_told():
    rows = rows_of(Measured(Point(Lengths(8, 9), 1, None, 1), [answer(0.1, 0.1)], wall_s=1.0), num_gpus=0)
    assert {row.name: row.value for row in rows}["shorter than asked for"] == 1


def test_nothing_answered_has_counts_only():
    rows = rows_of(Measured(Point(SHORT, None, 0.5, 1), [answer(0.0, reason="silent")], wall_s=1.0), num_gpus=1)
    assert [(row.name, row.value) for row in rows] == [("requests", 1), ("failed", 1), ("failed: silent", 1)]
    assert rows[0].params == {"lengths": "8/4", "rate": 0.5}


def test_one_token_says_nothing_of_interactivity():
    assert interactivity([answer(0.1)]) is None


def test_a_percentile_is_one_of_the_values():
    assert [percentile([3, 1, 2, 4], share) for share in (0, 50, 90, 99)] == [1, 3, 4, 4]
    assert percentile([5], 99) == 5


def test_loads_in_words():
    assert str(Point(Lengths(1024, 8192), 1, None, 1)) == "1k/8k, 1 user"
    assert str(Point(Lengths(100, 2048), None, 0.5, 1)) == "100/2k, 0.5/s"


async def test_a_server_says_what_it_serves():
    async with served("good") as server, session() as http:
        assert await first_model(http, server.url) == {"id": "m", "max_model_len": 4096}
        assert await version_of(http, server.url) == "1.2.3"
        server.card = {}
        with pytest.raises(Unavailable, match="lists no model: name it with --model"):
            await first_model(http, server.url)
    async with session() as http:
        with pytest.raises(Unavailable, match="nobody answers at"):
            await first_model(http, server.url)
        assert await version_of(http, server.url) == ""
