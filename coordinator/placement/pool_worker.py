"""One join of a worker, as a view of the pool keeps it."""

import math
from collections.abc import Mapping

from msgspec.structs import replace

from contracts.node import Node, NodeInfo, NodeLoad, WorkerRole
from coordinator.placement.candidate import Candidate, prefill_rate, sound_rate, to_candidate
from coordinator.placement.policy import decode_load_s, prefill_load_s
from coordinator.placement.prefixes import KVForm
from coordinator.store.store import WorkerCounts

RATE_STEPS = 3
"""Workers are of one speed whose rates are within a 2 ** (1 / RATE_STEPS): in the order of their queues, whatever the
length of the prompt."""

Kind = tuple[str, WorkerRole, int]


class PoolWorker:
    """One join of a worker.

    `candidate`: as placement sees it, made when it is first looked at, since most are counted again before that.
    `places`: its load in each of the orders that it is in, and `placed_rate` its speed there. `num_read`: the read that
    brought it last. `form`: of the KV in its tiers, None without any.
    """

    def __init__(self, info: NodeInfo, counts: WorkerCounts) -> None:
        self.info, self.worker_id, self.term = info, info.worker_id, counts.term
        self.send_words, self.receive_words = frozenset(info.send_words), frozenset(info.receive_words)
        self.places: Mapping[Kind, float] = {}
        self.placed_rate, self.num_read = 0.0, 0
        self._node: Node | None = None
        self.count(counts, 0.0)
        self.state(NodeLoad())

    def node(self, now_ms: int) -> Node:
        """Return it as the pool's readers see it, made anew only where that is another than before."""
        node, is_alive = self._node, self.is_alive(now_ms)
        if node is None or node.info is not self.info or node.load is not self.load or node.alive != is_alive:
            node = self._node = Node(info=self.info, load=self.load, alive=is_alive)
        return node

    def is_alive(self, now_ms: int) -> bool:
        return self.counts.term != "0" and now_ms < self.counts.alive_until_ms

    def state(self, load: NodeLoad) -> None:
        self.load, self.prefill_rate = load, sound_rate(load.prefill_rate)
        self.form = _form_of(self.info) if load.tiers else None
        speed = round(RATE_STEPS * math.log2(self.prefill_rate)) if self.prefill_rate else 0
        self._prefill_kind, self._decode_kind = ("prefill", self.info.role, speed), ("decode", self.info.role, 0)
        self._stated = self._candidate = None

    def count(self, counts: WorkerCounts, counted_ms: float) -> None:
        self.counts, self.counted_ms = counts, counted_ms
        self._candidate = None

    @property
    def candidate(self) -> Candidate:
        if self._candidate is None:
            if self._stated is None:
                self._stated = to_candidate(self.info, self.load, self.send_words, self.receive_words)
            self._candidate = replace(
                self._stated,
                term=self.term,
                pending_tokens=self.counts.pending_tokens,
                reserved_tokens=self.counts.reserved_tokens,
                num_decodes=self.counts.num_decodes,
                num_answers=self.counts.num_answers,
            )
        return self._candidate

    def prefill_load_s(self, fastest_rate: float) -> float:
        return prefill_load_s(self.info.role, self.counts, prefill_rate(self.prefill_rate, fastest_rate))

    def decode_load_s(self) -> float:
        return decode_load_s(self.counts, self.info.capacity_tokens, sound_rate(self.load.decode_rate))

    def loads_s(self, fastest_rate: float) -> dict[Kind, float]:
        """Return its place in the order of each side that it serves.

        A prompt's is the time at which the queue ends, not how long it is: so the order holds while all queues get
        shorter.
        """
        found: dict[Kind, float] = {}
        if self.info.role is not WorkerRole.DECODE:
            load_s = self.prefill_load_s(fastest_rate)
            found[self._prefill_kind] = load_s and self.counted_ms / 1000 + load_s
        if self.info.role is not WorkerRole.PREFILL:
            found[self._decode_kind] = self.decode_load_s()
        return found


def _form_of(info: NodeInfo) -> KVForm | None:
    return KVForm(info.layout.shared_id, info.layout.block_size) if info.layout is not None else None
