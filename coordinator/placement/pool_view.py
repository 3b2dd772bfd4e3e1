"""A gateway's view of the pool: what each worker stated and counted when it was last read.

Queues of prompts are taken to get shorter at their workers' own pace in between. Nothing here asks or waits; times are
the store's own, as its updates bring them.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from heapq import nsmallest
from itertools import islice

from msgspec.structs import replace

from contracts.ids import WorkerId
from contracts.node import Node, NodeInfo, NodeLoad, WorkerRole
from contracts.request import WorkerRef
from coordinator.placement.policy import (
    Candidate,
    RouteOffer,
    decode_load_s,
    prefill_load_s,
    prefill_rate,
    sound_rate,
    to_candidate,
)
from coordinator.placement.prefixes import BLOCK_TOKENS, Holder, is_cached
from coordinator.store.store import PoolRow, PoolUpdate, WorkerCounts

SHORTLIST = 16
"""Workers a side that a choice looks at, beside those that hold the prompt's prefix."""
MIN_OF_KIND = 4
"""Workers of each kind, role and speed, that are looked at, however many kinds there are."""
RATE_STEPS = 3
"""Workers are of one speed whose rates are within a 2 ** (1 / RATE_STEPS): in the order of their queues, whatever the
length of the prompt."""
NUM_PARTNERS = 4
"""For each set of ways to exchange KV that none of the least loaded shares."""

Kind = tuple[str, WorkerRole, int]


class PoolView:
    """The workers of a pool that were read last, with this gateway's own claims since."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, _Worker] = {}
        self._by_term: dict[str, _Worker] = {}
        self._orders: defaultdict[Kind, _LoadOrder] = defaultdict(_LoadOrder)
        self._sources, self._takers = _WordIndex(), _WordIndex()
        self._now_ms = self._num_reads = 0
        self.fastest_rate, self._has_fastest_changed = 0.0, False

    @property
    def nodes(self) -> list[Node]:
        """All workers that were read, by id, dead ones too."""
        workers = sorted(self._workers.items(), key=lambda item: item[0])
        return [w.node(self._now_ms) for _, w in workers]

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def refs(self, offers: Iterable[RouteOffer]) -> dict[WorkerId, WorkerRef]:
        """Return where the workers of these are reached."""
        worker_ids = {c.worker_id for offer in offers for c in (offer.prefill, offer.decode)}
        return {worker_id: self._workers[worker_id].info.ref for worker_id in worker_ids}

    def destinations(
        self, source_id: WorkerId, num_tokens: int, exclude: Collection[WorkerId]
    ) -> list[tuple[Candidate, WorkerRef]]:
        """Return the workers to which an answer may move from `source_id`, the least loaded first.

        They take prompts of `num_tokens` and the KV of the source.
        """
        source = self._workers.get(source_id)
        if source is None:
            return []
        others = [name for name in self._takers.meeting(source.send_words) if name != source_id]
        fit = [w for w in self._fitting(others, num_tokens, exclude) if w.info.role is not WorkerRole.PREFILL]
        return [(w.candidate, w.info.ref) for w in sorted(fit, key=lambda w: (w.decode_load_s(), w.worker_id))]

    def begin_read(self) -> None:
        """Note that a read of the store begins, which `apply` brings and `end_read` ends."""
        self._num_reads += 1

    def apply(self, part: PoolUpdate) -> bool:
        """Take in what was read, and return whether all was known: else the whole pool is to be read anew."""
        self._now_ms = part.now_us // 1000
        return all([self._apply(row) for row in part.rows]) or part.is_full

    def end_read(self, is_full: bool) -> None:
        """Drop those that a read of all workers did not bring."""
        if is_full:
            for worker_id in [name for name, w in self._workers.items() if w.num_read != self._num_reads]:
                self._remove(worker_id)
        if self._has_fastest_changed:
            rates = (w.prefill_rate for w in self._workers.values() if w.places)
            self.fastest_rate, self._has_fastest_changed = max(rates, default=0.0), False

    def update_counts(self, worker_id: WorkerId, counts: WorkerCounts | None, now_ms: float) -> None:
        """Take in fresh counts of one worker, as a claim brings them."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        if counts is None or counts.term != worker.counts.term:
            self._remove(worker_id)  # until the next update brings who it is now
        else:
            worker.count(counts, now_ms)
            self._order(worker)

    def take(self, offer: RouteOffer, need_tokens: int, num_blocks: int) -> None:
        """Count a claim of our own that was taken."""
        self._add(offer.prefill.worker_id, num_blocks, pending_tokens=offer.uncached_tokens)
        is_local = offer.prefill.worker_id == offer.decode.worker_id
        self._add(offer.decode.worker_id, 0 if is_local else num_blocks, reserved_tokens=need_tokens, num_decodes=1)

    def shortlist(
        self,
        num_tokens: int,
        exclude: Collection[WorkerId],
        holders: Mapping[str, Holder],
        now_ms: float,
        salt: int = 0,
    ) -> list[Candidate]:
        """Return the workers that a choice for a prompt looks at, by id.

        They are the least loaded of each kind, and `holders` of the prompt's prefix, by term. `salt`: of whom among
        many that wait for work, so that gateways which see the same do not look at the same.
        """
        found: dict[WorkerId, Candidate] = {}
        for side in ("prefill", "decode"):
            found |= {c.worker_id: c for c in self._least_loaded(side, num_tokens, exclude, now_ms, salt)}
        for partner in self._partners(list(found.values()), num_tokens, exclude):
            found.setdefault(partner.worker_id, partner)
        for worker, holder in self._holding(holders):
            if self._takes_work(worker) and worker.worker_id not in exclude:
                cached = min(holder.depth * BLOCK_TOKENS, num_tokens - 1)
                found[worker.worker_id] = replace(worker.candidate, cached_tokens=cached)
        return [self._as_of(found[worker_id], now_ms) for worker_id in sorted(found)]

    def source(self, prefill: Candidate, holders: Mapping[str, Holder]) -> WorkerRef | None:
        """Return the worker that seems to hold the most of a prompt beyond what `prefill` holds.

        None if none does. Of equal depth it is who may have decoded the answer behind. One that drains still gives.
        """
        best, most = None, (prefill.cached_tokens // BLOCK_TOKENS, False)
        for worker, holder in self._holding(holders):
            has_answer = holder.is_continued and worker.info.role is not WorkerRole.PREFILL
            if worker.worker_id == prefill.worker_id or worker.info.layout_id != prefill.layout_id:
                continue
            if (holder.depth, has_answer) > most and worker.is_alive(self._now_ms):
                best, most = worker.info.ref, (holder.depth, has_answer)
        return best

    def _holding(self, holders: Mapping[str, Holder]) -> Iterator[tuple["_Worker", Holder]]:
        """Yield the workers in whose caches the prefixes that they served still are, as far as can be known."""
        for term, holder in holders.items():
            worker = self._by_term.get(term)
            if worker is None:
                continue
            if is_cached(holder.served_blocks, worker.counts.num_served_blocks, worker.info.capacity_tokens):
                yield worker, holder

    def _as_of(self, candidate: Candidate, now_ms: float) -> Candidate:
        """Return a worker without the prompts that it has computed since it was counted, at its own pace."""
        if not candidate.pending_tokens:
            return candidate
        age_ms = now_ms - self._workers[candidate.worker_id].counted_ms
        computed = int(max(0.0, age_ms) / 1000 * prefill_rate(candidate.prefill_rate, self.fastest_rate))
        return replace(candidate, pending_tokens=max(0, candidate.pending_tokens - computed)) if computed else candidate

    def _apply(self, row: PoolRow) -> bool:
        worker = self._workers.get(row.worker_id)
        is_dead = row.counts is not None and row.counts.term == "0"
        is_another = worker is not None and row.counts is not None and worker.counts.term != row.counts.term
        has_turned = worker is not None and row.info is not None and worker.info.role != row.info.role
        if row.counts is None or (is_another and not is_dead) or has_turned:
            self._remove(row.worker_id)
            worker = None
        if row.counts is None:
            return True
        if worker is None:
            if row.info is None:
                return False
            worker = self._workers[row.worker_id] = _Worker(row.info, row.counts)
            self._by_term[row.counts.term] = worker
            self._sources.add(worker.send_words, row.worker_id)
            self._takers.add(worker.receive_words, row.worker_id)
        worker.num_read = self._num_reads
        worker.count(row.counts, self._now_ms)
        if row.load is not None and row.load != worker.load:
            worker.state(row.load)
        self._order(worker)
        return True

    def _remove(self, worker_id: WorkerId) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        self._place(worker, {})
        self._by_term.pop(worker.term, None)
        self._sources.discard(worker.send_words, worker_id)
        self._takers.discard(worker.receive_words, worker_id)

    def _add(self, worker_id: WorkerId, num_blocks: int, **counts: int) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            more = {name: getattr(worker.counts, name) + count for name, count in counts.items()}
            served = worker.counts.num_served_blocks + num_blocks
            worker.count(replace(worker.counts, num_served_blocks=served, **more), worker.counted_ms)
            self._order(worker)

    def _takes_work(self, worker: "_Worker") -> bool:
        return worker.is_alive(self._now_ms) and not worker.counts.is_draining

    def _order(self, worker: "_Worker") -> None:
        """Put a worker where its load belongs, or nowhere while it takes no work."""
        self._place(worker, worker.loads_s(self.fastest_rate) if self._takes_work(worker) else {})

    def _place(self, worker: "_Worker", loads_s: Mapping[Kind, float]) -> None:
        """Take a worker out of the orders that it no longer is in, and into those that it now is."""
        for kind, load_s in worker.places.items():
            if loads_s.get(kind) != load_s:
                self._orders[kind].discard(worker.worker_id, load_s)
        for kind, load_s in loads_s.items():
            if worker.places.get(kind) != load_s:
                self._orders[kind].put(worker.worker_id, load_s)
        was_fastest = worker.placed_rate == self.fastest_rate
        worker.places, worker.placed_rate = loads_s, worker.prefill_rate if loads_s else 0.0
        if worker.placed_rate > self.fastest_rate:
            self.fastest_rate = worker.placed_rate
        elif was_fastest and worker.placed_rate < self.fastest_rate:
            self._has_fastest_changed = True

    def _least_loaded(
        self, side: str, num_tokens: int, exclude: Collection[WorkerId], now_ms: float, salt: int
    ) -> list[Candidate]:
        """Return the first of each kind; if none takes so long a prompt, the one that takes the longest."""
        orders = [order for kind, order in self._orders.items() if kind[0] == side and order.rows]
        most = max(MIN_OF_KIND, SHORTLIST // max(1, len(orders)))
        found: list[Candidate] = []
        for order in orders:
            first = order.start(now_ms / 1000, most, salt) if side == "prefill" else 0
            there = (c for c in self._those(order, first, exclude) if num_tokens <= c.max_prompt_tokens)
            found += islice(there, most)
        if found:
            return found
        there = (candidate for order in orders for candidate in self._those(order, 0, exclude))
        longest = max(there, key=lambda c: c.max_prompt_tokens, default=None)
        return [c for c in (longest,) if c is not None]

    def _those(self, order: "_LoadOrder", first: int, exclude: Collection[WorkerId]) -> Iterator[Candidate]:
        """Yield the workers of an order, behind so many, who have not fallen silent since they were counted."""
        for _, worker_id in islice(order.rows, first, None):
            worker = self._workers[worker_id]
            if worker_id not in exclude and worker.is_alive(self._now_ms):
                yield worker.candidate

    def _partners(self, found: list[Candidate], num_tokens: int, exclude: Collection[WorkerId]) -> Iterator[Candidate]:
        """Yield workers with whom those can exchange KV that can with nobody else who was found."""
        prefills = [c for c in found if c.role is not WorkerRole.DECODE]
        decodes = [c for c in found if c.role is not WorkerRole.PREFILL]
        sent, taken = {p.send_words for p in prefills}, {d.receive_words for d in decodes}
        for words in _lonely({p.send_words for p in prefills if p.role is not WorkerRole.MIXED}, taken):
            fit = self._fitting(self._takers.meeting(words), num_tokens, exclude)
            takers = (worker for worker in fit if worker.info.role is not WorkerRole.PREFILL)
            yield from (w.candidate for w in nsmallest(NUM_PARTNERS, takers, key=_Worker.decode_load_s))
        for words in _lonely({d.receive_words for d in decodes if d.role is not WorkerRole.MIXED}, sent):
            fit = self._fitting(self._sources.meeting(words), num_tokens, exclude)
            givers = (worker for worker in fit if worker.info.role is not WorkerRole.DECODE)
            key = partial(_Worker.prefill_load_s, fastest_rate=self.fastest_rate)
            yield from (w.candidate for w in nsmallest(NUM_PARTNERS, givers, key=key))

    def _fitting(
        self, worker_ids: Iterable[WorkerId], num_tokens: int, exclude: Collection[WorkerId]
    ) -> Iterator["_Worker"]:
        workers = (self._workers[worker_id] for worker_id in worker_ids if worker_id not in exclude)
        return (w for w in workers if self._takes_work(w) and num_tokens <= w.candidate.max_prompt_tokens)


class _Worker:
    """One join of a worker.

    `candidate`: as placement sees it, made when it is first looked at, since most are counted again before that.
    `places`: its load in each of the orders that it is in, and `placed_rate` its speed there. `num_read`: the read that
    brought it last.
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


class _LoadOrder:
    """Workers in the order of their load, then of their ids."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, WorkerId]] = []

    def put(self, worker_id: WorkerId, load_s: float) -> None:
        insort(self.rows, (load_s, worker_id))

    def start(self, now_s: float, most: int, salt: int) -> int:
        """Return where to look first: among those without a queue by now, if they are more than are looked at."""
        num_idle = bisect_left(self.rows, (now_s,))
        return salt % (num_idle - most) if num_idle > most else 0

    def discard(self, worker_id: WorkerId, load_s: float) -> None:
        del self.rows[bisect_left(self.rows, (load_s, worker_id))]


class _WordIndex:
    """Workers by the ways in which they send, or take, KV. Most have the same."""

    def __init__(self) -> None:
        self._workers: defaultdict[frozenset[str], set[WorkerId]] = defaultdict(set)

    def add(self, words: frozenset[str], worker_id: WorkerId) -> None:
        self._workers[words].add(worker_id)

    def discard(self, words: frozenset[str], worker_id: WorkerId) -> None:
        self._workers[words].discard(worker_id)
        if not self._workers[words]:
            del self._workers[words]

    def meeting(self, words: frozenset[str]) -> Iterator[WorkerId]:
        return (worker_id for those, ids in self._workers.items() if not those.isdisjoint(words) for worker_id in ids)


def _lonely(words: set[frozenset[str]], others: set[frozenset[str]]) -> list[frozenset[str]]:
    """Return those that have no word in common with any of the others."""
    return [those for those in words if all(those.isdisjoint(other) for other in others)]
