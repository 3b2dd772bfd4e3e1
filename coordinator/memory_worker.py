"""A worker as the memory twin keeps it: what it said, the credits taken on it, the prefixes it has served."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from contracts.node import Node, NodeInfo, NodeLoad
from coordinator.placement import policy as placement
from coordinator.placement.policy import Candidate
from coordinator.store.store import AFFINITY_BLOCK, AFFINITY_TTL_S, WorkerView

PREFILL, DECODE = "prefill", "decode"
"""The sides of a route, and of its credits."""


@dataclass
class Worker:
    """One join of a worker, with the credits taken on it."""

    info: NodeInfo
    alive_until_s: float
    load: NodeLoad = field(default_factory=NodeLoad)
    died_s: float | None = None
    tokens: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    num_answers: int = 0
    beyond_pending: int = 0
    beyond_reserved: int = 0
    prefixes: dict[bytes, float] = field(default_factory=dict)

    def beat(self, load: NodeLoad, alive_until_s: float) -> None:
        used_tokens = self.info.capacity_tokens - load.free_tokens if placement.is_busy(load) else 0
        self.beyond_pending = max(0, load.queue_tokens - self.tokens[PREFILL])
        self.beyond_reserved = max(0, used_tokens - self.tokens[DECODE])
        self.load, self.alive_until_s = load, alive_until_s

    def die(self, now: float) -> None:
        self.died_s = now
        self.tokens.clear()
        self.requests.clear()
        self.num_answers = 0
        self.prefixes.clear()

    def takes_work(self, now: float) -> bool:
        return self.died_s is None and now < self.alive_until_s and not self.load.draining

    def cached_tokens(self, hashes: Sequence[bytes], num_tokens: int, now: float) -> int:
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            served_s = self.prefixes.get(hashes[middle - 1])
            if served_s is not None and served_s > now - AFFINITY_TTL_S:
                low = middle
            else:
                high = middle - 1
        return min(low * AFFINITY_BLOCK, num_tokens - 1)

    def remember(self, hashes: Sequence[bytes], now: float) -> None:
        for prefix in hashes:
            self.prefixes.pop(prefix, None)
            self.prefixes[prefix] = now
        too_many = len(self.prefixes) - placement.max_prefixes(self.info.capacity_tokens)
        for prefix in list(islice(self.prefixes, max(0, too_many))):
            del self.prefixes[prefix]

    def candidate(self, hashes: Sequence[bytes], num_tokens: int, now: float) -> Candidate:
        info, load = self.info, self.load
        return Candidate(
            worker_id=info.worker_id,
            incarnation=info.incarnation,
            role=info.role,
            layout_id=info.layout_id,
            send_words=frozenset(info.send_words),
            receive_words=frozenset(info.receive_words),
            max_model_len=info.max_model_len,
            capacity_tokens=info.capacity_tokens,
            prompt_tokens_per_mixed_step=load.prompt_tokens_per_mixed_step,
            pending_tokens=self.tokens[PREFILL] + self.beyond_pending,
            reserved_tokens=self.tokens[DECODE] + self.beyond_reserved,
            num_decodes=self.requests[DECODE],
            num_answers=self.num_answers,
            cached_tokens=self.cached_tokens(hashes, num_tokens, now),
            prefill_rate=placement.sound_rate(load.prefill_rate),
            decode_rate=placement.sound_rate(load.decode_rate),
            transfer_rate=placement.sound_rate(load.transfer_rate),
            bad_paths=frozenset(load.bad_paths),
        )

    def view(self, now: float) -> WorkerView:
        is_alive = self.died_s is None and now < self.alive_until_s
        return WorkerView(
            node=Node(info=self.info, load=self.load, alive=is_alive),
            pending_tokens=self.tokens[PREFILL],
            num_prefills=self.requests[PREFILL],
            reserved_tokens=self.tokens[DECODE],
            num_decodes=self.requests[DECODE],
            num_answers=self.num_answers,
        )
