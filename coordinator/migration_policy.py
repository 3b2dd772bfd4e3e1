"""The policy of which workers' running answers move elsewhere, and why: pure, `now` is an argument.

Three reasons: a worker drains; its free KV lasts for seconds only, and answers would be preempted; it has far more
answers than another. Where answers may go to and where they leave lie apart, and a move is followed by a pause in which
its effect shows in what workers report, so that no answer moves to and fro.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from contracts.ids import WorkerId
from contracts.node import Node, WorkerRole
from coordinator.placement.candidate import sound_rate
from coordinator.placement.policy import is_busy, is_idle

SHORT_S = 5.0
"""Free KV that running answers fill within this time is short: a worker's report is up to 1.5 s old, and a move lasts
some tenths of a second."""
SHORT_SHARE = 0.125
"""The most of a pool's KV that is kept free by moves. A small pool of a fast worker would never be filled else."""
MEMORY_PAUSE_S = 2.5
"""How long a worker whose answers were moved for memory is left, until its own report shows it."""
MIN_DIFFERENCE, MIN_RATIO = 8, 2.0
"""How many answers more than another, and how many times as many, a worker has that is far above it."""
HOLD_S, BALANCE_PAUSE_S = 5.0, 10.0
"""How long it has to be so, and for how long nothing is evened after a move."""


class MigrationReason(StrEnum):
    """Why answers move."""

    DRAIN = "drain"
    MEMORY = "memory"
    BALANCE = "balance"


DEFAULT_REASONS = (MigrationReason.DRAIN, MigrationReason.MEMORY)
"""Those that replace something worse: waiting for the end, and computing again."""


@dataclass(frozen=True)
class MigrationOrder:
    """Answers that are to leave a worker.

    `share`: of its answers; each of several gateways moves this part of its own. `exclude`: workers that are no
    destination.
    """

    source: WorkerId
    reason: MigrationReason
    share: float
    exclude: frozenset[WorkerId]


class MigrationPlanner(Protocol):
    """Decides what moves; the gateway asks it ten times a second."""

    def decide(self, nodes: Sequence[Node], now: float) -> list[MigrationOrder]:
        """Return what is to move now. `nodes`: the live workers of the pool; `now`: monotonic seconds."""
        ...


class MigrationPolicy:
    """The policy for the given reasons."""

    def __init__(self, reasons: Collection[MigrationReason]) -> None:
        self._reasons = frozenset(reasons)
        self._quiet_until_s: dict[WorkerId, float] = {}
        self._above: WorkerId | None = None
        self._above_since_s = self._even_after_s = 0.0

    def decide(self, nodes: Sequence[Node], now: float) -> list[MigrationOrder]:
        """Return what is to move now."""
        answering = [node for node in nodes if node.info.role is not WorkerRole.PREFILL]
        draining = [node.info.worker_id for node in answering if node.load.draining]
        staying = [node for node in answering if not node.load.draining]
        orders: list[MigrationOrder] = []
        if MigrationReason.DRAIN in self._reasons:
            every = frozenset(draining)
            orders += [MigrationOrder(name, MigrationReason.DRAIN, 1.0, every) for name in draining]
        if MigrationReason.MEMORY in self._reasons:
            orders += self._for_memory(staying, draining, now)
        if MigrationReason.BALANCE in self._reasons and not orders:
            orders += self._for_balance(staying, draining, now)
        return orders

    def _for_memory(self, nodes: Sequence[Node], draining: list[WorkerId], now: float) -> list[MigrationOrder]:
        self._quiet_until_s = {name: until_s for name, until_s in self._quiet_until_s.items() if until_s > now}
        room = {node.info.worker_id: _spare_tokens(node) for node in nodes}
        orders: list[MigrationOrder] = []
        for node in nodes:
            name = node.info.worker_id
            if name in self._quiet_until_s or not is_short(node):
                continue
            if (order := _relief(node, room, draining)) is not None:
                self._quiet_until_s[name] = now + MEMORY_PAUSE_S
                orders.append(order)
        return orders

    def _for_balance(self, nodes: Sequence[Node], draining: list[WorkerId], now: float) -> list[MigrationOrder]:
        counts = {node.info.worker_id: _num_answers(node) for node in nodes}
        above = _far_above(counts)
        if above != self._above:
            self._above, self._above_since_s = above, now
        if above is None or now - self._above_since_s < HOLD_S or now < self._even_after_s:
            return []
        mean = sum(counts.values()) / len(counts)
        below = [name for name, number in counts.items() if number < mean]
        num_moved = math.floor(min(counts[above] - mean, sum(mean - counts[name] for name in below)))
        self._above, self._even_after_s = None, now + BALANCE_PAUSE_S
        exclude = frozenset([*draining, *(name for name in counts if name not in below)])
        return [MigrationOrder(above, MigrationReason.BALANCE, num_moved / counts[above], exclude)]


def is_short(node: Node) -> bool:
    """Return whether a worker of several answers is about to have no page for one of them."""
    return is_busy(node.load) and node.load.num_running > 1 and node.load.free_tokens < short_tokens(node)


def short_tokens(node: Node) -> float:
    """Return the tokens of free KV below which a worker is short."""
    fills = SHORT_S * sound_rate(node.load.decode_rate)
    return min(fills, SHORT_SHARE * node.info.capacity_tokens)


def _relief(node: Node, room: dict[WorkerId, float], draining: list[WorkerId]) -> MigrationOrder | None:
    """Return how many answers leave, at most half, and take the room for them; None if there is none."""
    num_running, free_tokens = node.load.num_running, node.load.free_tokens
    mean_tokens = max(1.0, (node.info.capacity_tokens - free_tokens) / num_running)
    fits = {name: math.floor(spare / mean_tokens) for name, spare in room.items() if name != node.info.worker_id}
    num_wanted = math.ceil((2 * short_tokens(node) - free_tokens) / mean_tokens)
    num_moved = min(num_wanted, num_running // 2, sum(number for number in fits.values() if number > 0))
    if num_moved <= 0:
        return None
    num_left = num_moved
    for name in sorted(fits, key=lambda name: (-fits[name], name)):
        taken = min(max(fits[name], 0), num_left)
        room[name] -= taken * mean_tokens
        num_left -= taken
    exclude = frozenset([*draining, node.info.worker_id, *(name for name, number in fits.items() if number <= 0)])
    return MigrationOrder(node.info.worker_id, MigrationReason.MEMORY, num_moved / num_running, exclude)


def _spare_tokens(node: Node) -> float:
    """Return the tokens of KV that a worker can take, and be twice as far from short as where it would be."""
    load, capacity = node.load, node.info.capacity_tokens
    if load.num_waiting:
        return 0.0  # who waits there is served first
    free = capacity if is_idle(load) else load.free_tokens if is_busy(load) else 0
    return free - max(2 * short_tokens(node), 2 * SHORT_SHARE * capacity)


def _num_answers(node: Node) -> int:
    return node.load.num_running + node.load.num_waiting


def _far_above(counts: Mapping[WorkerId, int]) -> WorkerId | None:
    """Return the worker with the most answers, if that is far above the one with the fewest."""
    if len(counts) < 2:
        return None
    most = max(counts, key=lambda name: (counts[name], name))
    fewest = min(counts.values())
    is_far = counts[most] >= fewest + MIN_DIFFERENCE and counts[most] >= MIN_RATIO * fewest
    return most if is_far else None
