"""The coordinator's state: its interface, implemented in Redis and by a twin in memory."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from enum import IntEnum
from typing import Protocol

import msgspec

from contracts.held_prefixes import HeldChange
from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.node import Node, NodeInfo, NodeLoad
from contracts.request import WorkerRef
from coordinator.request_states import ENDS, RequestState

ALIVE_S = 3.0
"""A worker that has not beaten for so long is dead; it beats each second."""
STALE_RECORD_KEPT_S = 60.0
"""How long a dead worker is listed, for people who look."""
ENDED_KEPT_S = 60.0
"""How long an ended request is remembered, so that what workers tell of it late is known to be late."""

HELD_KEPT_S = 600.0
"""How long it is remembered that a tier holds a prefix, unless its worker says so again."""
MAX_HELD_BY = 28
"""Tiers that are remembered of one prefix, those that were told last."""
SHARED_TIER = "store"
"""The tier that is the same for all workers that have it: what is there is of none of them."""


class WorkerCost(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker's load adds to the cost of a route, in seconds for each unit of it."""

    per_pending_token: float = 0.0
    per_decode: float = 0.0
    per_token_over: float = 0.0
    per_answer: float = 0.0

    def seconds(self, pending_tokens: int, num_decodes: int, tokens_over: int, num_answers: int) -> float:
        return (
            self.per_pending_token * pending_tokens
            + self.per_decode * num_decodes
            + self.per_token_over * tokens_over
            + self.per_answer * num_answers
        )


class ClaimedWorker(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A worker of a claim's routes, and what it may have at most to take one more.

    That is in tokens of prompts to compute, and in tokens of KV that are promised; none promised is always few enough.
    """

    worker_id: WorkerId
    term: str
    capacity_tokens: int
    max_pending_tokens: float
    max_reserved_tokens: float


class ClaimedRoute(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A route between two workers of a claim, by their indices, or one worker twice.

    Its cost is `base_s` and what the counts of both add.
    """

    prefill: int
    decode: int
    uncached_tokens: int
    base_s: float
    prefill_cost: WorkerCost
    decode_cost: WorkerCost


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A request to place on the cheapest of some routes, by the store's counts.

    With `epoch` > 1 it is placed again: the former attempt's credits come back in the same step, also where `routes` is
    empty. `lease_ms`: unless its gateway renews within it, the request is reaped. `refusal`: what to count if nothing
    is taken. `num_blocks`: of the prompt, for a prefix's age; `prefix_tail`: where it ended.
    """

    request_id: RequestId
    epoch: Epoch
    gateway_id: GatewayId
    need_tokens: int
    lease_ms: int
    refusal: str = ""
    workers: list[ClaimedWorker] = []
    routes: list[ClaimedRoute] = []
    num_blocks: int = 0
    prefix_tail: str = ""
    prefix_kept_ms: int = 0


class MigrationClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A second place for an answer that is decoded: where it is to move, under a later epoch."""

    request_id: RequestId
    epoch: Epoch
    worker: ClaimedWorker
    need_tokens: int


class WorkerCounts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker's state as placement reckons with it.

    Tokens are the credits taken, and what it reports beyond. `term`: of its join; "0" once it is known to be dead.
    `num_served_blocks`: of prompts placed on it since it joined.
    """

    term: str
    alive_until_ms: int
    is_draining: bool
    pending_tokens: int
    reserved_tokens: int
    num_decodes: int
    num_answers: int
    num_served_blocks: int


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a claim.

    `route`: the one that was taken, by its index. `repeated`: that of the same claim before. Without either, none could
    be taken. `counts`: of the claim's workers, before it; None of one that is gone.
    """

    route: int | None = None
    counts: list[WorkerCounts | None] = []
    repeated: tuple[WorkerRef, WorkerRef] | None = None


class PoolRow(msgspec.Struct, frozen=True, gc=False):
    """A worker in a pool's update: None for what has not changed; `counts` None for one that is gone."""

    worker_id: WorkerId
    counts: WorkerCounts | None
    load: NodeLoad | None = None
    info: NodeInfo | None = None


class PoolUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the workers of a pool that changed, or (`is_full`) of all.

    `now_us`: the store's time when the read began, from which the next one follows.
    """

    now_us: int
    rows: list[PoolRow]
    is_full: bool


class StateTransition(msgspec.Struct, frozen=True):
    request_id: RequestId
    epoch: Epoch
    to: RequestState


class Reaped(msgspec.Struct, frozen=True):
    """A request whose lease ran out: it has FAILED and its credits are back."""

    request_id: RequestId
    epoch: Epoch
    gateway_id: GatewayId


class Lead(IntEnum):
    """The answer to a candidate: it leads not, since now, or still.

    `NEW` comes also of a leap of the store's clock, over which everybody fell silent.
    """

    NOT = 0
    NEW = 1
    STILL = 2


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker and the credits taken on it.

    `pending_tokens` of prompts to compute for `num_prefills` requests, and `reserved_tokens` of KV for `num_decodes`
    requests, of which `num_answers` have their prompts computed.
    """

    node: Node
    pending_tokens: int
    num_prefills: int
    reserved_tokens: int
    num_decodes: int
    num_answers: int


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts for metrics: live requests by state, the rest since Redis started.

    Placements were `placed`, `overloaded`, `unavailable` or `too_long`. Reports refused were `illegal`, `late`,
    `stale` (of an old epoch) or `unknown` (no such request).
    """

    states: dict[str, int] = {}
    ended: dict[str, int] = {}
    placed: int = 0
    overloaded: int = 0
    unavailable: int = 0
    too_long: int = 0
    illegal: int = 0
    late: int = 0
    stale: int = 0
    unknown: int = 0
    reaped: int = 0
    buried: int = 0
    role_changes: int = 0

    @property
    def requests(self) -> int:
        return sum(self.states.values())

    @property
    def refused(self) -> int:
        return self.overloaded + self.unavailable + self.too_long


def to_counts(states: Mapping[str, int], counters: Mapping[str, int]) -> Counts:
    """Return the counts, of requests by state and of the rest by name.

    Terminal states only ever grow. What another version counts is left out.
    """
    known = {state: states[state] for state in RequestState if states.get(state)}
    return Counts(
        states={state.value: count for state, count in known.items() if state not in ENDS},
        ended={state.value: count for state, count in known.items() if state in ENDS},
        **{name: count for name, count in counters.items() if name in Counts.__struct_fields__},
    )


class Store(Protocol):
    """The state that processes share. Each call may be repeated: the second time changes nothing.

    A call has a deadline of its own. Raises contracts.errors.Unavailable, in words, if Redis can't be reached. Safe for
    many callers at once.
    """

    async def join(self, info: NodeInfo, again: bool = False) -> bool:
        """Enter the registry in place of an older incarnation, and return whether that still lived.

        Its credits are gone at once. `again`: this one was in before, and does not take the place of one that lives.
        Raises Unavailable for one that is in again where another lives: that process has the id now.
        """
        ...

    async def heartbeat(self, worker_id: WorkerId, incarnation: Incarnation, load: NodeLoad) -> bool:
        """Return False if the worker is superseded, dead, or lost by Redis: it joins again."""
        ...

    async def restate(self, info: NodeInfo) -> None:
        """Take what a worker states anew: its role, its adapters. What is placed on it stays.

        Raises RequestError if no worker that takes work would compute prompts then, or none produce answers;
        Unavailable if this incarnation is not in the registry.
        """
        ...

    async def leave(self, worker_id: WorkerId, incarnation: Incarnation, is_dead: bool = False) -> None:
        """Leave the registry at once. An incarnation that is not the current one is ignored.

        `is_dead`: it is its end that tells of it, and is counted as `buried`, once.
        """
        ...

    async def nodes(self, at_most: int = 0) -> list[Node]:
        """Return the workers by id; the dead ones too, for a while, with `alive` false.

        None of a pool of more than `at_most`, where that is given.
        """
        ...

    async def workers(self) -> list[WorkerView]:
        """Return the nodes with their credits."""
        ...

    def pool(self, since_us: int, is_full: bool) -> AsyncGenerator[PoolUpdate, None]:
        """Yield what placement needs to know of the workers: of those that changed `since_us`, or of all.

        It comes in parts, one at least; a worker may come again in a later one. What a worker states once comes with
        those that joined since.
        """
        ...

    async def prefix_holders(self, hashes: Sequence[bytes], blocks: Sequence[bytes] = ()) -> list[bytes]:
        """Return the holders of each prefix, as coordinator.placement.prefixes writes them.

        Behind these come the tiers that hold each of `blocks`, by their keys: `TERM:TIER` of a worker's own, `*:store`
        of the one that workers share.
        """
        ...

    async def publish_held(self, worker_id: WorkerId, incarnation: Incarnation, changes: Sequence[HeldChange]) -> bool:
        """Note which prefixes the tiers of a worker hold, for HELD_KEPT_S, or hold no more.

        Returns False, and notes nothing, if the worker is superseded, dead, or lost by Redis.
        """
        ...

    async def claim(self, claim: Claim, prefixes: Sequence[tuple[bytes, bytes]] = ()) -> Claimed:
        """Take the cheapest route: its credits and the lease.

        The same request and epoch again give the same route. Its workers become the first holders of each of
        `prefixes`: hash, and the holders that stay behind them. Raises Unavailable if the request has ended or is past
        that epoch, or a worker of a repeated claim is gone.
        """
        ...

    async def claim_migration(self, claim: MigrationClaim) -> bool:
        """Take the credit of a migration's destination, and return whether it was taken, now or before.

        A former migration's goes back. False if that worker takes no more, or the request is not decoded at an earlier
        epoch.
        """
        ...

    async def end_migration(self, request_id: RequestId, epoch: Epoch, is_moved: bool) -> bool:
        """Return the credit of the source, if the answer has moved, or else of the destination.

        Returns whether there was such a migration. What has moved is at `epoch` from now on.
        """
        ...

    async def advance(self, moves: Sequence[StateTransition]) -> list[bool]:
        """Compare-and-set each on (state, epoch) by the table of `request_states`. Refused ones are counted."""
        ...

    async def finish(self, request_id: RequestId, epoch: Epoch, state: RequestState = RequestState.FINISHED) -> bool:
        """Return the credits of this epoch and earlier ones, and whether the request has ended, now or before.

        No claim of these epochs that comes later takes anything: it may be under way while its gateway has given up.
        False if the request is unknown, or at a later epoch.
        """
        ...

    async def renew(self, request_ids: Sequence[RequestId], lease_s: float) -> int:
        """Renew the leases of these, and return how many have one still.

        A gateway names what it has: the lease of a request whose end or whose placement's answer got lost then runs
        out.
        """
        ...

    async def reap(self, candidate: str) -> list[Reaped]:
        """End requests whose lease ran out, by the store's own clock, and take the credits of dead workers.

        What is placed again by its gateway, under a newer epoch, lives nevertheless. Nothing, unless `candidate` leads.
        """
        ...

    async def is_sound(self) -> bool:
        """Return whether the counts can be right: every live request has a lease, and none was lost."""
        ...

    async def recount(self) -> None:
        """Count anew what workers are credited with, from the requests that are there.

        One that has no lease gets one: it is reaped unless its gateway has it still.
        """
        ...

    async def lead(self, candidate: str, ttl_s: float) -> Lead:
        """Return whether `candidate` is leader now, for `ttl_s`; not while another one is."""
        ...

    async def resign(self, candidate: str) -> None:
        """Let another one lead at once."""
        ...

    async def counts(self) -> Counts: ...

    async def ping(self) -> None: ...

    async def close(self) -> None: ...
