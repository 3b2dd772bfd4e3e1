"""The simulated pair: it serves every request, and following the load helps first tokens within the objective."""

from dataclasses import replace

import pytest

from bench.serving.loads import LOADS
from bench.serving.simulated_pair import SYSTEMS, SimulatedPair, figures, simulated
from bench.serving.step_costs import BOUND_EACH_LAYER, StepCosts


def test_a_pair_that_follows_the_load_has_earlier_first_tokens_and_short_gaps():
    (load,) = (load for load in LOADS if load.name == "8k-8")
    load = replace(load, point=replace(load.point, num_requests=40))
    costs, found = StepCosts(), {}
    for system in (SYSTEMS[0], SYSTEMS[3]):
        pair = SimulatedPair(system, load, costs, 0)
        wall_s = pair.run()
        assert all(len(answer.token_s) == 128 for answer in pair.answers)
        found[system.name] = {name: value for name, value, _ in figures(load, [pair], wall_s)}
    fixed, follows = found.values()
    assert fixed["prompts sent over"] == 0 < follows["prompts sent over"] < 0.5
    assert follows["TTFT p50"] < fixed["TTFT p50"]
    assert follows["ITL p99"] < 14.0


def test_one_worker_with_chunks_of_1024_has_the_times_that_were_measured():
    (load,) = (load for load in LOADS if load.name == "8k-4")
    (system,) = (each for each in SYSTEMS if each.host is BOUND_EACH_LAYER)
    rows = {
        row.name: row
        for row in simulated(system, load, StepCosts(system.host), [0])
        if row.params["arrivals"] == "seed 0"
    }
    for name in ("TTFT p50", "TTFT p90", "TTFT p99", "ITL p50", "ITL p90", "ITL p99"):
        assert rows[name].peer_value == pytest.approx(rows[name].value, rel=0.2)
