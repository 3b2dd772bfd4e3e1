"""The contract of a store, for the twin and for real servers."""

import asyncio

import pytest
from msgspec import structs

from contracts.errors import Overloaded, RequestError, Unavailable
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.node import NodeLoad, WorkerRole
from contracts.request import AdapterRef
from coordinator.placement.prefixes import BLOCK_TOKENS, PromptPrefixes
from coordinator.request_states import RequestState
from coordinator.store.store import Lead, StateTransition, Store
from tests.coordinator.coordinator_rig import (
    ALIVE_LOAD,
    BREAK_EVEN_RATE,
    BREAK_EVEN_STEP,
    BREAK_EVENS,
    GATEWAY,
    answers,
    ask,
    assert_idle,
    credits,
    join,
    node,
    pair,
    place,
    reap,
    view,
)
from tests.nodes import ways
from tests.waiting import async_until

pytestmark = pytest.mark.slow

A, B = Incarnation("a"), Incarnation("b")
ONE = Epoch(1)


def moves(name: str, *states: RequestState, epoch: int = 1) -> list[StateTransition]:
    return [StateTransition(RequestId(name), Epoch(epoch), state) for state in states]


class TestRegistry:
    async def test_workers_are_listed_by_id(self, store: Store):
        await join(store, node("w1", WorkerRole.DECODE), node("w0", WorkerRole.PREFILL))
        assert [node.info.worker_id for node in await store.nodes()] == ["w0", "w1"]
        assert all(node.alive for node in await store.nodes())

    async def test_nothing_of_a_pool_that_is_larger_than_asked_for_is_read(self, store: Store):
        await pair(store)
        assert [len(await store.nodes(at_most)) for at_most in (0, 1, 2)] == [2, 0, 2]

    async def test_a_changed_role_is_seen_by_all_and_what_is_placed_stays(self, store: Store):
        await join(store, node("d0", WorkerRole.DECODE), node("d1", WorkerRole.DECODE), node("p0", WorkerRole.PREFILL))
        await place(store, ask("r"))
        before = {view.node.info.worker_id: view for view in await store.workers()}
        await store.restate(node("d1", WorkerRole.PREFILL))
        await store.restate(node("d1", WorkerRole.PREFILL))
        assert [n.info.role for n in await store.nodes()] == [WorkerRole.DECODE, WorkerRole.PREFILL, WorkerRole.PREFILL]
        after = {view.node.info.worker_id: view for view in await store.workers()}
        for name in before:
            assert (after[name].reserved_tokens, after[name].pending_tokens) == (
                before[name].reserved_tokens,
                before[name].pending_tokens,
            )
        assert (await store.counts()).role_changes == 1
        assert await store.finish(RequestId("r"), ONE)
        await assert_idle(store)

    async def test_adapters_that_come_and_go_are_seen_by_all(self, store: Store):
        await pair(store)
        for adapters in ((AdapterRef("sql", b"x" * 16),), ()):
            await store.restate(structs.replace(node("p0", WorkerRole.PREFILL), adapters=adapters))
            assert [n.info.adapters for n in await store.nodes()] == [None, adapters]
        assert (await store.counts()).role_changes == 0

    @pytest.mark.parametrize("lost", ["drains", "left"])
    async def test_the_last_of_a_side_keeps_its_role(self, store: Store, lost: str):
        await join(store, node("d0", WorkerRole.DECODE), node("d1", WorkerRole.DECODE), node("p0", WorkerRole.PREFILL))
        with pytest.raises(RequestError, match="compute prompts"):
            await store.restate(node("p0", WorkerRole.DECODE))
        await store.restate(node("p0", WorkerRole.MIXED))
        await store.restate(node("p0", WorkerRole.PREFILL))
        if lost == "drains":
            await store.heartbeat(WorkerId("d1"), A, structs.replace(ALIVE_LOAD, draining=True))
        else:
            await store.leave(WorkerId("d1"), A)
        with pytest.raises(RequestError, match="produce answers"):
            await store.restate(node("d0", WorkerRole.PREFILL))
        await store.restate(node("d0", WorkerRole.MIXED))

    async def test_a_pool_that_lacks_a_side_gets_it(self, store: Store):
        await join(store, node("d0", WorkerRole.DECODE), node("d1", WorkerRole.DECODE))
        await store.restate(node("d0", WorkerRole.PREFILL))
        assert (await place(store, ask("r"))).prefill.worker_id == "d0"

    async def test_a_worker_that_is_not_in_the_registry_changes_nothing(self, store: Store):
        await pair(store)
        for unknown in (node("d0", WorkerRole.MIXED, incarnation="b"), node("d7", WorkerRole.MIXED)):
            with pytest.raises(Unavailable, match="does not know"):
                await store.restate(unknown)
        assert {n.info.role for n in await store.nodes()} == {WorkerRole.DECODE, WorkerRole.PREFILL}

    async def test_a_heartbeat_carries_the_load(self, store: Store):
        await pair(store)
        assert await store.heartbeat(WorkerId("p0"), A, ALIVE_LOAD)
        assert (await view(store, "p0")).node.load == ALIVE_LOAD

    async def test_an_unknown_worker_is_told_to_join(self, store: Store):
        assert not await store.heartbeat(WorkerId("p0"), A, ALIVE_LOAD)
        assert await store.nodes() == []

    async def test_a_worker_that_left_is_gone(self, store: Store):
        await pair(store)
        await store.leave(WorkerId("p0"), B)
        assert len(await store.nodes()) == 2
        await store.leave(WorkerId("p0"), A)
        assert [node.info.worker_id for node in await store.nodes()] == ["d0"]

    async def test_a_new_incarnation_supersedes(self, store: Store):
        await pair(store)
        await place(store, ask("r"))
        await store.join(node("d0", WorkerRole.DECODE, incarnation="b"))
        assert (await view(store, "d0")).reserved_tokens == 0
        assert not await store.heartbeat(WorkerId("d0"), A, ALIVE_LOAD)
        assert await store.heartbeat(WorkerId("d0"), B, ALIVE_LOAD)
        assert await store.finish(RequestId("r"), ONE)
        await assert_idle(store)

    async def test_one_that_slept_until_it_was_forgotten_does_not_take_its_successors_place(self, store: Store):
        await store.join(node("w", WorkerRole.MIXED, incarnation="b"))
        with pytest.raises(Unavailable, match="newer process"):
            await store.join(node("w", WorkerRole.MIXED, incarnation="a"), again=True)
        assert await store.heartbeat(WorkerId("w"), B, ALIVE_LOAD)
        await store.leave(WorkerId("w"), B)
        await store.join(node("w", WorkerRole.MIXED, incarnation="a"), again=True)
        assert await store.heartbeat(WorkerId("w"), A, ALIVE_LOAD)

    async def test_the_superseded_come_back_when_their_successor_has_left(self, store: Store):
        await pair(store)
        assert await store.join(node("d0", WorkerRole.DECODE, incarnation="b"))
        with pytest.raises(Unavailable, match="newer process"):
            await store.join(node("d0", WorkerRole.DECODE), again=True)
        assert (await view(store, "d0")).node.info.incarnation == B
        await store.leave(WorkerId("d0"), B)
        assert not await store.join(node("d0", WorkerRole.DECODE), again=True)
        assert await store.heartbeat(WorkerId("d0"), A, ALIVE_LOAD)

    async def test_a_join_that_comes_twice_changes_nothing(self, store: Store):
        await pair(store)
        await place(store, ask("r", prefixes=PromptPrefixes(range(64))))
        before = await store.workers()
        for name, role in (("p0", WorkerRole.PREFILL), ("d0", WorkerRole.DECODE)):
            assert not await store.join(node(name, role))
        assert await store.workers() == before

    async def test_joining_anew_owes_nothing(self, store: Store):
        await pair(store)
        await place(store, ask("r"))
        await store.leave(WorkerId("d0"), A)
        await store.join(node("d0", WorkerRole.DECODE))
        await place(store, ask("s", 200, 50))
        assert await store.finish(RequestId("r"), ONE)
        assert (await view(store, "d0")).reserved_tokens == 250


class TestPlacing:
    async def test_a_route_names_both_workers(self, store: Store):
        await pair(store)
        route = await place(store, ask("r"))
        assert (route.request_id, route.epoch) == ("r", 1)
        assert route.prefill == node("p0", WorkerRole.PREFILL).ref
        assert route.decode == node("d0", WorkerRole.DECODE).ref

    async def test_of_decodes_that_cost_the_same_one_of_prefills_layout_is_taken(self, store: Store):
        other = node("d0", WorkerRole.DECODE, layout_id="m", ways=ways("l", "m"))
        alike = node("d1", WorkerRole.DECODE, layout_id="l", ways=ways("l"))
        await join(store, node("p0", WorkerRole.PREFILL, layout_id="l"), other, alike)
        assert (await place(store, ask("r"))).decode.worker_id == "d1"

    async def test_an_idle_worker_is_never_full(self, store: Store):
        await pair(store, capacity=60)
        assert (await place(store, ask("r", 50, 5000))).decode.worker_id == "d0", "its credit is five pools"
        with pytest.raises(Overloaded):
            await place(store, ask("s", 50, 5000))

    async def test_nobody_is_refused_before_a_worker_has_measured_how_long_prompts_wait(self, store: Store):
        await pair(store, capacity=10_000_000)
        for index in range(9):
            await place(store, ask(f"r{index}", 8000))
        await store.heartbeat(WorkerId("p0"), A, NodeLoad(prefill_rate=2000.0, free_tokens=10_000_000))
        with pytest.raises(Overloaded, match="all prefill workers"):
            await place(store, ask("late", 8000))

    async def test_credits_are_taken_at_once_and_come_back(self, store: Store):
        await pair(store)
        await place(store, ask("r", 100, 50))
        assert await credits(store) == {"p0": (100, 1, 0, 0), "d0": (0, 0, 150, 1)}
        assert await store.finish(RequestId("r"), ONE)
        await assert_idle(store)

    async def test_a_burst_spreads_without_a_heartbeat(self, store: Store):
        await pair(store)
        await store.join(node("d1", WorkerRole.DECODE))
        routes = await asyncio.gather(*(place(store, ask(f"r{index}")) for index in range(10)))
        assert sorted(route.decode.worker_id for route in routes) == ["d0"] * 5 + ["d1"] * 5

    async def test_the_same_call_twice_takes_credit_once(self, store: Store):
        await pair(store)
        assert await place(store, ask("r")) == await place(store, ask("r"))
        assert (await view(store, "d0")).num_decodes == 1

    async def test_no_worker_is_said_in_words(self, store: Store):
        with pytest.raises(Unavailable, match="no live prefill worker"):
            await place(store, ask("r"))
        await store.join(node("p0", WorkerRole.PREFILL))
        with pytest.raises(Unavailable, match="no live decode worker"):
            await place(store, ask("r"))
        assert (await store.counts()).unavailable == 2

    async def test_who_can_not_exchange_kv_is_no_pair(self, store: Store):
        await join(store, node("p0", WorkerRole.PREFILL, ways=ways("l", by="shm@a")), node("d0", WorkerRole.DECODE))
        await store.join(node("p1", WorkerRole.PREFILL, ways=ways("l", by="tcp", memory="cuda")))
        with pytest.raises(Unavailable, match="can take the KV"):
            await place(store, ask("r"))
        await store.join(node("p2", WorkerRole.PREFILL, ways=ways("l", by="shm@a ucx tcp")))
        assert [(await place(store, ask(f"r{i}"))).prefill.worker_id for i in range(3)] == ["p2"] * 3
        assert (await store.counts()).unavailable == 1

    async def test_a_transport_that_stays_on_a_host_is_another_on_each(self, store: Store):
        await join(store, node("p0", WorkerRole.PREFILL, ways=ways("l", by="shm@a")))
        await join(store, node("d0", WorkerRole.DECODE, ways=ways("l", by="shm@ab")))
        with pytest.raises(Unavailable, match="can take the KV"):
            await place(store, ask("r"))
        await store.join(node("d1", WorkerRole.DECODE, ways=ways("l", by="shm@a")))
        assert (await place(store, ask("r"))).decode.worker_id == "d1"

    async def test_a_worker_without_any_way_serves_alone(self, store: Store):
        await store.join(node("m0", WorkerRole.MIXED, ways=ways("l", by="")))
        assert (await place(store, ask("r"))).is_local

    async def test_idle_workers_that_meet_nobody_hide_nothing(self, store: Store):
        """Neither a pair that is not among the cheapest, nor that all who meet are full."""
        shm = ways("l", by="shm@a")
        await join(store, *(node(f"p{i}", WorkerRole.PREFILL, ways=shm) for i in range(9)))
        await join(store, *(node(f"d{i}", WorkerRole.DECODE) for i in range(9)))
        await join(store, node("p9", WorkerRole.PREFILL), node("d9", WorkerRole.DECODE, ways=shm))
        for name in ("p9", "d9"):
            busy = NodeLoad(queue_tokens=500, num_running=1, free_tokens=10, prefill_rate=1000.0)
            await store.heartbeat(WorkerId(name), A, busy)
        route = await place(store, ask("r"))
        assert (route.prefill.worker_id, route.decode.worker_id) == ("p9", "d0")
        await store.leave(WorkerId("d9"), A)
        await store.heartbeat(WorkerId("p9"), A, NodeLoad(queue_tokens=40_000, prefill_rate=1000.0))
        with pytest.raises(Overloaded, match="prefill"):
            await place(store, ask("s"))
        assert (await store.counts()).overloaded == 1

    async def test_an_idle_decode_worker_that_meets_nobody_has_no_room(self, store: Store):
        await pair(store, capacity=1000)
        await store.join(node("d1", WorkerRole.DECODE, ways=ways("l", by="shm@a")))
        for index in range(6):
            await place(store, ask(f"r{index}", 400, 200))
        with pytest.raises(Overloaded, match="decode"):
            await place(store, ask("s", 400, 200))

    async def test_draining_workers_get_no_work(self, store: Store):
        await pair(store)
        await store.heartbeat(WorkerId("d0"), A, NodeLoad(draining=True))
        with pytest.raises(Unavailable, match="decode"):
            await place(store, ask("r"))

    async def test_too_long_is_the_clients_fault(self, store: Store):
        await pair(store)
        with pytest.raises(RequestError, match="no worker takes more than 8191"):
            await place(store, ask("r", 9000))
        assert (await store.counts()).too_long == 1

    async def test_a_full_pool_refuses_and_recovers(self, store: Store):
        await pair(store, capacity=1000)
        await store.heartbeat(WorkerId("d0"), A, ALIVE_LOAD)
        for index in range(6):
            await place(store, ask(f"r{index}", 400, 200))
        with pytest.raises(Overloaded, match="decode") as refused:
            await place(store, ask("s", 400, 200))
        assert refused.value.retry_after_s == pytest.approx(2.0)
        await store.finish(RequestId("r0"), ONE)
        await place(store, ask("s", 400, 200))
        assert (await store.counts()).overloaded == 1

    async def test_what_a_worker_holds_beyond_its_credits_counts(self, store: Store):
        await pair(store)
        await store.join(node("d1", WorkerRole.DECODE))
        await store.heartbeat(WorkerId("d0"), A, NodeLoad(num_running=3, free_tokens=100))
        assert (await place(store, ask("r", 500))).decode.worker_id == "d1"

    async def test_a_queue_from_before_the_store_was_lost_counts(self, store: Store):
        await pair(store)
        await store.join(node("p1", WorkerRole.PREFILL))
        await store.heartbeat(WorkerId("p0"), A, NodeLoad(queue_tokens=5000))
        assert (await place(store, ask("r"))).prefill.worker_id == "p1"

    async def test_a_conversation_goes_where_its_prefix_is(self, store: Store):
        await pair(store)
        await store.join(node("p1", WorkerRole.PREFILL))
        prompt = list(range(640))
        first = await place(store, ask("r", 640, prefixes=PromptPrefixes(prompt)))
        await store.finish(RequestId("r"), ONE)
        await place(store, ask("other", 10, 1, exclude=(WorkerId("p1"),)))
        second = await place(store, ask("s", 700, prefixes=PromptPrefixes(prompt + [1] * 60)))
        assert first.prefill == second.prefill
        assert (await view(store, "p0")).pending_tokens == 10 + 60

    async def test_of_a_prompt_that_was_served_whole_one_token_is_computed(self, store: Store):
        await pair(store)
        prompt = PromptPrefixes(list(range(10 * BLOCK_TOKENS)))
        await place(store, ask("r", 10 * BLOCK_TOKENS, prefixes=prompt))
        await store.finish(RequestId("r"), ONE)
        await place(store, ask("s", 10 * BLOCK_TOKENS, prefixes=prompt))
        assert (await view(store, "p0")).pending_tokens == 1

    async def test_prefixes_die_with_the_incarnation(self, store: Store):
        await pair(store)
        prompt = PromptPrefixes(list(range(640)))
        await place(store, ask("r", 640, prefixes=prompt))
        await store.join(node("p0", WorkerRole.PREFILL, incarnation="b"))
        await place(store, ask("s", 640, prefixes=prompt))
        assert (await view(store, "p0")).pending_tokens == 640


class TestPlacingAgain:
    async def test_a_refuser_is_passed_over(self, store: Store):
        await pair(store)
        await store.join(node("d1", WorkerRole.DECODE))
        first = await place(store, ask("r"))
        second = await place(store, ask("r", epoch=2, exclude=(first.decode.worker_id,)))
        assert second.epoch == 2
        assert second.decode.worker_id != first.decode.worker_id
        assert (await credits(store))[first.decode.worker_id] == (0, 0, 0, 0)
        assert (await view(store, "p0")).num_prefills == 1

    async def test_the_former_attempt_is_over(self, store: Store):
        await pair(store)
        await place(store, ask("r"))
        await place(store, ask("r", epoch=2))
        assert await store.advance(moves("r", RequestState.QUEUED)) == [False]
        assert not await store.finish(RequestId("r"), ONE)
        assert await store.finish(RequestId("r"), Epoch(2))
        assert (await store.counts()).stale == 2
        await assert_idle(store)

    async def test_it_needs_no_second_credit(self, store: Store):
        await pair(store, capacity=1000)
        await place(store, ask("r", 900, 50))
        await place(store, ask("r", 900, 50, epoch=2))
        assert (await view(store, "d0")).reserved_tokens == 950

    async def test_a_refusal_leaves_no_credit_behind(self, store: Store):
        await pair(store)
        await place(store, ask("r"))
        with pytest.raises(Unavailable):
            await place(store, ask("r", epoch=2, exclude=(WorkerId("d0"),)))
        assert set((await credits(store)).values()) == {(0, 0, 0, 0)}
        assert await store.finish(RequestId("r"), ONE, RequestState.FAILED)
        await assert_idle(store)

    @pytest.mark.parametrize("epoch", [1, 2])
    async def test_what_has_ended_is_not_placed_again(self, store: Store, epoch: int):
        await pair(store)
        await place(store, ask("r"))
        await store.finish(RequestId("r"), ONE)
        with pytest.raises(Unavailable, match="has ended"):
            await place(store, ask("r", epoch=epoch))
        await assert_idle(store)

    @pytest.mark.parametrize(("name", "role"), [("p0", WorkerRole.PREFILL), ("d0", WorkerRole.DECODE)])
    async def test_a_place_at_a_worker_that_joined_anew_is_none(self, store: Store, name: str, role: WorkerRole):
        """Placing again tells where the request is, and that process has never heard of it."""
        await pair(store)
        route = await place(store, ask("r"))
        assert await place(store, ask("r")) == route
        await join(store, node(name, role, incarnation="b"))
        with pytest.raises(Unavailable, match=f"no live {role.value} worker"):
            await place(store, ask("r"))

    async def test_an_old_epoch_is_refused(self, store: Store):
        await pair(store)
        await place(store, ask("r", epoch=2))
        with pytest.raises(Unavailable, match="past attempt 1"):
            await place(store, ask("r"))


class TestStates:
    async def test_the_prompts_credit_ends_with_the_handoff(self, store: Store):
        await pair(store)
        await place(store, ask("r"))
        told = moves("r", RequestState.QUEUED, RequestState.RESERVING, RequestState.TRANSFERRING)
        assert await store.advance(told) == [True] * 3
        assert (await view(store, "p0")).pending_tokens == 100
        assert await answers(store) == {"p0": 0, "d0": 0}
        assert await store.advance(moves("r", RequestState.COMMITTED)) == [True]
        assert await credits(store) == {"p0": (0, 0, 0, 0), "d0": (0, 0, 150, 1)}
        assert await answers(store) == {"p0": 0, "d0": 1}
        assert (await store.counts()).states == {"COMMITTED": 1}

    async def test_decoding_where_it_was_computed_moves_the_credit(self, store: Store):
        await pair(store)
        await place(store, ask("r"))
        assert await store.advance(moves("r", RequestState.HELD, RequestState.LOCAL_DECODE)) == [True, True]
        assert await credits(store) == {"p0": (0, 0, 150, 1), "d0": (0, 0, 0, 0)}
        assert await answers(store) == {"p0": 1, "d0": 0}
        await store.finish(RequestId("r"), ONE)
        await assert_idle(store)

    async def test_a_local_route_keeps_its_credit(self, store: Store):
        await store.join(node("m0", WorkerRole.MIXED))
        assert (await place(store, ask("r"))).is_local
        assert await store.advance(moves("r", RequestState.QUEUED, RequestState.LOCAL_DECODE)) == [True, True]
        assert await credits(store) == {"m0": (0, 0, 150, 1)}
        assert await answers(store) == {"m0": 1}

    async def test_decoding_where_it_was_computed_leaves_the_count_of_other_answers(self, store: Store):
        await pair(store)
        await place(store, ask("r"))
        await store.advance(moves("r", RequestState.COMMITTED))
        for name in ("s", "t"):
            await place(store, ask(name))
        assert await store.advance(moves("s", RequestState.HELD, RequestState.LOCAL_DECODE)) == [True, True]
        assert await answers(store) == {"p0": 1, "d0": 1}

    async def test_an_answer_of_a_former_term_is_not_counted(self, store: Store):
        await pair(store)
        await place(store, ask("r"))
        await join(store, node("d0", WorkerRole.DECODE, incarnation="b"))
        await place(store, ask("s"))
        assert await store.advance(moves("r", RequestState.COMMITTED)) == [True]
        assert await answers(store) == {"p0": 0, "d0": 0}

    async def test_nobody_but_place_begins_an_attempt(self, store: Store):
        await pair(store)
        await place(store, ask("r"))
        await store.advance(moves("r", RequestState.QUEUED))
        assert await store.advance(moves("r", RequestState.PLACED)) == [False]
        assert (await store.counts()).illegal == 1

    async def test_a_prompt_spares_answers_but_not_those_that_wait_for_theirs(self, store: Store):
        """A prompt takes a second here, half of it from each answer beside it."""
        await join(store, node("m0", WorkerRole.MIXED), node("p0", WorkerRole.PREFILL))
        for name in ("m0", "p0"):
            await store.heartbeat(WorkerId(name), A, NodeLoad(prefill_rate=1000.0, prompt_tokens_per_mixed_step=512))

        async def placed(*names: str) -> list[str]:
            return [(await place(store, ask(name, 1000))).prefill.worker_id for name in names]

        assert await placed("a", "b", "c") == ["m0", "p0", "m0"]
        for name in "abc":
            await store.advance(
                moves(name, RequestState.QUEUED, RequestState.LOCAL_DECODE if name != "b" else RequestState.COMMITTED)
            )
        assert await answers(store) == {"m0": 3, "p0": 0}
        assert await placed("d", "e", "f") == ["p0", "p0", "m0"]
        for name in "abcdef":
            assert await store.finish(RequestId(name), ONE)
        await assert_idle(store)

    @pytest.mark.parametrize(("num_answers", "transfer_rate", "pending_tokens", "longest", "shortest"), BREAK_EVENS)
    async def test_short_prompts_stay_where_they_are_answered_and_long_ones_move(
        self, store: Store, num_answers, transfer_rate, pending_tokens, longest, shortest
    ):
        await join(store, node("m0", WorkerRole.MIXED))
        for index in range(num_answers):
            await place(store, ask(f"running-{index}", 1, 2))
            await store.advance(moves(f"running-{index}", RequestState.QUEUED, RequestState.LOCAL_DECODE))
        await join(store, node("p0", WorkerRole.PREFILL))
        loads = {
            "m0": NodeLoad(prefill_rate=BREAK_EVEN_RATE, prompt_tokens_per_mixed_step=BREAK_EVEN_STEP - num_answers)
        }
        loads["p0"] = structs.replace(loads["m0"], transfer_rate=transfer_rate, queue_tokens=pending_tokens)
        for name, load in loads.items():
            await store.heartbeat(WorkerId(name), A, load)
        stay, move = (1, longest // 2 + 1, longest), (shortest, 2 * shortest, 8000) if shortest else ()
        for num_tokens in (*stay, *move):
            route = await place(store, ask(f"r{num_tokens}", num_tokens))
            assert route.prefill.worker_id == ("p0" if num_tokens in move else "m0")
            assert route.decode.worker_id == "m0"
            assert await store.finish(RequestId(f"r{num_tokens}"), ONE)

    async def test_overtaken_reports_are_late_not_illegal(self, store: Store):
        await pair(store)
        await place(store, ask("r"))
        assert await store.advance(moves("r", RequestState.COMMITTED)) == [True]
        assert await store.advance(moves("r", RequestState.QUEUED, RequestState.RESERVING)) == [False, False]
        counts = await store.counts()
        assert (counts.late, counts.illegal) == (2, 0)

    async def test_illegal_moves_are_refused_and_counted(self, store: Store):
        await pair(store)
        await place(store, ask("r"))
        await store.advance(moves("r", RequestState.COMMITTED))
        assert await store.advance(moves("r", RequestState.LOCAL_DECODE)) == [False]
        assert await store.advance(moves("r", RequestState.PLACED, epoch=2)) == [False]
        assert await store.advance(moves("r", RequestState.FINISHED, epoch=7)) == [False]
        counts = await store.counts()
        assert (counts.illegal, counts.states) == (3, {"COMMITTED": 1})

    async def test_unknown_requests_are_counted(self, store: Store):
        assert await store.advance(moves("nobody", RequestState.QUEUED)) == [False]
        for _ in range(2):
            assert not await store.finish(RequestId("nobody"), ONE)
        counts = await store.counts()
        assert (counts.unknown, counts.ended) == (3, {})

    @pytest.mark.parametrize("known", [0, 1])
    async def test_no_claim_is_taken_behind_the_end_of_its_epoch(self, store: Store, known: int):
        """Its gateway gave up; the claim was under way."""
        await pair(store)
        if known:
            await place(store, ask("r"))
        assert await store.finish(RequestId("r"), Epoch(known + 1), RequestState.CANCELLED) is bool(known)
        for epoch in range(1, known + 2):
            with pytest.raises(Unavailable, match="has ended"):
                await place(store, ask("r", epoch=epoch))
        await assert_idle(store)
        assert (await store.counts()).ended == ({"CANCELLED": 1} if known else {})

    async def test_nothing_to_tell_is_nothing_told(self, store: Store):
        assert await store.advance([]) == []

    async def test_a_request_ends_once(self, store: Store):
        await pair(store)
        await place(store, ask("r"))
        assert await store.finish(RequestId("r"), ONE, RequestState.CANCELLED)
        assert await store.finish(RequestId("r"), ONE, RequestState.FINISHED)
        assert (await store.counts()).ended == {"CANCELLED": 1}
        await assert_idle(store)

    async def test_it_ends_in_an_end(self, store: Store):
        with pytest.raises(ValueError, match="QUEUED"):
            await store.finish(RequestId("r"), ONE, RequestState.QUEUED)


class TestLeases:
    async def test_a_dead_gateways_requests_end(self, store: Store):
        await pair(store)
        await place(store, ask("r", lease_s=0.0))
        await place(store, ask("s", gateway_id=GatewayId("g1")))
        reaped = await reap(store)
        assert [(r.request_id, r.epoch, r.gateway_id) for r in reaped] == [("r", 1, GATEWAY)]
        assert (await store.counts()).ended == {"FAILED": 1}
        assert (await view(store, "d0")).num_decodes == 1
        assert await reap(store) == []

    async def test_a_gateway_keeps_what_it_names(self, store: Store):
        """Not what it has no longer: the answer to a placement or a call at its end may have got lost."""
        await pair(store)
        for name in ("r", "s"):
            await place(store, ask(name, lease_s=0.0))
            await store.advance(moves(name, RequestState.COMMITTED))
        assert await store.renew([RequestId("r"), RequestId("unknown")], 10.0) == 1
        assert [r.request_id for r in await reap(store)] == ["s"]
        assert (await view(store, "d0")).num_decodes == 1

    async def test_what_was_reaped_and_lives_may_be_placed_again(self, store: Store):
        """The store was away for longer than a lease; the answer was not, and now its worker is lost."""
        await pair(store)
        await place(store, ask("r", lease_s=0.0))
        await reap(store)
        with pytest.raises(Unavailable, match="has ended"):
            await place(store, ask("r"))
        with pytest.raises(Unavailable, match="has ended"):
            await place(store, ask("r", epoch=2, gateway_id=GatewayId("g1")))
        assert (await place(store, ask("r", epoch=2))).epoch == 2
        assert (await view(store, "d0")).num_decodes == 1
        assert await store.finish(RequestId("r"), Epoch(2))
        counts = await store.counts()
        assert (counts.states, counts.ended) == ({}, {"FAILED": 1, "FINISHED": 1})
        with pytest.raises(Unavailable, match="has ended"):
            await place(store, ask("r", epoch=3))
        await assert_idle(store)

    async def test_ended_requests_have_no_lease(self, store: Store):
        await pair(store)
        await place(store, ask("r"))
        await store.finish(RequestId("r"), ONE)
        assert await store.renew([RequestId("r")], 10.0) == 0
        assert await reap(store) == []

    async def test_thousands_are_renewed_in_parts(self, store: Store):
        names = [RequestId(f"r{index}") for index in range(2500)]
        await pair(store)
        await place(store, ask("r2400", lease_s=0.0))
        assert await store.renew(names, 10.0) == 1
        assert await reap(store) == []


async def until_buried(store: Store) -> None:
    """Both workers of a pair: that a worker is silent for too long is seen before a reaper has taken its credits."""

    async def is_buried() -> bool:
        await reap(store)
        return (await store.counts()).buried == 2

    await async_until(is_buried)


class TestDeath:
    async def test_a_silent_worker_gets_no_work_and_loses_its_credits(self, mortal_store: Store):
        store = mortal_store
        await pair(store)
        await place(store, ask("r"))

        await until_buried(store)
        assert set((await credits(store)).values()) == {(0, 0, 0, 0)}
        assert not await store.heartbeat(WorkerId("d0"), A, ALIVE_LOAD)
        with pytest.raises(Unavailable, match="no live"):
            await place(store, ask("s"))

    @pytest.mark.parametrize("is_dead", [True, False])
    async def test_one_that_leaves_because_it_is_dead_is_counted_once(self, store: Store, is_dead: bool):
        await pair(store)
        for _ in range(2):
            await store.leave(WorkerId("d0"), A, is_dead)
        assert (await store.counts()).buried == int(is_dead)

    async def test_one_that_was_found_dead_is_not_counted_again_when_it_says_so(self, mortal_store: Store):
        await pair(mortal_store)
        await until_buried(mortal_store)
        await mortal_store.leave(WorkerId("d0"), A, is_dead=True)
        assert (await mortal_store.counts()).buried == 2

    async def test_the_dead_are_forgotten(self, mortal_store: Store):
        await pair(mortal_store)

        async def is_forgotten() -> bool:
            await reap(mortal_store)
            return await mortal_store.nodes() == []

        await async_until(is_forgotten)

    async def test_one_that_wakes_up_joins_again_and_owes_nothing(self, mortal_store: Store):
        store = mortal_store
        await pair(store)
        await place(store, ask("r"))

        await until_buried(store)
        await pair(store)
        assert await store.finish(RequestId("r"), ONE)
        await assert_idle(store)
        assert (await place(store, ask("s"))).decode.worker_id == "d0"


class TestLeading:
    async def test_nobody_but_the_leader_ends_anything(self, store: Store):
        await pair(store)
        await place(store, ask("r", lease_s=0.0))
        assert await store.reap("one") == []
        assert await store.lead("one", 10.0)
        assert await store.reap("two") == []
        assert [reaped.request_id for reaped in await store.reap("one")] == ["r"]

    async def test_one_leads(self, store: Store):
        assert await store.lead("one", 10.0) is Lead.NEW
        assert await store.lead("two", 10.0) is Lead.NOT
        assert await store.lead("one", 10.0) is Lead.STILL

    async def test_the_next_leads_when_the_first_resigns(self, store: Store):
        await store.lead("one", 10.0)
        await store.resign("two")
        assert not await store.lead("two", 10.0)
        await store.resign("one")
        assert await store.lead("two", 10.0)

    async def test_the_next_leads_when_the_first_falls_silent(self, store: Store):
        await store.lead("one", 0.05)
        await async_until(lambda: store.lead("two", 10.0))


class TestTransferRates:
    """What workers measure of their links decides between workers that are equal otherwise."""

    async def chosen(self, store: Store, *rates: float) -> str:
        await join(
            store,
            *(node(f"p{index}", WorkerRole.PREFILL) for index in range(len(rates))),
            node("d0", WorkerRole.DECODE),
        )
        for index, rate in enumerate(rates):
            load = NodeLoad(prefill_rate=1000.0, decode_rate=100.0, transfer_rate=rate)
            assert await store.heartbeat(WorkerId(f"p{index}"), A, load)
        return (await place(store, ask("r", num_tokens=1000))).prefill.worker_id

    async def test_the_faster_link_wins(self, store: Store):
        assert await self.chosen(store, 200.0, 5000.0) == "p1"

    async def test_a_link_that_hides_under_the_compute_is_as_good_as_any(self, store: Store):
        assert await self.chosen(store, 5000.0, 1e9) == "p0"

    async def test_an_unmeasured_link_is_taken_for_a_common_one(self, store: Store):
        assert await self.chosen(store, 200.0, 0.0) == "p1"

    @pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
    async def test_nonsense_is_taken_for_unmeasured(self, store: Store, rate: float):
        assert await self.chosen(store, rate, 200.0) == "p0"

    async def test_a_path_that_failed_is_passed_over_until_its_worker_comes_back_anew(self, store: Store):
        await join(
            store, node("p0", WorkerRole.PREFILL), *(node(d, WorkerRole.DECODE, incarnation=d) for d in ("d0", "d1"))
        )
        cut_off = NodeLoad(prefill_rate=1000.0, decode_rate=100.0, bad_paths=(Incarnation("d"), Incarnation("d0")))
        assert await store.heartbeat(WorkerId("p0"), A, cut_off)
        assert (await place(store, ask("r"))).decode.worker_id == "d1"
        await join(store, node("d0", WorkerRole.DECODE, incarnation="new"))
        assert (await place(store, ask("s"))).decode.worker_id == "d0"

    async def test_a_mixed_worker_wins_over_a_slow_link(self, store: Store):
        await join(store, node("m0", WorkerRole.MIXED))
        assert await self.chosen(store, 10.0) == "m0"
