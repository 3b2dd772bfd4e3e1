"""The store's twin in memory: one process, no Redis, the same answers."""

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import islice
from math import inf

from contracts.held_prefixes import HeldChange
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.node import Node, NodeInfo, NodeLoad, WorkerRole
from contracts.request import WorkerRef
from coordinator import refusals
from coordinator.request_states import (
    ENDS,
    HOLDS_DECODE,
    HOLDS_PREFILL,
    RequestState,
    TransitionCheck,
    check_transition,
    require_end,
)
from coordinator.store.store import (
    ALIVE_S,
    ENDED_KEPT_S,
    STALE_RECORD_KEPT_S,
    Claim,
    Claimed,
    ClaimedRoute,
    ClaimedWorker,
    Counts,
    Lead,
    MigrationClaim,
    PoolRow,
    PoolUpdate,
    Reaped,
    StateTransition,
    WorkerView,
    to_counts,
)
from testing.memory_prefixes import MemoryPrefixes
from testing.memory_record import Credit, Record, claimed_worker, count_answer
from testing.memory_worker import DECODE, PREFILL, Worker


class MemoryStore:
    """Implements Store. `clock`: seconds, any origin."""

    def __init__(
        self,
        *,
        alive_s: float = ALIVE_S,
        stale_record_kept_s: float = STALE_RECORD_KEPT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._alive_s, self._stale_record_kept_s, self._clock = alive_s, stale_record_kept_s, clock
        self._workers: dict[WorkerId, Worker] = {}
        self._records: dict[RequestId, Record] = {}
        self._prefixes = MemoryPrefixes()
        self._num_joins = 0
        self._states: Counter[str] = Counter()
        self._counters: Counter[str] = Counter()
        self._leader: tuple[str, float] = ("", float("-inf"))

    async def join(self, info: NodeInfo, again: bool = False) -> bool:
        now, there = self._clock(), self._workers.get(info.worker_id)
        own = self._current(info.worker_id, info.incarnation)
        is_taken = there is not None and own is None and now < there.alive_until_s
        if is_taken and again:
            raise refusals.superseded(info.worker_id)
        if own is not None and own.died_s is None:
            own.alive_until_s = now + self._alive_s
        else:
            self._num_joins += 1
            self._workers[info.worker_id] = Worker(info, str(self._num_joins), now + self._alive_s)
        return is_taken

    async def heartbeat(self, worker_id: WorkerId, incarnation: Incarnation, load: NodeLoad) -> bool:
        worker = self._current(worker_id, incarnation)
        if worker is None or worker.died_s is not None:
            return False
        worker.beat(load, self._clock() + self._alive_s)
        return True

    async def restate(self, info: NodeInfo) -> None:
        worker = self._current(info.worker_id, info.incarnation)
        if worker is None or worker.died_s is not None:
            raise refusals.not_known(info.worker_id)
        roles = {info.role, *(other.info.role for other in self._workers.values() if self._takes_work(other, worker))}
        for side, opposite in ((PREFILL, WorkerRole.DECODE), (DECODE, WorkerRole.PREFILL)):
            if roles == {opposite} and worker.info.role != info.role:
                raise refusals.last_of(side, info.worker_id)
        self._counters["role_changes"] += worker.info.role != info.role
        worker.info = info

    async def leave(self, worker_id: WorkerId, incarnation: Incarnation, is_dead: bool = False) -> None:
        worker = self._current(worker_id, incarnation)
        if worker is None:
            return
        del self._workers[worker_id]
        if is_dead and worker.died_s is None:
            self._counters["buried"] += 1

    async def nodes(self, at_most: int = 0) -> list[Node]:
        found = [worker.node for worker in await self.workers()]
        return found if not at_most or len(found) <= at_most else []

    async def workers(self) -> list[WorkerView]:
        now = self._clock()
        return [self._workers[worker_id].view(now) for worker_id in sorted(self._workers)]

    async def counts(self) -> Counts:
        return to_counts(self._states, self._counters)

    async def pool(self, since_us: int, is_full: bool) -> AsyncGenerator[PoolUpdate, None]:
        """All of it, each time, at once."""
        rows = [PoolRow(name, worker.counts, worker.load, worker.info) for name, worker in self._workers.items()]
        yield PoolUpdate(now_us=int(self._clock() * 1e6), rows=rows, is_full=True)

    async def prefix_holders(self, hashes: Sequence[bytes], blocks: Sequence[bytes] = ()) -> list[bytes]:
        return self._prefixes.look_up(hashes, blocks, self._clock())

    async def publish_held(self, worker_id: WorkerId, incarnation: Incarnation, changes: Sequence[HeldChange]) -> bool:
        worker = self._current(worker_id, incarnation)
        if worker is None or worker.died_s is not None:
            return False
        self._prefixes.note(changes, worker.term, self._clock())
        return True

    async def claim(self, claim: Claim, prefixes: Sequence[tuple[bytes, bytes]] = ()) -> Claimed:
        self._forget()
        record = self._records.get(claim.request_id)
        if record is not None and record.lives(claim):  # it begins anew, and stays counted as it ended
            del self._records[claim.request_id]
            record = None
        if record is not None:
            if refs := self._repeated(claim, record):
                return Claimed(repeated=refs)
            self._drop_destination(record)
            self._drop(record, PREFILL, DECODE)
        fresh = [self._fresh(offered) for offered in claim.workers]
        counts = [worker.counts if worker is not None else None for worker in fresh]
        costs = [self._cost_s(claim, route, fresh) for route in claim.routes]
        if min(costs, default=inf) == inf:
            if claim.refusal:
                self._counters[claim.refusal] += 1
            return Claimed(counts=counts)
        taken = costs.index(min(costs))
        self._take(claim, claim.routes[taken], fresh)
        self._remember(claim, claim.routes[taken], fresh, prefixes)
        return Claimed(route=taken, counts=counts)

    async def claim_migration(self, claim: MigrationClaim) -> bool:
        record, worker = self._records.get(claim.request_id), self._fresh(claim.worker)
        if record is None or record.state is None or record.state in ENDS or PREFILL in record.credits:
            return False
        if DECODE not in record.credits or record.epoch >= claim.epoch:
            return False
        if record.destination is not None:
            former = record.destination[1]
            is_repeated = former.epoch == claim.epoch and claimed_worker(former) == claimed_worker(claim)
            if former.epoch > claim.epoch or is_repeated:
                return is_repeated
        self._drop_destination(record)
        if worker is None or self._clock() >= worker.alive_until_s or worker.load.draining:
            return False
        if worker.counts.reserved_tokens > 0 and worker.counts.reserved_tokens > claim.worker.max_reserved_tokens:
            return False
        record.destination = Credit(worker, claim.need_tokens), claim
        worker.tokens[DECODE] += claim.need_tokens
        worker.requests[DECODE] += 1
        return True

    async def end_migration(self, request_id: RequestId, epoch: Epoch, is_moved: bool) -> bool:
        record = self._records.get(request_id)
        if record is None or record.destination is None or record.destination[1].epoch != epoch:
            return False
        held, _ = record.destination
        self._drop_destination(record)
        if is_moved:
            self._drop(record, DECODE)
            record.workers[DECODE] = held.worker
            self._hold(record, DECODE, held.worker, held.num_tokens)
            assert record.state is not None
            self._states[record.state] -= 1
            self._states[RequestState.COMMITTED] += 1
            record.state, record.epoch = RequestState.COMMITTED, epoch
        return True

    async def advance(self, moves: Sequence[StateTransition]) -> list[bool]:
        verdicts = [self._move(move) for move in moves]
        self._counters.update(verdict for verdict in verdicts if verdict != TransitionCheck.LEGAL)
        return [verdict == TransitionCheck.LEGAL for verdict in verdicts]

    async def finish(self, request_id: RequestId, epoch: Epoch, state: RequestState = RequestState.FINISHED) -> bool:
        require_end(state)
        record = self._records.get(request_id)
        if record is None or not record.gateway_id:
            self._counters["unknown"] += 1
            epoch = epoch if record is None else max(epoch, record.epoch)
            self._records[request_id] = Record(GatewayId(""), epoch, state, ended_s=self._clock())
            return False
        if record.epoch > epoch:
            self._counters["stale"] += 1
            return False
        if record.state not in ENDS:
            record.epoch = epoch
            self._enter(record, state)
        return True

    async def renew(self, request_ids: Sequence[RequestId], lease_s: float) -> int:
        until_s = self._clock() + lease_s
        known = (self._records.get(request_id) for request_id in request_ids)
        live = [record for record in known if record is not None and record.state not in ENDS]
        for record in live:
            record.lease_until_s = until_s
        return len(live)

    async def reap(self, candidate: str) -> list[Reaped]:
        now, (leader, until_s) = self._clock(), self._leader
        if leader != candidate or until_s <= now:
            return []
        live = {request_id: record for request_id, record in self._records.items() if record.state not in ENDS}
        overdue = {request_id: record for request_id, record in live.items() if record.lease_until_s <= now}
        for record in overdue.values():
            self._enter(record, RequestState.FAILED)
            record.is_reaped = True
            self._counters["reaped"] += 1
        self._bury(now)
        return [Reaped(request_id, record.epoch, record.gateway_id) for request_id, record in overdue.items()]

    async def is_sound(self) -> bool:
        """It can lose nothing."""
        return True

    async def recount(self) -> None:
        """It counts right."""

    async def lead(self, candidate: str, ttl_s: float) -> Lead:
        now = self._clock()
        leader, until_s = self._leader
        is_led = now < until_s
        if is_led and leader != candidate:
            return Lead.NOT
        self._leader = (candidate, now + ttl_s)
        return Lead.STILL if is_led else Lead.NEW

    async def resign(self, candidate: str) -> None:
        if self._leader[0] == candidate:
            self._leader = ("", float("-inf"))

    async def ping(self) -> None:
        """Always there."""

    async def close(self) -> None:
        """Nothing to close."""

    def _takes_work(self, worker: Worker, beside: Worker) -> bool:
        is_alive = worker.died_s is None and self._clock() < worker.alive_until_s
        return worker is not beside and is_alive and not worker.load.draining

    def _current(self, worker_id: WorkerId, incarnation: Incarnation) -> Worker | None:
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.info.incarnation == incarnation else None

    def _repeated(self, claim: Claim, record: Record) -> tuple[WorkerRef, WorkerRef] | None:
        """Return the route of a call that came twice; None if this is the next attempt.

        Raises Unavailable for a stale one.
        """
        is_over = record.state in ENDS
        if record.epoch == claim.epoch and not is_over and record.gateway_id == claim.gateway_id:
            for side, worker in record.workers.items():
                if self._workers.get(worker.info.worker_id) is not worker or worker.died_s is not None:
                    raise refusals.no_worker(side)
            return record.workers[PREFILL].info.ref, record.workers[DECODE].info.ref
        if record.epoch >= claim.epoch or is_over:
            self._counters["stale"] += 1
            raise refusals.stale(claim.request_id, claim.epoch)
        return None

    def _fresh(self, offered: ClaimedWorker) -> Worker | None:
        """The worker, if it is who was offered."""
        worker = self._workers.get(offered.worker_id)
        return worker if worker is not None and worker.counts.term == offered.term else None

    def _cost_s(self, claim: Claim, route: ClaimedRoute, fresh: list[Worker | None]) -> float:
        """Infinite for a route that can't be taken."""
        now, total = self._clock(), route.base_s
        for index, cost, is_decode in ((route.prefill, route.prefill_cost, 0), (route.decode, route.decode_cost, 1)):
            worker, offered = fresh[index], claim.workers[index]
            if worker is None or now >= worker.alive_until_s or worker.load.draining:
                return inf
            counts = worker.counts
            has_room = counts.reserved_tokens == 0 or counts.reserved_tokens <= offered.max_reserved_tokens
            if not (has_room if is_decode else counts.pending_tokens <= offered.max_pending_tokens):
                return inf
            tokens_over = max(0, counts.reserved_tokens + claim.need_tokens - offered.capacity_tokens)
            total += cost.seconds(counts.pending_tokens, counts.num_decodes, tokens_over, counts.num_answers)
        return total

    def _take(self, claim: Claim, route: ClaimedRoute, fresh: list[Worker | None]) -> None:
        prefill, decode = fresh[route.prefill], fresh[route.decode]
        assert prefill is not None and decode is not None
        record = self._records.setdefault(claim.request_id, Record(claim.gateway_id, claim.epoch))
        record.epoch, record.gateway_id = claim.epoch, claim.gateway_id
        record.workers = {PREFILL: prefill, DECODE: decode}
        self._hold(record, PREFILL, prefill, route.uncached_tokens)
        self._hold(record, DECODE, decode, claim.need_tokens)
        self._enter(record, RequestState.PLACED)
        record.lease_until_s = self._clock() + claim.lease_ms / 1000
        self._counters["placed"] += 1

    def _remember(
        self, claim: Claim, route: ClaimedRoute, fresh: list[Worker | None], prefixes: Sequence[tuple[bytes, bytes]]
    ) -> None:
        until_s, holders = self._clock() + claim.prefix_kept_ms / 1000, []
        for index in dict.fromkeys((route.prefill, route.decode)):
            worker = fresh[index]
            assert worker is not None
            worker.num_served_blocks += claim.num_blocks
            holders.append(f"{worker.term}:{worker.num_served_blocks}:{claim.prefix_tail}".encode())
        self._prefixes.serve(prefixes, holders, until_s)

    def _move(self, move: StateTransition) -> str:
        record = self._records.get(move.request_id)
        if record is None or record.state is None:
            return "unknown"
        if move.to is RequestState.PLACED or move.epoch > record.epoch:
            return TransitionCheck.ILLEGAL
        if move.epoch < record.epoch:
            return "stale"
        verdict = check_transition(record.state, move.to)
        if verdict is TransitionCheck.LEGAL:
            self._enter(record, move.to)
        return verdict

    def _enter(self, record: Record, to: RequestState) -> None:
        if record.state is not None:
            self._states[record.state] -= 1
        self._states[to] += 1
        record.state = to
        if to is RequestState.LOCAL_DECODE:
            self._decode_at_prefill(record)
        if to not in HOLDS_PREFILL:
            self._drop(record, PREFILL)
        if to not in HOLDS_DECODE:
            self._drop(record, DECODE)
        if to in ENDS:
            self._drop_destination(record)
            record.ended_s = self._clock()

    def _decode_at_prefill(self, record: Record) -> None:
        held = record.credits.get(DECODE)
        if held is not None and record.workers[PREFILL] is not record.workers[DECODE]:
            self._drop(record, DECODE)
            record.workers[DECODE] = record.workers[PREFILL]
            self._hold(record, DECODE, record.workers[PREFILL], held.num_tokens)

    def _hold(self, record: Record, side: str, worker: Worker, num_tokens: int) -> None:
        record.credits[side] = Credit(worker, num_tokens)
        if worker.died_s is None:
            worker.tokens[side] += num_tokens
            worker.requests[side] += 1
        count_answer(record, 1)

    def _drop(self, record: Record, *sides: str) -> None:
        for side in sides:
            count_answer(record, -1)
            held = record.credits.pop(side, None)
            if held is not None and held.worker.died_s is None:
                held.worker.tokens[side] -= held.num_tokens
                held.worker.requests[side] -= 1
            count_answer(record, 1)

    def _drop_destination(self, record: Record) -> None:
        if record.destination is not None:
            held, _ = record.destination
            record.destination = None
            if held.worker.died_s is None:
                held.worker.tokens[DECODE] -= held.num_tokens
                held.worker.requests[DECODE] -= 1

    def _bury(self, now: float) -> None:
        for worker_id, worker in list(self._workers.items()):
            if worker.died_s is None and worker.alive_until_s <= now:
                worker.die(now)
                self._counters["buried"] += 1
            elif worker.died_s is not None and worker.died_s + self._stale_record_kept_s <= now:
                del self._workers[worker_id]

    def _forget(self) -> None:
        """Records are in order of their first placement, so the oldest ended ones come first, more or less."""
        now = self._clock()
        for request_id, record in list(islice(self._records.items(), 8)):
            if record.state in ENDS and record.ended_s + ENDED_KEPT_S <= now:
                del self._records[request_id]
