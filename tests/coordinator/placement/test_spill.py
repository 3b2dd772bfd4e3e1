"""When a decode worker is given prompts: what prefill's queue cannot hold, and where its answers hardly notice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from contracts.errors import Unavailable
from contracts.ids import Incarnation, WorkerId
from contracts.node import WorkerRole
from coordinator.placement.candidate import Candidate
from coordinator.placement.policy import (
    HANDOFF_S,
    LONG_GAP_S,
    SPILL_GAP_S,
    SPILL_WAIT_S,
    STALL_WEIGHT,
    choose,
    decode_need,
    max_pending,
    may_take_prompts,
)

NUM_TOKENS = 8192
FAST, BESIDE_ANSWERS = 65_000.0, 40_000.0


def gpu(name: str, role: WorkerRole, **options) -> Candidate:
    """A worker on an H200 with Llama-8B's shape."""
    facts = {
        "layout_id": "l",
        "send_words": frozenset("l"),
        "receive_words": frozenset("l"),
        "max_model_len": 100_000,
        "capacity_tokens": 2_000_000,
        "prompt_tokens_per_mixed_step": 252,
        "bounds_gaps": True,
        "prefill_rate": FAST,
        "decode_rate": 1000.0,
        "transfer_rate": 2e6,
    }
    return Candidate(worker_id=WorkerId(name), incarnation=Incarnation(name), role=role, **(facts | options))


P = gpu("p0", WorkerRole.PREFILL)
D = gpu("d0", WorkerRole.DECODE, prefill_rate=BESIDE_ANSWERS, num_decodes=4, num_answers=4)


def route(*found: Candidate, num_tokens: int = NUM_TOKENS, max_tokens: int = 128) -> tuple[str, str]:
    best = choose(sorted(found, key=lambda c: c.worker_id), num_tokens, decode_need(num_tokens, max_tokens))[0]
    return best.prefill.worker_id, best.decode.worker_id


def waiting(seconds: float) -> Candidate:
    return replace(P, pending_tokens=int(seconds * FAST))


def test_decode_computes_nothing_while_prefill_keeps_up():
    assert route(P, D) == route(waiting(0.1), D) == ("p0", "d0")


def test_decode_takes_a_prompt_that_would_wait_long_and_gives_up_when_the_queue_falls():
    assert [route(waiting(seconds), D) for seconds in (0.5, 0.4, 0.1, 0.0)] == [("d0", "d0")] * 2 + [("p0", "d0")] * 2


def test_one_prefill_worker_without_a_queue_is_enough():
    assert route(waiting(0.5), gpu("p1", WorkerRole.PREFILL), D) == ("p1", "d0")


def test_the_prompts_that_decode_computes_count_against_it():
    busy = replace(D, pending_tokens=int(0.5 * BESIDE_ANSWERS))
    assert [route(waiting(seconds), busy) for seconds in (0.5, 1.0)] == [("p0", "d0"), ("d0", "d0")]
    assert route(waiting(0.5), busy, replace(D, worker_id=WorkerId("d1"))) == ("d1", "d1")


@pytest.mark.parametrize("prompt_tokens", [1020, int(SPILL_GAP_S * BESIDE_ANSWERS) + 1])
def test_who_would_make_gaps_long_is_given_none(prompt_tokens):
    assert route(waiting(20.0), replace(D, prompt_tokens_per_mixed_step=prompt_tokens)) == ("p0", "d0")


def test_who_keeps_to_no_objective_is_given_none_however_fast_it_is():
    fast = replace(D, bounds_gaps=False, prefill_rate=10 * FAST)
    assert route(waiting(20.0), replace(fast, bounds_gaps=True)) == ("d0", "d0")
    assert route(waiting(20.0), fast) == ("p0", "d0")


def test_a_pool_without_a_prefill_worker_is_not_served_by_decode_alone():
    with pytest.raises(Unavailable, match="no live prefill worker"):
        route(D)


def test_no_decode_worker_computes_a_prompt_for_another():
    idle = gpu("d1", WorkerRole.DECODE)
    assert route(waiting(5.0), D, idle) == ("d1", "d1")
    offers = choose([D, idle, waiting(5.0)], NUM_TOKENS, decode_need(NUM_TOKENS, 128))
    assert all(o.prefill.worker_id in ("p0", o.decode.worker_id) for o in offers)


def test_both_ways_are_offered_so_that_the_store_decides_by_fresh_counts():
    offers = choose([D, waiting(0.3)], NUM_TOKENS, decode_need(NUM_TOKENS, 128))
    assert {(o.prefill.worker_id, o.decode.worker_id) for o in offers} == {("p0", "d0"), ("d0", "d0")}


@given(
    wait_s=st.floats(0.0, 29.0),
    own_wait_s=st.floats(0.0, 40.0),
    num_tokens=st.integers(1, 90_000),
    num_answers=st.integers(0, 200),
    rate=st.floats(1000.0, 200_000.0),
    prompt_tokens=st.integers(1, 2048),
)
def test_whoever_takes_a_prompt_computes_it_sooner_and_has_short_gaps(
    wait_s, own_wait_s, num_tokens, num_answers, rate, prompt_tokens
):
    decode = replace(
        D, prefill_rate=rate, num_answers=num_answers, num_decodes=num_answers, pending_tokens=int(own_wait_s * rate),
        prompt_tokens_per_mixed_step=prompt_tokens,
    )  # fmt: skip
    prefill = waiting(wait_s)
    if route(prefill, decode, num_tokens=num_tokens)[0] == "d0":
        assert may_take_prompts(decode) and prompt_tokens / rate <= SPILL_GAP_S
        assert decode.pending_tokens <= max_pending(decode)
        here_s = (decode.pending_tokens + num_tokens) / rate
        transfer_s = max(0.0, num_tokens / prefill.transfer_rate - num_tokens / FAST)
        there_s = (prefill.pending_tokens + num_tokens) / FAST + transfer_s
        # What waits here already would take from each step of the answer, whoever computes its prompt.
        stretch_s = STALL_WEIGHT * prompt_tokens / rate / LONG_GAP_S * decode.pending_tokens / rate
        assert here_s < there_s - SPILL_WAIT_S + HANDOFF_S + stretch_s + 1e-6
