"""The policy by which workers turn from prefill to decode and back: pure, `now` is an argument.

A worker turns when one side has been short for a while that the other can spare it. Prefill is short while prompts wait
for longer than the objective, decode while nearly all its KV is promised. The bounds of both sides lie apart, and a
change is followed by a pause, so that a worker does not turn to and fro.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.node import WorkerRole
from coordinator.store.store import WorkerView

HOLD_S = 10.0
"""How long a side has to be short: longer than a burst of prompts that its workers would get done anyway."""
PAUSE_S = 60.0
"""How long the roles stay after a change: what it brings shows in queues only when those of before are gone."""
FULL_SHARE, SPARE_SHARE = 0.9, 0.5
"""Shares of decode's KV that are promised: from the first on decode is short; up to the second, with one worker less,
it can spare that one."""
SPARE_WAIT = 0.5
"""The share of the objective that prompts may wait for, with one worker less, where prefill can spare that one."""


@dataclass(frozen=True)
class RoleChange:
    """A worker that is to turn, and the reason in words for the log."""

    worker: WorkerView
    role: WorkerRole
    reason: str


class RoleBalance:
    """The balance of one pool; `decide` is called about once a second with all its workers."""

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self._short: WorkerRole | None = None
        self._short_since_s = self._quiet_until_s = 0.0

    def decide(self, workers: Sequence[WorkerView], now: float) -> RoleChange | None:
        """Return the change that is due, or None.

        Mixed workers stay as they are. Nothing changes while a worker still ends requests of a former role: what it
        will bring is not seen yet.
        """
        alive = [w for w in workers if w.node.alive and not w.node.load.draining]
        found = None if any(w.node.load.num_of_former_role for w in alive) else self._find(alive)
        side = found.role if found is not None else None
        if side is not self._short:
            self._short, self._short_since_s = side, now
        is_due = now - self._short_since_s >= HOLD_S and now >= self._quiet_until_s
        return found if is_due else None

    def on_changed(self, now: float) -> None:
        """Leave the roles for a while, after a change that was made or that was refused."""
        self._short, self._quiet_until_s = None, now + PAUSE_S

    def _find(self, alive: Sequence[WorkerView]) -> RoleChange | None:
        """Return the change that would help a side that is short, if the other side can spare a worker."""
        prefills = [w for w in alive if w.node.info.role is WorkerRole.PREFILL]
        decodes = [w for w in alive if w.node.info.role is WorkerRole.DECODE]
        if not prefills or not decodes:
            return None
        wait_s, share = prompt_wait_s(prefills), promised_share(decodes)
        if wait_s > self._objective_s and len(decodes) > 1:
            worker = min(decodes, key=lambda w: (w.reserved_tokens, w.node.info.worker_id))
            others = [w for w in decodes if w is not worker]
            if promised_share(decodes, others) <= SPARE_SHARE:
                reason = f"prompts wait for {wait_s:.1f} s, {share:.0%} of decode's KV is promised"
                return RoleChange(worker, WorkerRole.PREFILL, reason)
        if share >= FULL_SHARE and len(prefills) > 1:
            worker = min(prefills, key=lambda w: (_pending(w), w.node.info.worker_id))
            others = [w for w in prefills if w is not worker]
            if prompt_wait_s(prefills, others) <= SPARE_WAIT * self._objective_s:
                reason = f"{share:.0%} of decode's KV is promised, prompts wait for {wait_s:.1f} s"
                return RoleChange(worker, WorkerRole.DECODE, reason)
        return None


def prompt_wait_s(workers: Sequence[WorkerView], by: Sequence[WorkerView] | None = None) -> float:
    """Return the seconds in which these, or those in `by`, compute their prompts; 0.0 while unknown."""
    rate = sum(w.node.load.prefill_rate for w in (workers if by is None else by))
    return sum(map(_pending, workers)) / rate if rate > 0 else 0.0


def promised_share(workers: Sequence[WorkerView], by: Sequence[WorkerView] | None = None) -> float:
    """Return the share of the KV of these, or of those in `by`, that their answers are promised."""
    capacity = sum(w.node.info.capacity_tokens for w in (workers if by is None else by))
    return sum(w.reserved_tokens for w in workers) / capacity if capacity else 1.0


def _pending(worker: WorkerView) -> int:
    """Return the tokens of prompts that wait there: placed, or already in its queue."""
    return max(worker.pending_tokens, worker.node.load.queue_tokens)
