"""The status of the core for its front: load for placement, counters for metrics, turns for health."""

from bisect import bisect_left
from collections.abc import Sequence

from contracts.ids import WorkerId
from contracts.node import STEP_TOKENS, NodeLoad
from engine.engine import Engine
from engine.messages import EngineStats
from kv_transfer.events import LinkStats
from kv_transfer.node import TransferNode
from process.garbage_collector import COLLECTIONS
from worker.core.attempt_table import AttemptTable
from worker.core.kv_tiers import KVTiers
from worker.core.role_handler import RoleHandler
from worker.messages import CoreStatus, LevelStatus, LinkStatus

STATUS_PERIOD_S = 0.1
RATE_WINDOW_S = 2.0
FULL_TOKENS = 256
"""The prompt tokens from which on a step runs at about full speed; half of what fits next to the answers, if that is
less.
"""
SUDDEN = 4.0
"""How many times slower a step must be than those before to be taken for one in which the process was stopped."""


class Rate:
    """The work per busy second; 0.0 while unknown.

    It is an exponential mean over about `RATE_WINDOW_S` of busy time. A sudden fall counts from its second step on: a
    worker that was stopped for a minute would seem to take a minute for a step, get no more work for that reason, and
    so never show that it is fast again.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._was_sudden = False

    def add(self, amount: int, span_s: float, least: int = 1) -> None:
        """Count a step, unless its work is less than `least`.

        Such a step shows how little there was to do, not how fast this worker is.
        """
        if amount >= max(least, 1) and span_s > 0:
            was_sudden, self._was_sudden = self._was_sudden, amount / span_s * SUDDEN < self.value
            if self._was_sudden and not was_sudden:
                return
            weight = min(1.0, span_s / RATE_WINDOW_S) if self.value else 1.0
            self.value += weight * (amount / span_s - self.value)


class StatusReporter:
    """The counter of turns and steps, which makes a CoreStatus when one is due."""

    def __init__(
        self, me: WorkerId, engine: Engine, node: TransferNode, attempts: AttemptTable, roles: Sequence[RoleHandler]
    ) -> None:
        self._me = me
        self._engine = engine
        self._node = node
        self._attempts = attempts
        self._roles = roles
        self._num_turns = 0
        self._num_steps = 0
        self._num_step_tokens = 0
        self._steps = [0] * (len(STEP_TOKENS) + 1)
        self._due_s = 0.0
        self._checked: EngineStats | None = None
        self.tiers: KVTiers | None = None
        self._prefill = Rate()
        self._decode = Rate()
        self._first_rate = 0.0

    def stepped(self, num_prefill_tokens: int, num_decode_tokens: int, span_s: float) -> None:
        """Account one engine step.

        A mixed step counts for both rates with its whole span: that is what a new request would see.
        """
        self._num_steps += 1
        num_tokens = num_prefill_tokens + num_decode_tokens
        self._num_step_tokens += num_tokens
        self._steps[bisect_left(STEP_TOKENS, num_tokens)] += 1
        most = self._engine.prompt_tokens_beside(num_decode_tokens)
        self._prefill.add(num_prefill_tokens, span_s, min(FULL_TOKENS, most // 2))
        self._decode.add(num_decode_tokens, span_s)

    def start_at(self, tokens_per_s: float) -> None:
        """Take what was measured at the start for the rate of prompts until a step is full."""
        self._first_rate = tokens_per_s

    @property
    def prefill_rate(self) -> float:
        """Return the tokens of prompts that are computed per second; 0.0 while unknown."""
        return self._prefill.value or self._first_rate

    def due(self, now: float) -> CoreStatus | None:
        self._num_turns += 1
        if now < self._due_s:
            return None
        self._due_s = now + STATUS_PERIOD_S
        return self.report()

    def report(self) -> CoreStatus:
        stats = self._engine.stats()
        load = self._load(stats)
        counters = {name: value for role in self._roles for name, value in role.counters().items()}
        return CoreStatus(
            num_turns=self._num_turns,
            num_steps=self._num_steps,
            load=load,
            counters=counters | _engine_counters(stats) | self._own_counters() | self._tier_counters(),
            gauges=_engine_gauges(stats)
            | self._own_gauges()
            | {"bad_paths": len(load.bad_paths)}
            | self._tier_gauges(),
            links=[_link_status(stats) for stats in self._node.stats()],
            is_clean=self._is_clean(stats),
            broken=self._node.broken,
        )

    def _tier_counters(self) -> dict[str, float]:
        return {} if self.tiers is None else self.tiers.counters()

    def _tier_gauges(self) -> dict[str, float]:
        return {} if self.tiers is None else self.tiers.gauges()

    def _own_counters(self) -> dict[str, float]:
        return {
            "stale_messages": self._attempts.num_stale,
            "collections": COLLECTIONS.num,
            "collection_seconds": COLLECTIONS.seconds,
        }

    def _own_gauges(self) -> dict[str, float]:
        routes = [attempt.job.route for attempt in self._attempts if not attempt.job.route.is_local]
        return {
            "requests": len(self._attempts),
            "requests_as_prefill": sum(route.prefill.worker_id == self._me for route in routes),
            "requests_as_decode": sum(route.decode.worker_id == self._me for route in routes),
            "capacity_tokens": self._engine.capacity_tokens,
            **self._engine.groups.usage(),
            "longest_collection_seconds": COLLECTIONS.longest_s,
        }

    def _load(self, stats: EngineStats) -> NodeLoad:
        return NodeLoad(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            queue_tokens=stats.queue_tokens,
            free_tokens=stats.free_tokens,
            prompt_tokens_per_mixed_step=stats.prompt_tokens_per_mixed_step,
            bounds_gaps=self._engine.bounds_gaps,
            prefill_rate=self._prefill.value,
            decode_rate=self._decode.value,
            transfer_rate=self._transfer_rate(),
            bad_paths=self._node.bad_paths,
            num_preemptions=stats.num_preemptions,
            num_step_tokens=self._num_step_tokens,
            steps=tuple(self._steps),
            tiers=() if self.tiers is None else self.tiers.speeds(),
        )

    def _transfer_rate(self) -> float:
        """Return tokens per second, the unit of placement; the node measures bytes."""
        layout = self._engine.layout
        return self._node.transfer_rate * layout.block_size / layout.block_nbytes

    def _is_clean(self, stats: EngineStats) -> bool:
        """Return whether the core is idle and every page is free or cached.

        Raises AssertionError if the block accounts contradict each other.
        """
        if self._engine.has_work() or len(self._attempts) or not all(role.is_idle() for role in self._roles):
            return False
        if stats != self._checked:  # a walk over all blocks, so only after a change
            self._engine.check()
            self._checked = stats
        return stats.free_tokens == self._engine.capacity_tokens


def _engine_counters(stats: EngineStats) -> dict[str, float]:
    accepted = {f"accepted_tokens_{place}": float(count) for place, count in enumerate(stats.num_accepted_by_place)}
    return accepted | {
        "prefill_tokens": stats.num_prefill_tokens,
        "decode_tokens": stats.num_decode_tokens,
        "prefix_query_tokens": stats.prefix_query_tokens,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "preemptions": stats.num_preemptions,
        "drafts": stats.num_drafts,
        "draft_tokens": stats.num_draft_tokens,
    }


def _engine_gauges(stats: EngineStats) -> dict[str, float]:
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "queue_tokens": stats.queue_tokens,
        "free_tokens": stats.free_tokens,
        "cached_blocks": stats.num_cached_blocks,
        "held": stats.num_held,
        "reserved": stats.num_reserved,
    }


def _link_status(stats: LinkStats) -> LinkStatus:
    return LinkStatus(
        peer=stats.peer_id,
        outgoing=stats.outgoing,
        transport=stats.transport,
        detail=stats.detail,
        state=stats.state,
        nbytes_per_s=stats.nbytes_per_s,
        counters={
            "nbytes": stats.nbytes,
            "chunks": stats.num_chunks,
            "busy_seconds": stats.busy_s,
            "bad_chunks": stats.num_bad,
            "stale_chunks": stats.num_stale,
        },
        levels={
            name: LevelStatus(level.nbytes, level.wire_nbytes, level.seconds) for name, level in stats.levels.items()
        },
    )
