"""The benchmark of migrations: a difference is seen, a pause is told from a step, and a core halts where it is to."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from bench.serving.migration import halting_core, moves
from bench.serving.migration.halting_core import COMMIT, COPY, POINTS, halt
from bench.serving.migration.kills import TARGETS, cases
from bench.serving.migration.movable_requests import (
    KINDS,
    ChoiceTokens,
    MovableRequest,
    StreamedReply,
    movable_requests,
    stopped,
)
from bench.serving.migration.moves import MovesRun
from bench.serving.migration.moving_services import MovingServices
from tests.waiting import async_until

SOON_S = 30.0


def choice(**changes) -> ChoiceTokens:
    """Return an answer of three tokens that came 1, 2 and 5 s after its request."""
    facts = {
        "tokens": [5, 6, 7],
        "times_s": [1.0, 2.0, 5.0],
        "logprobs": [-0.5, -1.0, -2.0],
        "top_logprobs": [{"a": -0.5, "b": -1.5}] * 3,
        "text": "abc",
        "finish": "length",
    }
    return ChoiceTokens(**(facts | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"tokens": [5, 8, 7], "logprobs": [-0.5001, -1.25, -2.0]},
            "token 1 of 3 and 3: 8 of log-probability -1.250000 for 6 of -1.000000; those before differ by 1.0e-04 at "
            "most; its longest gap before, 1.00 s, was before token 1",
        ),
        ({"tokens": [5, 6], "logprobs": [-0.5, -1.0]}, "token -1 of 2 and 3"),
        ({"text": "abd"}, "text or end"),
        ({"finish": "stop"}, "text or end"),
        ({"logprobs": [-0.5, -1.1, -2.0]}, "log-probabilities"),
        ({"logprobs": [-0.5, -1.0]}, "log-probabilities"),
        ({"top_logprobs": [{"a": -0.5, "b": -1.6}] * 3}, "top log-probabilities"),
        ({"times_s": [1.0, 9.0, 9.0], "logprobs": [-0.5001, -1.0, -2.0]}, ""),
    ],
)
def test_an_answer_that_differs_is_found(changes: dict, words: str) -> None:
    found = choice(**changes).difference(choice())
    assert found.startswith(words) and bool(found) == bool(words)


def reply(name: str, *choices: ChoiceTokens, error: str = "") -> StreamedReply:
    return StreamedReply(MovableRequest(name, "seed", {"n": len(choices)}), list(choices), error)


def test_gaps_are_pauses_where_an_answer_went_on_elsewhere_and_steps_where_not() -> None:
    run, one = MovesRun(2), choice(tokens=[5, 6, 7, 8], times_s=[1.0, 2.0, 5.0, 6.0])
    later = choice(tokens=[5, 6, 7, 8], times_s=[1.0, 2.0, 5.0, 7.0])
    right = {"r1": reply("r1", one, later)}
    told = [
        {"request": "cmpl-r1.4-0badc0ffee-1", "first_index": 2},
        {"request": "cmpl-r9.0-0badc0ffee", "first_index": 2},
    ]
    moves._judge(run, [reply("r1.4", one, later)], right, told)
    assert (run.pauses_s, sorted(run.steps_s)) == ([3.0], [1.0, 2.0, 3.0])
    assert (run.num_moves, run.num_answers, run.moves_of["seed"], run.wrong.total()) == (2, 2, 1, 0)


def test_a_reply_that_differs_or_failed_is_wrong() -> None:
    run = MovesRun(2)
    answers = [reply("r1.0", choice(text="abd")), reply("r1.1", choice()), reply("r1.2", choice(), error="lost")]
    moves._judge(run, answers, {"r1": reply("r1", choice())}, [])
    assert run.wrong == {"seed": 2}


def test_requests_are_of_all_kinds_and_their_stop_strings_end_them_late() -> None:
    requests = movable_requests("m", 2 * len(KINDS), 64, random.Random(1))
    assert [request.kind for request in requests] == [*KINDS, *KINDS]
    assert [request.num_choices for request in requests if request.kind == "n = 2"] == [2, 2]
    late = stopped(requests[0], reply("r0", choice(text="0123456789" * 10)))
    assert late.body["stop"] == ["01234567"] and late.body["seed"] == 0


def test_each_point_has_each_fault_of_each_service() -> None:
    found = {(case.target, case.number.name, case.point) for case in cases(TARGETS)}
    assert len(found) == len(TARGETS) * 2 * len(POINTS) == len(cases(TARGETS))


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MovingServices]:
    monkeypatch.setenv(halting_core.FOLDER, str(tmp_path))
    monkeypatch.setattr(halting_core, "_names", ["m0"])
    made = MovingServices(tmp_path, {"m0": ()})
    yield made
    made.redis.close()


async def test_the_first_core_at_the_armed_point_halts_until_it_may_go_on(services: MovingServices) -> None:
    services.arm(COMMIT)
    halt(COPY)  # another point
    halting = Thread(target=halt, args=(COMMIT,), daemon=True)
    halting.start()
    assert await services.reached(SOON_S) == "m0"
    halt(COMMIT)  # a second one goes on
    assert halting.is_alive()
    services.go_on()
    await async_until(lambda: not halting.is_alive(), SOON_S)
    with pytest.raises(TimeoutError):
        services.arm(COPY)
        await services.reached(0.05)
    halt(COPY)  # it was given up


def test_every_point_is_a_method_that_is_there() -> None:
    """So that a rename does not make a kill of nothing."""
    script = "from bench.serving.migration.halting_core import halt_at_points; halt_at_points()"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
