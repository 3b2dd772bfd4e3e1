"""The ring of a request in one process, with twins: each accepted request ends once, nothing leaks, no wrong token."""

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.events import Failed, Finished, Tokens
from contracts.ids import Epoch, RequestId
from contracts.request import Cancel, Job, Route
from contracts.sampling import SamplingParams
from coordinator.request_states import TransitionCheck
from testing.worker_twins import worker_ref
from tests.path.ring import GATEWAY, D, P, Ring, answer


def test_a_request_crosses_and_every_page_comes_back():
    ring, prompt = Ring(), list(range(30))
    job = ring.job("r", prompt, 5)
    ring.post(P, job)
    ring.post(D, job)
    ring.settle()
    assert ring.tokens("r") == answer(prompt, 5)
    assert [type(end) for end in ring.ends("r")] == [Finished]
    assert [name for name, event in ring.events if isinstance(event, Tokens)] == [P, D, D, D, D]
    ring.assert_clean()


def test_token_0_can_end_the_request_and_nothing_stays_at_decode():
    ring = Ring()
    job = ring.job("r", [1, 2, 3], 1)
    ring.post(P, job)
    ring.post(D, job)
    ring.settle()
    assert ring.tokens("r") == answer([1, 2, 3], 1)
    assert len(ring.ends("r")) == 1
    ring.assert_clean()


def test_an_offer_may_come_before_its_job():
    ring, prompt = Ring(), [5] * 9
    job = ring.job("r", prompt, 3)
    ring.post(P, job)
    ring.settle(4)
    ring.post(D, job)
    ring.settle()
    assert ring.tokens("r") == answer(prompt, 3)
    ring.assert_clean()


def test_an_offer_whose_job_never_comes_is_answered_by_prefill_alone():
    ring = Ring()
    ring.post(P, ring.job("r", [5] * 9, 3))
    ring.settle(400)
    assert ring.tokens("r") == answer([5] * 9, 3)
    assert [type(end) for end in ring.ends("r")] == [Finished]
    ring.assert_clean()


def test_without_pages_at_decode_the_answer_goes_on_at_prefill():
    ring, prompt = Ring(), [3] * 16
    ring.sides[D].engine.capacity = 2
    job = ring.job("r", prompt, 4)
    ring.post(P, job)
    ring.post(D, job)
    ring.settle(400)
    assert ring.tokens("r") == answer(prompt, 4)
    assert {name for name, event in ring.events if isinstance(event, Tokens)} == {P}
    assert ring.sides[P].roles[1].counters()["handoffs_local"] == 1
    ring.assert_clean()


def test_requests_queue_for_pages_and_all_cross():
    ring = Ring()
    ring.sides[D].engine.capacity = 8
    for number in range(6):
        job = ring.job(f"r{number}", [number] * 20, 3)
        ring.post(P, job)
        ring.post(D, job)
    ring.settle(80)
    for number in range(6):
        assert ring.tokens(f"r{number}") == answer([number] * 20, 3)
    assert ring.sides[D].roles[1].counters()["kv_handoffs_received_waited"] > 0
    ring.assert_clean()


def test_a_newer_epoch_takes_over_and_the_old_one_leaves_nothing():
    ring, prompt = Ring(), list(range(40))
    for epoch in (1, 2):
        job = ring.job("r", prompt, 4, epoch)
        ring.post(P, job)
        ring.post(D, job)
        ring.turn(P)
    ring.settle()
    fresh = [e for _, e in ring.events if isinstance(e, Tokens) and e.epoch == 2]
    assert [(t.index, t.token_id) for e in fresh for t in e.tokens] == answer(prompt, 4)
    assert all(end.epoch == 2 for end in ring.ends("r"))
    ring.assert_clean()


def test_a_request_past_its_deadline_fails_on_both_sides():
    ring = Ring()
    job = ring.job("r", list(range(20)), 1000, timeout_s=1.0)
    ring.post(P, job)
    ring.post(D, job)
    ring.settle(100)
    assert {end.code for end in ring.ends("r")} == {"deadline_exceeded"}
    ring.assert_clean()


def test_a_job_for_a_role_this_worker_has_not_is_refused_with_words():
    ring = Ring()
    route = Route(RequestId("r"), Epoch(1), worker_ref("elsewhere"), worker_ref("p"))
    ring.post(P, Job(route, GATEWAY, [1], SamplingParams(max_tokens=1, seed=0), 10.0))
    ring.settle(3)
    assert [end.code for end in ring.ends("r")] == ["invalid_request"]
    ring.assert_clean()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.sampled_from([P, D])),
        st.tuples(st.just("deliver"), st.integers(0, 7)),
        st.tuples(st.just("post"), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 3)),
        st.tuples(st.just("cut"), st.just(0)),
    ),
    max_size=120,
)


@settings(max_examples=150)
@given(ACTIONS, st.integers(4, 40))
def test_whatever_happens_every_request_ends_at_most_once_per_worker_and_nothing_leaks(actions, capacity):
    ring = Ring(capacity=capacity)
    prompts = {number: [number + 1] * (3 + 9 * number) for number in range(4)}
    posted, cancelled, was_cut = set(), set(), False
    for action, value in actions:
        if action == "turn":
            ring.turn(value)
        elif action == "deliver" and (links := ring.network.waiting()):
            ring.network.deliver(links[value % len(links)])
        elif action == "post" and value not in posted:
            posted.add(value)
            job = ring.job(f"r{value}", prompts[value], 2 + value, timeout_s=20.0)
            ring.post(P, job)
            ring.post(D, job)
        elif action == "cancel" and value in posted:
            cancelled.add(value)
            for name in (P, D):
                ring.post(name, Cancel(RequestId(f"r{value}"), Epoch(1), "client left"))
        elif action == "cut":
            was_cut = True
            ring.network.cut(P, D)
    ring.settle(600)
    assert TransitionCheck.ILLEGAL not in ring.verdicts()
    for number in posted:
        heard, ends = ring.tokens(f"r{number}"), ring.ends(f"r{number}")
        assert heard == answer(prompts[number], len(heard))
        assert sum(isinstance(end, Finished) for end in ends) <= 1
        if number not in cancelled:
            assert ends
        if number not in cancelled and not was_cut and not any(isinstance(end, Failed) for end in ends):
            assert len(heard) == 2 + number
    ring.assert_clean()
