"""The core's loop, over twins: what it takes and in which order, what it refuses, how it pictures itself."""

from dataclasses import replace
from itertools import groupby

import msgspec
import pytest

from contracts.events import Failed, Finished, Prefilled, Tokens
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.request import Cancel
from engine.messages import EngineFailure, StepObserver, StepOutput
from gateway.generation.time_account import non_overlapped_transfer_s
from tests.nodes import node_info
from tests.path.ring import GATEWAY, D, P, Ring, answer
from worker.core.engine_core import ALERT_WAIT_S, IDLE_WAIT_S
from worker.core.front_link import FrontDisconnected
from worker.core.role_handler import attempt_key
from worker.core.status import STATUS_PERIOD_S
from worker.messages import CoreFrame, GatewayGone, KnownPeers, Stop, Work

R = RequestId("r")


def statuses(ring: Ring, turns: int) -> list:
    """Statuses that the prefill side's core sends in so many turns."""
    found, side = [], ring.sides[P]
    for _ in range(turns):
        ring.clock.now += 0.03
        side.core.turn()
        found += [frame.status for frame in side.link.frames if isinstance(frame, CoreFrame) and frame.status]
        side.link.frames.clear()
    return found


def waits_of(ring: Ring, worker: WorkerId) -> list[float]:
    """How long its core was ready to wait, turn by turn."""
    waits, link = [], ring.sides[worker].link
    receive = link.receive

    def listening(timeout_s: float) -> list:
        waits.append(timeout_s)
        return receive(timeout_s)

    link.receive = listening  # type: ignore[method-assign]
    return waits


def test_an_idle_core_turns_and_says_so_ten_times_a_second():
    turns = 100
    found = statuses(Ring(), turns)
    assert len(found) == 1 + int((turns - 1) * 0.03 / (STATUS_PERIOD_S + 0.02))
    assert [s.num_turns for s in found] == sorted({s.num_turns for s in found})
    assert all(s.is_clean and s.num_steps == 0 for s in found)


def test_a_turn_without_news_sends_nothing():
    ring = Ring()
    statuses(ring, 1)
    ring.sides[P].core.turn()
    assert ring.sides[P].link.frames == []


def test_busy_is_not_clean_and_counts_the_request():
    ring = Ring()
    ring.both(ring.job(R, list(range(40)), 50))
    ring.turn(P)
    report = ring.sides[P].core._status.report()
    assert not report.is_clean and report.gauges["requests"] == 1
    assert report.counters["handoffs_offered"] == 1
    ring.settle()
    assert ring.sides[P].core._status.report().is_clean


def test_work_that_finds_no_pages_is_waited_for_and_not_spun_on(monkeypatch: pytest.MonkeyPatch):
    ring = Ring()
    side, waits = ring.sides[P], waits_of(ring, P)
    step = side.engine.step
    ring.both(ring.job(R, list(range(40)), 5))
    ring.turn(P)
    monkeypatch.setattr(side.engine, "step", lambda on_started: StepOutput())
    for _ in range(3):
        ring.turn(P)
    monkeypatch.setattr(side.engine, "step", step)
    for _ in range(2):
        ring.turn(P)
    # Idle before the job, at once after a step that did something, patiently after those that did nothing.
    assert waits == [IDLE_WAIT_S, 0.0, IDLE_WAIT_S, IDLE_WAIT_S, IDLE_WAIT_S, 0.0]
    ring.settle()
    assert ring.tokens(R) == answer(list(range(40)), 5)


def test_a_core_that_expects_a_handoff_does_not_sleep_for_long():
    ring = Ring()
    waits = waits_of(ring, D)
    ring.both(ring.job(R, list(range(40)), 5))
    ring.settle()
    assert ring.tokens(R) == answer(list(range(40)), 5)
    ring.turn(D)
    kinds = [wait for wait, _ in groupby(waits)]
    assert kinds == [IDLE_WAIT_S, ALERT_WAIT_S, 0.0, IDLE_WAIT_S]


def test_a_core_rests_when_nothing_is_left_and_not_while_it_computes(monkeypatch):
    ring, told = Ring(), []
    side = ring.sides[D]
    monkeypatch.setattr(side.node, "rested", lambda: told.append("rest"))
    ring.both(ring.job(R, list(range(40)), 50))
    ring.turn(D)
    assert told == ["rest"], "nothing is reserved yet"
    while not side.engine.has_work():
        ring.settle(1)
    told.clear()
    ring.turn(D)
    assert side.engine.has_work() and not told


def test_while_a_handoff_may_come_the_next_batch_waits_as_long_as_the_device_has_work():
    ring, coming = Ring(), list(range(40, 80))
    side, waits = ring.sides[D], waits_of(ring, D)
    ring.both(ring.job("running", list(range(40)), 100))
    while not ring.tokens("running")[2:]:
        ring.settle(1)
    side.engine.slack_s = 0.002
    num_told = len(ring.tokens("running"))
    ring.turn(D)
    assert len(ring.tokens("running")) == num_told + 1, "nobody is expected"
    ring.both(ring.job("coming", coming, 5))
    while not side.engine.has_reserved:
        ring.settle(1)
    num_told = len(ring.tokens("running"))
    ring.turn(D)
    assert len(ring.tokens("running")) == num_told and waits[-1] == 0.002
    side.engine.slack_s = 0.0
    ring.turn(D)
    assert len(ring.tokens("running")) == num_told + 1 and waits[-1] == 0.0
    ring.settle(120)
    assert ring.tokens("coming") == answer(coming, 5)


def test_stop_ends_the_loop_after_the_turn():
    ring = Ring()
    side = ring.sides[P]
    ring.post(P, ring.job(R, [1, 2, 3, 4], 1))
    side.link.inbox.append(Stop())
    side.core.run()
    (told,) = [frame.events[GatewayId("g")] for frame in side.link.frames if isinstance(frame, CoreFrame)]
    assert [type(event) for event in told] == [Prefilled, Tokens, Finished]


def test_a_front_that_is_gone_ends_the_loop():
    ring = Ring()

    def gone(timeout_s: float) -> list:
        raise FrontDisconnected

    ring.sides[P].link.receive = gone  # type: ignore[method-assign]
    with pytest.raises(FrontDisconnected):
        ring.sides[P].core.run()


def test_a_job_whose_cancel_came_before_it_begins_nothing():
    """Decode would wait for a prefill that never offers, and tell nobody."""
    ring = Ring()
    ring.post(D, Cancel(R, Epoch(1), "why"))
    ring.post(D, ring.job(R, [1, 2, 3], 2))
    ring.settle()
    ring.assert_clean()
    ring.both(ring.job(R, [1, 2, 3], 2, epoch=2))
    ring.settle()
    assert ring.tokens(R) == answer([1, 2, 3], 2)


def test_a_cancel_of_an_old_epoch_leaves_the_new_one_alone():
    ring = Ring()
    ring.both(ring.job(R, [1, 2, 3], 2, epoch=5))
    for name in (P, D):
        ring.post(name, Cancel(R, Epoch(4), "why"))
    ring.settle()
    assert ring.tokens(R) == answer([1, 2, 3], 2)


def test_a_cancel_of_a_newer_epoch_ends_the_old_one():
    """The gateway placed it again, and the job of the new attempt went elsewhere."""
    ring = Ring()
    ring.both(ring.job(R, list(range(40)), 500, epoch=1))
    ring.turn(P)
    for name in (P, D):
        ring.post(name, Cancel(R, Epoch(2), "why"))
    ring.settle()
    assert ring.ends(R) == []
    ring.assert_clean()


def test_the_loss_of_a_gateway_ends_its_own_requests_and_no_others():
    ring = Ring()
    ring.both(ring.job(R, [1, 2, 3], 2))
    ring.both(msgspec.structs.replace(ring.job("orphan", list(range(40)), 500), gateway_id=GatewayId("other")))
    ring.turn(P)
    for name in (P, D):
        ring.sides[name].link.inbox.append(GatewayGone(GatewayId("other")))
    ring.settle()
    assert ring.tokens(R) == answer([1, 2, 3], 2)
    ring.assert_clean()


def test_what_a_gateway_asks_after_its_stream_broke_goes_on():
    """It gave up what it had asked before, and its cancels may be lost."""
    ring = Ring()
    ring.both(ring.job(RequestId("before"), list(range(40)), 500))
    ring.turn(P)
    ring.clock.now += 5.0
    broken_s = ring.clock.now
    ring.clock.now += 5.0
    ring.both(ring.job(R, [1, 2, 3], 2))
    for name in (P, D):
        ring.sides[name].link.inbox.append(GatewayGone(GATEWAY, broken_s))
    ring.settle()
    assert ring.tokens(R) == answer([1, 2, 3], 2)
    ring.assert_clean()


def test_what_the_engine_could_not_compute_ends_at_decode_too(monkeypatch: pytest.MonkeyPatch):
    ring, key = Ring(), attempt_key(R, Epoch(1))
    ring.both(ring.job(R, list(range(40)), 5))
    ring.settle(1)
    engine = ring.sides[P].engine

    def fail(watcher: StepObserver) -> StepOutput:
        engine.release(key)
        return StepOutput(failed=(EngineFailure(key, "internal", "the device failed"),))

    monkeypatch.setattr(engine, "step", fail)
    ring.turn(P)
    monkeypatch.undo()
    ring.settle()
    (end,) = ring.ends(R)
    assert isinstance(end, Failed) and end.message == "the device failed"
    ring.assert_clean()


def test_a_job_older_than_the_one_that_runs_is_stale():
    ring = Ring()
    ring.both(ring.job(R, [1, 2, 3], 4, epoch=2))
    ring.both(ring.job(R, [9, 9, 9], 4, epoch=1))
    ring.settle()
    assert ring.tokens(R) == answer([1, 2, 3], 4)
    assert sum(side.ledger.num_stale for side in ring.sides.values()) >= 2


def test_events_of_one_step_go_out_in_one_frame_by_gateway():
    ring = Ring()
    ring.sides[P].engine.max_waiting = 100
    jobs = [ring.job(f"r{number}", [number] * 4, 1) for number in range(6)]
    ring.sides[P].link.inbox.append(Work(list(jobs), ring.clock.now))
    ring.clock.now += 0.03
    ring.sides[P].core.turn()
    frames = [frame for frame in ring.sides[P].link.frames if isinstance(frame, CoreFrame) and frame.events]
    assert len(frames) == 1
    events = frames[0].events[GatewayId("g")]
    assert [type(event) for event in events[:2]] == [Prefilled, Tokens]
    assert sum(isinstance(event, Finished) for event in events) == 6


def test_more_than_the_queue_takes_is_refused_at_once_with_its_code():
    ring = Ring()
    ring.sides[P].engine.max_waiting = 2
    for number in range(4):
        ring.both(ring.job(f"r{number}", [number] * 8, 2))
    ring.settle()
    ends = {number: ring.ends(f"r{number}") for number in range(4)}
    refused = [end for found in ends.values() for end in found if isinstance(end, Failed)]
    assert {end.code for end in refused} == {"overloaded"} and len(refused) == 2
    for number in range(2):
        assert ring.tokens(f"r{number}") == answer([number] * 8, 2)


def test_a_token_of_the_time_account_is_on_the_worker_that_spent_it():
    ring = Ring()
    ring.both(ring.job(R, list(range(40)), 5))
    ring.settle()
    (prefilled,) = [event for _, event in ring.events if isinstance(event, Prefilled)]
    (end,) = ring.ends(R)
    (told,) = [event.stages_s for _, event in ring.events if isinstance(event, Tokens) and event.stages_s]
    assert set(prefilled.stages_s) == {"queue", "prefill"}
    assert told == {stage: end.stages_s[stage] for stage in ("expect", "land", "queue")}
    assert set(end.stages_s) == {"expect", "land", "queue", "decode"}
    assert all(span_s >= 0 for span_s in (*prefilled.stages_s.values(), *end.stages_s.values()))


@pytest.mark.parametrize("kind", ["decode", "mixed", "prefill"])
def test_the_longest_step_that_an_answer_waited_for_is_told_with_what_was_in_it(monkeypatch, kind: str):
    ring = Ring()
    engine, lengths_s = ring.sides[D].engine, iter([0.01, 0.04, 0.02, 0.03])
    step = engine.step

    def timed(watcher: StepObserver) -> StepOutput:
        span_s = next(lengths_s)
        if span_s == 0.04 and kind == "prefill":  # of prompts alone, for which the answer waits
            return StepOutput(num_prefill_tokens=64, span_s=span_s)
        num_prompt = 64 if span_s == 0.04 and kind == "mixed" else 0
        return replace(step(watcher), num_prefill_tokens=num_prompt, span_s=span_s)

    monkeypatch.setattr(engine, "step", timed)
    ring.both(ring.job(R, list(range(40)), 4))
    ring.settle()
    (end,) = ring.ends(R)
    assert {name: span_s for name, span_s in end.stages_s.items() if "longest" in name} == {
        f"longest_{kind}_step": 0.04
    }


def test_both_accounts_begin_when_the_job_came_not_when_a_core_had_the_time():
    """Otherwise the gateway, which subtracts them, would call a core's busy step exposed handoff time."""
    ring = Ring()
    ring.both(ring.job(R, list(range(40)), 5))
    ring.turn(D)
    ring.clock.now += 5.0  # prefill's engine computes
    ring.settle()
    (prefilled,) = [event for _, event in ring.events if isinstance(event, Prefilled)]
    (end,) = ring.ends(R)
    assert prefilled.stages_s["queue"] > 5.0
    told = end.stages_s | {f"prefill_{stage}": span_s for stage, span_s in prefilled.stages_s.items()}
    felt_s = non_overlapped_transfer_s(told)
    assert felt_s is not None and felt_s < 1.0


def test_the_measured_bytes_a_second_are_told_as_tokens():
    ring = Ring()
    side = ring.sides[P]
    assert side.core._status.report().load.transfer_rate == 0.0
    side.node.transfer_rate = 1e6
    nbytes_per_token = side.engine.layout.block_nbytes / side.engine.layout.block_size
    assert side.core._status.report().load.transfer_rate == 1e6 / nbytes_per_token


def test_paths_that_fail_are_told_to_placement_and_counted():
    ring = Ring()
    side = ring.sides[P]
    side.node.bad_paths = (Incarnation("d"),)
    status = side.core._status.report()
    assert status.load.bad_paths == ("d",) and status.gauges["bad_paths"] == 1


def test_placement_is_told_a_rate_once_a_step_was_full():
    ring = Ring()
    side, full = ring.sides[P], ring.sides[P].engine.prompt_tokens_beside(0) // 2
    side.engine.span_s = 0.5
    ring.both(ring.job("short", list(range(full - 1)), 2))
    ring.settle()
    assert ring.ends("short") and side.core._status.report().load.prefill_rate == 0.0
    ring.both(ring.job("long", list(range(2 * full)), 2))
    ring.settle()
    assert ring.ends("long") and side.core._status.report().load.prefill_rate == pytest.approx(full / 0.5)


def test_loads_are_planned_by_what_was_measured_until_a_step_is_full(monkeypatch):
    ring = Ring()
    side, full = ring.sides[P], ring.sides[P].engine.prompt_tokens_beside(0) // 2
    assert side.core.prefill_rate == 0.0
    side.engine.span_s = 0.5
    monkeypatch.setattr(side.engine, "measure_prefill_rate", lambda: 60_000.0, raising=False)
    side.core.measure_prefill_rate()
    assert side.core.prefill_rate == 60_000.0
    assert side.core._status.report().load.prefill_rate == 0.0, "placement goes by full steps alone"
    ring.both(ring.job("long", list(range(2 * full)), 2))
    ring.settle()
    assert ring.ends("long") and side.core.prefill_rate == pytest.approx(full / 0.5)


@pytest.mark.parametrize("bounds_gaps", [False, True])
def test_placement_is_told_whether_steps_keep_to_an_objective(bounds_gaps):
    side = Ring().sides[P]
    side.engine.bounds_gaps = bounds_gaps
    assert side.core._status.report().load.bounds_gaps == bounds_gaps


def test_whom_the_front_names_is_met():
    side = Ring().sides[P]
    side.link.inbox.append(KnownPeers([node_info().ref]))
    side.core.turn()
    assert side.node.met == [node_info().ref]
