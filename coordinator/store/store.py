"""The coordinator's state as gateways, workers and the service see it: in Redis, or in a twin in memory."""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Protocol

import msgspec

from contracts.ids import Epoch, GatewayId, Incarnation, RequestId, WorkerId
from contracts.node import Node, NodeInfo, NodeLoad
from contracts.request import Route
from coordinator.request_states import ENDS, RequestState

ALIVE_S = 3.0
"""A worker that has not beaten for so long is dead; it beats each second."""
STALE_RECORD_KEPT_S = 60.0
"""How long a dead worker is listed, for people who look."""
ENDED_KEPT_S = 60.0
"""How long an ended request is remembered, so that what workers tell of it late is known to be late."""

AFFINITY_BLOCK = 64
"""Tokens in a block of the prefix hashes that placement remembers."""
AFFINITY_BLOCKS = 128
"""At most so many hashes of a prompt count: enough to tell conversations apart, little enough for one round trip."""
AFFINITY_TTL_S = 600.0


class PlaceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to place, or (`epoch` > 1) to place again: the former attempt's credits come back in the same step.

    `prefix_hashes`: contracts.hashing.chain_hashes over blocks of AFFINITY_BLOCK, deepest last, at most
    AFFINITY_BLOCKS. `lease_s`: unless its gateway renews within it, the request is reaped. `exclude`: who refused.
    """

    request_id: RequestId
    epoch: Epoch = Epoch(1)
    gateway_id: GatewayId
    num_tokens: int
    max_tokens: int
    lease_s: float
    prefix_hashes: list[bytes] = []
    exclude: tuple[WorkerId, ...] = ()


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
    """Who leads. `NEW`: since now; perhaps only by a leap of the store's clock, over which everybody fell silent."""

    NOT = 0
    NEW = 1
    STILL = 2


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker and the credits taken on it: `pending_tokens` of prompts to compute for `num_prefills` requests, and
    `reserved_tokens` of KV for `num_decodes` requests, of which `num_answers` have their prompts computed.
    """

    node: Node
    pending_tokens: int
    num_prefills: int
    reserved_tokens: int
    num_decodes: int
    num_answers: int


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """For metrics. `states`: live requests now. The rest since Redis started; `ended` by state.

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

    @property
    def requests(self) -> int:
        return sum(self.states.values())

    @property
    def refused(self) -> int:
        return self.overloaded + self.unavailable + self.too_long


def to_counts(states: Mapping[str, int], counters: Mapping[str, int]) -> Counts:
    """`states`: requests by state; the terminal ones only ever grow. What another release counts, too, is left out."""
    known = {state: states[state] for state in RequestState if states.get(state)}
    return Counts(
        states={state.value: count for state, count in known.items() if state not in ENDS},
        ended={state.value: count for state, count in known.items() if state in ENDS},
        **{name: count for name, count in counters.items() if name in Counts.__struct_fields__},
    )


class Store(Protocol):
    """Each call is one round trip with a deadline of its own, and may be repeated: the second time changes nothing.

    Raises contracts.errors.Unavailable, in words, if Redis can't be reached. Safe for many callers at once.
    """

    async def join(self, info: NodeInfo, again: bool = False) -> bool:
        """A new incarnation supersedes the old one of the same worker id: its credits are gone at once. Returns whether
        that one still lived, by its last heartbeat. `again`: it was in before, and does not do so to one that lives.

        Raises Unavailable for one that is in again where another lives: that process has the id now.
        """
        ...

    async def heartbeat(self, worker_id: WorkerId, incarnation: Incarnation, load: NodeLoad) -> bool:
        """False: superseded, declared dead, or unknown because Redis lost it. Join again."""
        ...

    async def leave(self, worker_id: WorkerId, incarnation: Incarnation, is_dead: bool = False) -> None:
        """Out of the registry at once. An incarnation that is not the current one is ignored. `is_dead`: it is its end
        that tells of it, and is counted as `buried`, once.
        """
        ...

    async def nodes(self) -> list[Node]:
        """By worker id; the dead ones too, for a while, with `alive` false."""
        ...

    async def workers(self) -> list[WorkerView]:
        """The nodes with their credits."""
        ...

    async def place(self, request: PlaceRequest) -> Route:
        """Choose by the placement policy; take the credits and the lease. The same call again gives the same route.

        Raises Overloaded (no credit now), Unavailable (no live prefill or decode worker; or the request has ended or
        is past that epoch), RequestError (no worker could ever hold it).
        """
        ...

    async def advance(self, moves: Sequence[StateTransition]) -> list[bool]:
        """Compare-and-set each on (state, epoch) by the table of `request_states`. Refused ones are counted."""
        ...

    async def finish(self, request_id: RequestId, epoch: Epoch, state: RequestState = RequestState.FINISHED) -> bool:
        """Return the credits. True if the request has ended at this epoch, now or before; False if unknown or stale."""
        ...

    async def renew(self, request_ids: Sequence[RequestId], lease_s: float) -> int:
        """Renew the leases of these; how many have one still. A gateway names what it has: the lease of a request
        whose end or whose placement's answer got lost then runs out.
        """
        ...

    async def reap(self, candidate: str) -> list[Reaped]:
        """End requests whose lease ran out, take the credits of dead workers. By the store's own clock. What is placed
        again by its gateway, under a newer epoch, lives nevertheless. Nothing, unless `candidate` leads.
        """
        ...

    async def lead(self, candidate: str, ttl_s: float) -> Lead:
        """Whether `candidate` is leader now, for `ttl_s`. Not while another one is."""
        ...

    async def resign(self, candidate: str) -> None:
        """Let another one lead at once."""
        ...

    async def counts(self) -> Counts: ...

    async def ping(self) -> None: ...

    async def close(self) -> None: ...
