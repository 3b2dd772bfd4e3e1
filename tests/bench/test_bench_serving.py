"""From times to rows: the arithmetic of the serving and the soak benchmark on answers made up by hand."""

import random

import pytest

from bench.load.client import StreamResult
from bench.serving.cpu_pair import decode_rate, rate_rows, rows_of
from bench.serving.soak import SoakRequest, summarize


def answer(ttft_s: float, *gaps_s: float) -> StreamResult:
    return StreamResult(ttft_s, list(gaps_s), ttft_s + sum(gaps_s), len(gaps_s) + 1)


def test_the_rate_of_one_stream_leaves_token_0_out():
    assert decode_rate([answer(5.0, 0.1, 0.1, 0.2)]) == pytest.approx(3 / 0.4)


def test_the_rate_of_many_starts_when_the_last_has_its_token_0():
    early = answer(1.0, 1.0, 1.0, 1.0)  # events at 1, 2, 3, 4
    late = answer(2.5, 1.0)  # events at 2.5, 3.5
    assert decode_rate([early, late]) == pytest.approx(3 / 1.5)


def test_a_failed_stream_spoils_the_rate():
    with pytest.raises(RuntimeError, match="the worker died"):
        decode_rate([answer(1.0, 1.0), StreamResult(error="the worker died")])


def test_a_soaks_lengths_reach_from_the_least_to_the_longest_by_octaves():
    draw = SoakRequest(random.Random(0), prompt=16_384, answer=64)
    prompts = [len(draw.prompt_ids()) for _ in range(400)]
    assert min(prompts) >= 4 and max(prompts) <= 16_384
    assert sum(length < 256 for length in prompts) == pytest.approx(200, abs=40)  # 6 octaves of 12
    answers = [draw.max_tokens() for _ in range(400)]
    assert set(answers) <= set(range(1, 65)) and 1 in answers and max(answers) > 48
    leaves = [draw.leave_after(5) for _ in range(400)]
    assert set(leaves) == {None, 1, 2, 3, 4, 5} and leaves.count(None) == pytest.approx(200, abs=40)


def test_the_pair_stands_beside_the_mixed_worker():
    answers = {
        ("mixed", 128): [answer(0.100, 0.020, 0.010, 0.010), answer(0.120, 0.020, 0.010, 0.010)],
        ("ucx", 128): [answer(0.111, 0.030, 0.012, 0.012), answer(0.121, 0.030, 0.012, 0.012)],
    }
    rows = {(row.name, row.params["system"]): row for row in rows_of(answers)}
    assert rows["ttft", "ucx"].value == pytest.approx(116)
    assert rows["ttft", "ucx"].peer_value == pytest.approx(110)
    assert rows["gap token 0 to 1", "ucx"].value == pytest.approx(30)
    assert rows["itl", "ucx"].value == pytest.approx(12)
    assert rows["ttft adder", "ucx"].value == pytest.approx(6)
    assert rows["ttft", "mixed"].peer is None
    assert ("ttft adder", "mixed") not in rows


def test_rates_stand_beside_the_engine_alone():
    rows = rate_rows({("engine", 16): [90.0, 100.0, 110.0], ("mixed", 16): [80.0, 95.0, 85.0]})
    assert [(row.params["system"], row.value, row.peer_value) for row in rows] == [
        ("engine", 100.0, None),
        ("mixed", 85.0, 100.0),
    ]


def test_growth_counts_from_the_end_of_the_first_fifth():
    mib = 2**20
    samples = [{"core": (100 + step) * mib, "gateway": 50 * mib} for step in range(11)]
    rows = summarize(samples, {"finished": 7, "failed": 0}, {"w1": True, "w2": False})
    found = {(row.name, *row.params.values()): row.value for row in rows}
    assert found["requests finished",] == 7
    assert found["pool clean afterwards", "w1"] == 1
    assert found["pool clean afterwards", "w2"] == 0
    assert found["memory growth", "core", "110 MiB"] == 8.0
    assert found["memory growth", "gateway", "50 MiB"] == 0.0
