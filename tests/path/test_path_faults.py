"""Each fault of the handoff at each stage, with twins: what the client is told, once, and that no page is lost."""

import pytest

from contracts.errors import PeerLost
from contracts.events import Failed, Finished, Token, Tokens
from contracts.handoff import ChunkHeader, Commit, Fin, Grant, Offer, Refuse, Wait
from contracts.ids import Epoch, RequestId
from contracts.request import Cancel, Job
from coordinator.request_states import TransitionCheck
from tests.path.ring import GATEWAY, D, P, Ring, answer
from worker.messages import GatewayGone

PROMPT = list(range(40))  # five steps of a twin
NUM_TOKENS = 6
R = RequestId("r")
STAGES = ("queued", "offered", "granted", "transferring", "finished", "decoding")


def arrive(stage: str, timeout_s: float = 60.0) -> tuple[Ring, Job]:
    """A ring whose only request has come exactly so far.

    offered: the offer is under way. granted: the grant is. transferring: one chunk has landed. finished: decode has
    committed, and prefill has not heard of it.
    """
    ring = Ring()
    job = ring.job(R, PROMPT, NUM_TOKENS, timeout_s=timeout_s)
    ring.both(job)
    ring.turn(D)
    steps = {"queued": 0, "offered": 1, "granted": 2, "transferring": 3, "finished": 4, "decoding": 5}[stage]
    for step in (_offer, _grant, _transfer, _finish, _decode)[:steps]:
        step(ring)
    return ring, job


def _offer(ring: Ring) -> None:
    ring.turn(P)


def _grant(ring: Ring) -> None:
    ring.carry(P, D)
    ring.turn(D)


def _transfer(ring: Ring) -> None:
    ring.carry(D, P)
    ring.turn(P)
    ring.carry(P, D, most=1)
    ring.turn(D)


def _finish(ring: Ring) -> None:
    for _ in range(6):
        ring.turn(P)
    ring.carry(P, D)
    ring.turn(D)


def _decode(ring: Ring) -> None:
    ring.carry(D, P)
    ring.turn(P)


def codes(ring: Ring) -> list[str]:
    """How the request ended, as the gateway heard it: the codes of failures, or finished."""
    return [end.code if isinstance(end, Failed) else "finished" for end in ring.ends(R)]


def states(ring: Ring) -> list[str]:
    return [state for _, _, _, state in ring.moves]


def test_the_stages_are_what_they_say() -> None:
    waiting = {}
    for stage in STAGES:
        queues = arrive(stage)[0].network.queues
        waiting[stage] = {link: [type(message) for message in queue] for link, queue in queues.items() if queue}
    assert waiting["queued"] == waiting["decoding"] == {}
    assert waiting["offered"] == {(P, D): [Offer]}
    assert waiting["granted"] == {(D, P): [Grant]}
    assert set(waiting["transferring"][P, D]) == {ChunkHeader}
    assert waiting["finished"] == {(D, P): [Commit]}


@pytest.mark.parametrize("stage", STAGES)
def test_the_states_told_are_legal_moves_in_order(stage: str) -> None:
    ring, _ = arrive(stage)
    ring.settle()
    assert states(ring) == ["QUEUED", "RESERVING", "TRANSFERRING", "COMMITTED"]
    assert ring.verdicts() == {TransitionCheck.LEGAL}


@pytest.mark.parametrize(
    ("stage", "ends"),
    [
        ("queued", ["deadline_exceeded"]),  # decode never heard of it: in life the gateway places it again
        ("offered", ["deadline_exceeded"]),
        ("granted", ["peer_lost"]),
        ("transferring", ["peer_lost"]),
        ("finished", ["finished"]),
        ("decoding", ["finished"]),
    ],
)
def test_prefill_dies(stage: str, ends: list[str]) -> None:
    ring, _ = arrive(stage, timeout_s=20.0)
    ring.kill(P)
    ring.settle(800)
    assert codes(ring) == ends
    assert ring.tokens(R) == answer(PROMPT, NUM_TOKENS if ends == ["finished"] else 0)
    ring.assert_clean()


@pytest.mark.parametrize(
    ("stage", "ends"),
    [
        ("queued", ["peer_lost"]),
        ("offered", ["peer_lost"]),
        ("granted", ["peer_lost"]),
        ("transferring", ["peer_lost"]),
        ("finished", []),  # from Fin on the end is decode's to tell: the gateway sees its stream break
        ("decoding", []),
    ],
)
def test_decode_dies(stage: str, ends: list[str]) -> None:
    ring, _ = arrive(stage)
    ring.kill(D)
    ring.settle()
    assert codes(ring) == ends
    assert all("decode worker d" in end.message for end in ring.ends(R))
    ring.assert_clean()


@pytest.mark.parametrize("stage", STAGES[1:4])
def test_a_broken_path_between_living_workers_ends_the_request_on_both(stage: str) -> None:
    ring, _ = arrive(stage, timeout_s=20.0)
    ring.network.cut(P, D)
    ring.settle(800)
    assert set(codes(ring)) <= {"peer_lost", "deadline_exceeded"} and 1 <= len(codes(ring)) <= 2
    ring.assert_clean()


LONE_CANCELS = {
    ("queued", P): ["deadline_exceeded"],  # decode was told of nothing, neither of the request nor of its end
    ("finished", P): ["finished"],  # prefill has no part in it any more
    ("decoding", P): ["finished"],
    ("queued", D): ["unavailable"],  # prefill's offer finds no job
    ("offered", D): ["unavailable"],
}


@pytest.mark.parametrize("heard_by", [(P, D), (P,), (D,)])
@pytest.mark.parametrize("stage", STAGES)
def test_a_cancel_frees_both_even_if_only_one_hears_it(stage: str, heard_by: tuple) -> None:
    ring, _ = arrive(stage, timeout_s=20.0)
    for name in heard_by:
        ring.post(name, Cancel(R, Epoch(1), "the client left"))
    ring.settle(800)
    assert codes(ring) == (LONE_CANCELS.get((stage, heard_by[0]), []) if len(heard_by) == 1 else [])
    ring.assert_clean()


@pytest.mark.parametrize("stage", STAGES)
def test_a_gateway_that_is_gone_leaves_nothing_behind(stage: str) -> None:
    ring, _ = arrive(stage)
    for side in ring.sides.values():
        side.link.inbox.append(GatewayGone(GATEWAY))
    ring.settle()
    assert codes(ring) == []
    ring.assert_clean()


@pytest.mark.parametrize("stage", STAGES[1:])
def test_the_deadline_is_seen_at_every_stage(stage: str) -> None:
    ring, _ = arrive(stage, timeout_s=30.0)
    ring.clock.now += 60.0
    ring.settle()
    assert set(codes(ring)) == {"deadline_exceeded"}
    assert all("not done within 30.0 s" in end.message for end in ring.ends(R))
    ring.assert_clean()


@pytest.mark.parametrize("stage", STAGES)
def test_the_next_epoch_takes_over_at_every_stage(stage: str) -> None:
    ring, _ = arrive(stage)
    ring.events.clear()
    ring.both(ring.job(R, PROMPT, NUM_TOKENS, epoch=2))
    ring.settle()
    assert {event.epoch for _, event in ring.events} == {2}
    assert ring.tokens(R) == answer(PROMPT, NUM_TOKENS)
    assert codes(ring) == ["finished"]
    ring.assert_clean()


@pytest.mark.parametrize("stage", STAGES)
def test_the_same_job_twice_is_served_once(stage: str) -> None:
    ring, job = arrive(stage)
    ring.both(job)
    ring.settle()
    if stage != "decoding":  # prefill is done with it by then, and would take it for a new one: the gateway drops that
        assert ring.tokens(R) == answer(PROMPT, NUM_TOKENS)
        assert codes(ring) == ["finished"]
        ring.assert_clean()


@pytest.mark.parametrize("chunk", range(3))
def test_a_broken_chunk_is_a_failure_and_never_a_token(chunk: int) -> None:
    ring, _ = arrive("granted")
    ring.carry(D, P)
    for _ in range(6):
        ring.turn(P)
    ring.carry(P, D, most=chunk)
    ring.network.spoil(P, D)
    ring.settle()
    assert codes(ring) == ["corrupt"]
    assert {name for name, event in ring.events if isinstance(event, Tokens)} == {P}
    assert ring.sides[D].roles[1].counters()["chunks_bad"] == 1
    ring.assert_clean()


def test_a_chunk_out_of_order_is_refused() -> None:
    ring, _ = arrive("granted")
    ring.carry(D, P)
    for _ in range(6):
        ring.turn(P)
    ring.network.queues[P, D].rotate(-1)
    ring.settle()
    assert codes(ring) == ["corrupt"]
    assert "expected 0 at 0" in ring.ends(R)[0].message
    ring.assert_clean()


def test_a_commit_of_too_few_chunks_is_not_believed() -> None:
    ring, _ = arrive("finished")
    commit = ring.network.queues[D, P].popleft()
    assert isinstance(commit, Commit)
    ring.network.send(D, P, Commit(commit.request_id, commit.epoch, commit.num_chunks - 1, commit.nbytes))
    ring.settle()
    assert "corrupt" in codes(ring)
    ring.assert_clean()


@pytest.mark.parametrize("message", [Refuse(R, Epoch(1), "layout_mismatch", "another block size")])
def test_what_decode_refuses_fails_with_its_words(message: Refuse) -> None:
    ring, _ = arrive("offered")
    ring.network.queues.clear()
    ring.network.send(D, P, message)
    ring.post(D, Cancel(R, Epoch(1), "the gateway heard of it"))
    ring.settle()
    assert codes(ring) == ["unavailable"]
    assert "another block size" in ring.ends(R)[0].message
    ring.assert_clean()


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (P, Grant(R, Epoch(7), [[]], 0)),
        (P, Commit(R, Epoch(7), 1, 1)),
        (P, Wait(R, Epoch(7), "full")),
        (P, Refuse(R, Epoch(7), "x", "y")),
        (D, Fin(R, Epoch(7), 1, Token(0, 5), 0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_zombie_of_another_epoch_changes_nothing(at, message) -> None:
    ring, _ = arrive("transferring")
    ring.network.send(D if at == P else P, at, message)
    ring.settle()
    assert ring.tokens(R) == answer(PROMPT, NUM_TOKENS)
    assert codes(ring) == ["finished"]
    ring.assert_clean()


def test_pages_wait_for_their_last_writer() -> None:
    """Fault 16: a late write of an aborted attempt finds its pages still set aside."""
    ring, _ = arrive("transferring")
    node, engine = ring.sides[D].node, ring.sides[D].engine
    node.drains_at_once = False
    engine.capacity = 16
    ring.both(ring.job("other", PROMPT[::-1], 3))
    for name in (P, D):
        ring.post(name, Cancel(R, Epoch(1), "the client left"))
    ring.settle(10)
    assert engine.held == 10 and not ring.sides[D].roles[1].is_idle()
    assert ring.tokens("other")[1:] == []  # no pages yet: it waits
    node.drain_all()
    node.drains_at_once = True
    ring.settle()
    assert ring.tokens("other") == answer(PROMPT[::-1], 3)
    ring.assert_clean()


def test_pages_whose_writer_could_not_be_fenced_are_lost_and_counted() -> None:
    ring, _ = arrive("transferring")
    ring.kill(P, fenced=False)
    ring.settle()
    side = ring.sides[D]
    assert codes(ring) == [PeerLost.code]
    assert side.roles[1].counters()["quarantined"] == 1
    assert side.engine.held == 10 and side.engine.writers


def test_decode_without_pages_is_told_and_the_answer_goes_on_at_prefill() -> None:
    """Fault 17, as the registry hears it."""
    ring = Ring()
    ring.sides[D].engine.capacity = 2
    ring.both(ring.job(R, PROMPT, NUM_TOKENS))
    ring.settle(400)
    assert states(ring) == ["QUEUED", "RESERVING", "HELD", "LOCAL_DECODE"]
    assert codes(ring) == ["finished"] and ring.verdicts() == {TransitionCheck.LEGAL}
    ring.assert_clean()


def test_decode_that_must_preempt_takes_the_youngest_and_answers_all_of_it() -> None:
    """Fault 18: what was handed over is computed again where it is, before anyone new gets its pages."""
    ring, prompts = Ring(), {name: [number] * 16 for number, name in enumerate(("old", "young", "late"))}
    engine = ring.sides[D].engine
    engine.capacity = 12
    for name in ("old", "young"):
        ring.both(ring.job(name, prompts[name], 20))
    while not engine.preempted:
        ring.settle(1)
    ring.both(ring.job("late", prompts["late"], 20))
    ring.settle(200)
    for name, prompt in prompts.items():
        assert ring.tokens(name) == answer(prompt, 20)
        assert [type(end) for end in ring.ends(name)] == [Finished]
    assert engine.preempted[0] == "young.1" and "old.1" not in engine.preempted
    at_decode = [event for by, event in ring.events if by == D]
    names = [event.request_id for event in at_decode]
    assert names.index("late") > [type(event) for event in at_decode].index(Finished), "it overtook the preempted one"
    ring.assert_clean()


def test_prefill_that_holds_all_it_can_computes_no_more_and_refuses_early() -> None:
    """Fault 19: decode has no pages, so what is computed stays pinned; the gateway makes 429 of the refusal."""
    ring = Ring()
    ring.sides[D].engine.capacity = 2
    prefill = ring.sides[P].engine
    prefill.capacity, prefill.max_waiting = 12, 2
    for name in ("held", "queued", "refused"):
        ring.both(ring.job(name, PROMPT, NUM_TOKENS))
    ring.settle(20)
    told = {name: [state for _, of, _, state in ring.moves if of == name] for name in ("held", "queued", "refused")}
    assert told == {"held": ["QUEUED", "RESERVING", "HELD"], "queued": ["QUEUED"], "refused": []}
    assert [end.code for end in ring.ends("refused")] == ["overloaded"]
    ring.post(D, Cancel(RequestId("refused"), Epoch(1), "refused by prefill"))
    ring.settle(800)
    assert ring.tokens("held") == ring.tokens("queued") == answer(PROMPT, NUM_TOKENS)
    ring.assert_clean()


def test_a_grant_that_comes_after_all_is_stale() -> None:
    """Prefill has gone on alone; pages that decode found too late must come back."""
    ring, prompt = Ring(capacity=128), PROMPT
    ring.both(ring.job(R, prompt, 400))
    ring.turn(P)
    for _ in range(300):  # the offer is under way for longer than prefill waits
        ring.turn(P)
    ring.settle(600)
    assert codes(ring) == ["finished"]
    assert ring.tokens(R) == answer(prompt, 400)
    assert {name for name, event in ring.events if isinstance(event, Tokens)} == {P}
    ring.assert_clean()
