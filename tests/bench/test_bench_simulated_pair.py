"""The simulated pair: it serves every request, and following the load helps first tokens within the objective."""

from dataclasses import replace

from bench.serving.loads import LOADS
from bench.serving.simulated_pair import SYSTEMS, SimulatedPair, figures
from bench.serving.step_costs import StepCosts


def test_a_pair_that_follows_the_load_has_earlier_first_tokens_and_short_gaps():
    (load,) = (load for load in LOADS if load.name == "8k-8")
    load = replace(load, point=replace(load.point, num_requests=40))
    costs, found = StepCosts(), {}
    for system in (SYSTEMS[0], SYSTEMS[-1]):
        pair = SimulatedPair(system, load, costs, 0)
        wall_s = pair.run()
        assert all(len(answer.token_s) == 128 for answer in pair.answers)
        found[system.name] = {name: value for name, value, _ in figures(load, [pair], wall_s)}
    fixed, follows = found.values()
    assert fixed["prompts sent over"] == 0 < follows["prompts sent over"] < 0.5
    assert follows["TTFT p50"] < fixed["TTFT p50"]
    assert follows["ITL p99"] < 9.0
