"""The cost model: who is chosen, who is refused and until when."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from contracts.errors import Overloaded, RequestError, TandemError, Unavailable
from contracts.ids import Incarnation, WorkerId
from contracts.node import WorkerRole
from coordinator.placement import policy
from coordinator.placement.candidate import Candidate, with_default_rates
from coordinator.placement.policy import (
    OUTPUT_CREDIT_TOKENS,
    OVERCOMMIT,
    RouteOffer,
    decode_need,
    max_pending,
    max_reserved,
    offer,
)
from coordinator.refusals import MAX_RETRY_S, MIN_RETRY_S
from tests.coordinator.coordinator_rig import BREAK_EVEN_RATE, BREAK_EVEN_STEP, BREAK_EVENS

NEED = decode_need(1000, 100)


def choose(candidates: Sequence[Candidate], num_tokens: int, need_tokens: int, room: float = 1.0) -> RouteOffer:
    """The cheapest route of all."""
    return policy.choose(candidates, num_tokens, need_tokens, room=room)[0]


def cost_s(prefill: Candidate, decode: Candidate, num_tokens: int, need_tokens: int) -> float:
    return offer(prefill, decode, num_tokens, need_tokens).cost_s


RATES = st.one_of(st.just(0.0), st.floats(1.0, 1e5))
candidates = st.builds(
    Candidate,
    worker_id=st.just(WorkerId("")),
    incarnation=st.sampled_from([Incarnation("a"), Incarnation("b")]),
    role=st.sampled_from(WorkerRole),
    layout_id=st.sampled_from(["l", "l", "m"]),
    send_words=st.sampled_from([frozenset("l"), frozenset("l"), frozenset("m"), frozenset()]),
    receive_words=st.sampled_from([frozenset("l"), frozenset("lm"), frozenset()]),
    max_model_len=st.sampled_from([900, 8192]),
    capacity_tokens=st.integers(500, 50_000),
    prompt_tokens_per_mixed_step=st.integers(0, 4096),
    pending_tokens=st.integers(0, 200_000),
    reserved_tokens=st.integers(0, 200_000),
    num_decodes=st.integers(0, 100),
    num_answers=st.integers(0, 100),
    cached_tokens=st.integers(0, 900),
    prefill_rate=RATES,
    decode_rate=RATES,
    transfer_rate=RATES,
    bad_paths=st.frozensets(st.sampled_from([Incarnation("a"), Incarnation("b")])),
)
pools = st.lists(candidates, max_size=6).map(
    lambda found: [replace(c, worker_id=WorkerId(f"w{index}")) for index, c in enumerate(found)]
)


def worker(name: str, role: WorkerRole, **options) -> Candidate:
    facts = {
        "layout_id": "l",
        "send_words": frozenset(["l by tcp"]),
        "receive_words": frozenset(["l by tcp"]),
        "max_model_len": 8192,
        "capacity_tokens": 10_000,
        "prompt_tokens_per_mixed_step": 512,
        "pending_tokens": 0,
        "reserved_tokens": 0,
        "num_decodes": 0,
        "num_answers": 0,
        "prefill_rate": 1000.0,
        "decode_rate": 100.0,
    }
    return Candidate(worker_id=WorkerId(name), incarnation=Incarnation(name), role=role, **(facts | options))


def chosen(*found: Candidate, num_tokens: int = 1000) -> tuple[str, str]:
    choice = choose(found, num_tokens, decode_need(num_tokens, 100))
    return choice.prefill.worker_id, choice.decode.worker_id


P, D = worker("p0", WorkerRole.PREFILL), worker("d0", WorkerRole.DECODE)


def test_a_pair_is_placed_on():
    assert chosen(D, P) == ("p0", "d0")


def test_a_mixed_worker_is_both_at_once():
    assert chosen(worker("m0", WorkerRole.MIXED)) == ("m0", "m0")


def test_a_bad_path_is_passed_over_and_its_ends_are_not():
    p1, d1 = worker("p1", WorkerRole.PREFILL), worker("d1", WorkerRole.DECODE)
    cut_off = replace(P, bad_paths=frozenset([D.incarnation]))
    assert chosen(D, d1, cut_off) == ("p0", "d1")
    assert chosen(D, cut_off, p1) == ("p1", "d0")


def test_a_bad_path_is_tried_where_there_is_no_other_or_all_others_are_slower():
    cut_off = replace(P, bad_paths=frozenset([D.incarnation]))
    assert chosen(D, cut_off) == ("p0", "d0")
    assert chosen(D, cut_off, worker("p1", WorkerRole.PREFILL, pending_tokens=5000)) == ("p0", "d0")


def test_an_answer_of_one_token_stays_where_its_prompt_is_computed():
    one = decode_need(1000, 1)
    choice = choose([D, P], 1000, one)
    assert choice.prefill.worker_id == choice.decode.worker_id == "p0"
    busy, mixed = replace(P, pending_tokens=500), worker("m0", WorkerRole.MIXED)
    assert choose([D, mixed, busy], 1000, one).decode.worker_id == "m0"
    with pytest.raises(Unavailable, match="prefill"):
        choose([D], 1000, one)


def test_who_may_fill_a_part_of_the_queues_leaves_the_rest_to_others():
    busy = replace(P, pending_tokens=int(max_pending(P, 0.5)) + 1)
    assert choose([D, busy], 1000, 1100)
    with pytest.raises(Overloaded, match="all prefill workers are full"):
        choose([D, busy], 1000, 1100, room=0.5)
    full = replace(D, reserved_tokens=int(max_reserved(D, 1100, 0.5)) + 1)
    assert choose([full, P], 1000, 1100)
    with pytest.raises(Overloaded, match="all decode workers are full"):
        choose([full, P], 1000, 1100, room=0.5)


def test_of_equals_the_first_is_taken():
    assert chosen(D, worker("d1", WorkerRole.DECODE), P, worker("p1", WorkerRole.PREFILL)) == ("p0", "d0")


def test_a_queue_counts():
    assert chosen(D, replace(P, pending_tokens=500), worker("p1", WorkerRole.PREFILL)) == ("p1", "d0")


def test_a_cached_prefix_is_worth_a_short_queue():
    assert chosen(D, replace(P, pending_tokens=500, cached_tokens=900), worker("p1", WorkerRole.PREFILL)) == (
        "p0",
        "d0",
    )


def test_a_cached_prefix_is_not_worth_a_long_queue():
    assert chosen(D, replace(P, pending_tokens=5000, cached_tokens=900), worker("p1", WorkerRole.PREFILL)) == (
        "p1",
        "d0",
    )


def test_a_fast_worker_may_have_the_longer_queue():
    assert chosen(D, replace(P, pending_tokens=500, prefill_rate=10_000.0), worker("p1", WorkerRole.PREFILL)) == (
        "p0",
        "d0",
    )


def test_a_worker_that_has_not_measured_counts_as_the_fastest_that_has():
    fast, unknown = replace(P, prefill_rate=50_000.0), worker("p1", WorkerRole.PREFILL, prefill_rate=0.0)
    assert chosen(D, fast, unknown) == ("p0", "d0")
    assert chosen(D, replace(fast, pending_tokens=1), unknown) == ("p1", "d0")


def test_answers_spread_over_decodes():
    assert chosen(replace(D, num_decodes=1), worker("d1", WorkerRole.DECODE), P) == ("p0", "d1")


def test_a_full_cache_is_avoided():
    assert chosen(replace(D, reserved_tokens=9900), worker("d1", WorkerRole.DECODE, num_decodes=5), P) == ("p0", "d1")


def test_mixed_workers_join_both_sides():
    busy = replace(D, num_decodes=500)
    assert chosen(busy, worker("m0", WorkerRole.MIXED, pending_tokens=2000), P) == ("p0", "m0")


def test_a_loaded_pair_sends_work_to_an_idle_mixed_worker():
    assert chosen(D, worker("m0", WorkerRole.MIXED), replace(P, pending_tokens=9000)) == ("m0", "m0")


def test_a_prompt_goes_where_it_stalls_no_answers_until_that_queue_is_long():
    four = {"num_decodes": 4, "num_answers": 4}  # a prompt of a second takes half of it from each
    shared = worker("m", WorkerRole.MIXED, **four)
    waiting = [worker("p", WorkerRole.PREFILL, pending_tokens=1000 * seconds) for seconds in (0, 1, 3)]
    assert [chosen(prefill, shared) for prefill in waiting] == [("p", "m"), ("p", "m"), ("m", "m")]
    assert chosen(waiting[0], worker("m", WorkerRole.MIXED)) == ("m", "m")  # nobody to stall, nothing to hand over
    # Who waits for its prompt at the other one loses nothing.
    assert chosen(waiting[2], replace(shared, num_decodes=100)) == ("m", "m")
    assert chosen(waiting[2], replace(shared, num_decodes=100, num_answers=100)) == ("p", "m")


def test_short_gaps_are_hardly_spared():
    """Beside answers this worker computes prompts in pieces of a tenth of the gap that counts in full."""
    fast = {"prefill_rate": 50_000.0, "num_decodes": 4, "num_answers": 4}
    waiting = worker("p", WorkerRole.PREFILL, prefill_rate=50_000.0, pending_tokens=10_000)
    assert chosen(
        waiting, worker("m", WorkerRole.MIXED, prompt_tokens_per_mixed_step=2048, **fast), num_tokens=8000
    ) == (
        "p",
        "m",
    )
    assert chosen(
        waiting, worker("m", WorkerRole.MIXED, prompt_tokens_per_mixed_step=200, **fast), num_tokens=8000
    ) == (
        "m",
        "m",
    )


@pytest.mark.parametrize("decode", ["m0", "d0"], ids=["beside prefill", "beside a pair"])
@pytest.mark.parametrize(("num_answers", "transfer_rate", "pending_tokens", "longest", "shortest"), BREAK_EVENS)
def test_short_prompts_stay_where_they_are_answered_and_long_ones_move(
    num_answers, transfer_rate, pending_tokens, longest, shortest, decode
):
    """A decode worker with as many answers is as good as the mixed one, and comes first."""
    facts = {"prefill_rate": BREAK_EVEN_RATE, "transfer_rate": transfer_rate}
    step_tokens = BREAK_EVEN_STEP - num_answers
    running = facts | {
        "num_decodes": num_answers,
        "num_answers": num_answers,
        "prompt_tokens_per_mixed_step": step_tokens,
    }
    pool = [worker("d0", WorkerRole.DECODE, **running)] if decode == "d0" else []
    pool += [
        worker("m0", WorkerRole.MIXED, **running),
        worker("p0", WorkerRole.PREFILL, pending_tokens=pending_tokens, **facts),
    ]
    for num_tokens in (1, longest // 2 + 1, longest):
        assert chosen(*pool, num_tokens=num_tokens) == ("m0", "m0")
    for num_tokens in (shortest, 2 * shortest, 8000) if shortest else ():
        assert chosen(*pool, num_tokens=num_tokens) == ("p0", decode)


def test_a_mixed_worker_keeps_what_it_computes_while_it_has_room():
    """However many it answers: those count as much against a handoff as against staying."""
    busy = worker("m0", WorkerRole.MIXED, num_decodes=32, num_answers=32)
    assert [chosen(D, busy, num_tokens=count) for count in (1, 1000, 8000)] == [("m0", "m0")] * 3
    assert chosen(D, replace(busy, reserved_tokens=10_000)) == ("m0", "d0")


def test_a_prefill_worker_keeps_no_answer_of_two_tokens():
    """However short the prompt, slow its link and busy decode: see docs/placement.md."""
    slow, busy = replace(P, transfer_rate=10.0), replace(D, num_decodes=500)
    for num_tokens in (1, 1000):
        choice = choose([busy, slow], num_tokens, decode_need(num_tokens, 2))
        assert (choice.prefill.worker_id, choice.decode.worker_id) == ("p0", "d0")


def test_layouts_do_not_mix():
    other = worker("d1", WorkerRole.DECODE, layout_id="other", receive_words=frozenset(["other by tcp"]))
    assert chosen(replace(D, num_decodes=50), other, P) == ("p0", "d0")
    with pytest.raises(Unavailable, match="can take"):
        chosen(other, P)


def test_a_layout_that_decode_takes_is_as_good_as_its_own():
    other = worker("d1", WorkerRole.DECODE, layout_id="other")
    assert chosen(other, P) == ("p0", "d1")
    assert chosen(replace(D, num_decodes=1), other, P) == ("p0", "d1")
    back = worker("p1", WorkerRole.PREFILL, layout_id="other", send_words=frozenset(["other by tcp"]))
    with pytest.raises(Unavailable, match="can take"):
        chosen(D, back)


def test_of_pairs_that_cost_the_same_one_of_equal_layouts_is_taken():
    other = worker("d0", WorkerRole.DECODE, layout_id="other")
    assert chosen(other, replace(D, worker_id=WorkerId("d1")), P) == ("p0", "d1")


BY_SHM = {"send_words": frozenset(["l by shm"]), "receive_words": frozenset(["l by shm"])}


def test_transports_do_not_mix():
    other = worker("p1", WorkerRole.PREFILL, **BY_SHM)
    assert chosen(D, replace(P, pending_tokens=5000), other) == ("p0", "d0")
    with pytest.raises(Unavailable, match="can take"):
        chosen(D, other)
    both = replace(D, receive_words=D.receive_words | other.send_words)
    assert chosen(both, replace(P, pending_tokens=5000), other) == ("p1", "d0")


def test_a_worker_without_any_way_may_be_both_at_once():
    alone = worker("m0", WorkerRole.MIXED, send_words=frozenset(), receive_words=frozenset())
    assert chosen(alone) == ("m0", "m0")
    assert chosen(D, P, replace(alone, pending_tokens=500)) == ("p0", "d0")


def test_who_meets_nobody_does_not_hide_that_the_others_are_full():
    other = worker("p1", WorkerRole.PREFILL, **BY_SHM)
    with pytest.raises(Overloaded, match="prefill"):
        chosen(D, replace(P, pending_tokens=35_000), other)
    full = replace(D, reserved_tokens=int(OVERCOMMIT * D.capacity_tokens))
    with pytest.raises(Overloaded, match="decode"):
        chosen(full, P, worker("d1", WorkerRole.DECODE, **BY_SHM))
    with pytest.raises(Overloaded, match="decode"):  # what d1 could do, nobody can for now
        chosen(full, P, replace(other, pending_tokens=35_000), worker("d1", WorkerRole.DECODE, **BY_SHM))


def test_the_cheapest_do_not_hide_those_that_meet():
    pool = [worker(f"p{i}", WorkerRole.PREFILL, **BY_SHM) for i in range(9)]
    pool += [worker(f"d{i}", WorkerRole.DECODE) for i in range(9)]
    late, crowded = (
        worker("p9", WorkerRole.PREFILL, pending_tokens=500),
        worker("d9", WorkerRole.DECODE, num_decodes=5, **BY_SHM),
    )
    assert chosen(*pool, late, crowded) == ("p0", "d9")
    assert chosen(*pool, late, replace(crowded, num_decodes=100)) == ("p9", "d0")


@pytest.mark.parametrize(("found", "side"), [((P,), "decode"), ((D,), "prefill"), ((), "prefill")])
def test_a_missing_side_is_named(found: tuple[Candidate, ...], side: str):
    with pytest.raises(Unavailable, match=f"no live {side} worker"):
        chosen(*found)


def test_a_prompt_that_never_fits_is_the_clients_fault():
    with pytest.raises(RequestError, match="10001 tokens; no worker takes more than 8191"):
        chosen(P, D, num_tokens=10_001)


def test_a_long_queue_is_refused_until_it_is_short_enough():
    with pytest.raises(Overloaded, match="prefill") as refused:
        chosen(replace(P, pending_tokens=35_000), D)
    assert refused.value.retry_after_s == 5.0


def test_nobody_is_refused_for_a_queue_whose_time_is_not_known():
    unknown = replace(P, pending_tokens=10**6, prefill_rate=0.0)
    assert chosen(unknown, replace(D, prefill_rate=0.0)) == ("p0", "d0")
    with pytest.raises(Overloaded, match="prefill"):
        chosen(unknown, replace(unknown, worker_id=WorkerId("p1"), prefill_rate=1000.0), D)


def test_a_full_pool_is_refused():
    full = replace(D, reserved_tokens=int(OVERCOMMIT * D.capacity_tokens))
    with pytest.raises(Overloaded, match="decode") as refused:
        chosen(P, full)
    assert refused.value.retry_after_s == (1000 + 100) / 100.0


def test_an_idle_worker_takes_whatever_fits_it():
    tiny = replace(D, capacity_tokens=1001)
    assert chosen(P, tiny) == ("p0", "d0")


def test_default_max_tokens_do_not_fill_a_small_pool():
    assert decode_need(100, 4096) == 100 + OUTPUT_CREDIT_TOKENS
    assert decode_need(100, 16) == 116


# Most pools take nothing. Of how many that is so among the first drawn depends on the modules that other tests import.
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(pools)
def test_nobody_cheaper_was_passed_over(pool: list[Candidate]):
    pool = with_default_rates(pool, max((c.prefill_rate for c in pool), default=0.0))
    try:
        choice = choose(pool, 1000, NEED)
    except TandemError:
        assume(False)
        return
    least = cost_s(choice.prefill, choice.decode, 1000, NEED)
    rivals = [
        (p, d)
        for p in pool
        for d in pool
        if p.role != WorkerRole.DECODE and d.role != WorkerRole.PREFILL and _meet(p, d)
        if _takes(choose, p) and _takes(choose, d)
    ]
    assert all(least <= cost_s(p, d, 1000, NEED) for p, d in rivals)


def _meet(prefill: Candidate, decode: Candidate) -> bool:
    return prefill.worker_id == decode.worker_id or bool(prefill.send_words & decode.receive_words)


def _takes(choose, one: Candidate) -> bool:
    """Whether it would be taken if it were alone, as a mixed worker, for its own side."""
    other = {WorkerRole.PREFILL: WorkerRole.DECODE, WorkerRole.DECODE: WorkerRole.PREFILL}.get(one.role)
    idle = (
        [worker("x", other, send_words=one.receive_words, receive_words=one.send_words, capacity_tokens=10**6)]
        if other
        else []
    )
    try:
        choose([one, *idle], 1000, NEED)
    except TandemError:
        return False
    return True


@given(pools)
def test_a_choice_or_a_typed_refusal(pool: list[Candidate]):
    try:
        choice = choose(pool, 1000, NEED)
    except Overloaded as refused:
        assert MIN_RETRY_S <= refused.retry_after_s <= MAX_RETRY_S
    except (Unavailable, RequestError):
        pass
    else:
        known = with_default_rates(pool, max(c.prefill_rate for c in pool))
        assert choice.prefill in known and choice.decode in known
        assert _meet(choice.prefill, choice.decode)
        assert choice.uncached_tokens == 1000 - choice.prefill.cached_tokens > 0
