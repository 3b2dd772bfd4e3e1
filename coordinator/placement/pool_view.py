"""A gateway's view of the pool: what each worker stated and counted when it was last read.

Queues of prompts are taken to get shorter at their workers' own pace in between. Nothing here asks or waits; times are
the store's own, as its updates bring them.
"""

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import islice

from msgspec.structs import replace

from contracts.ids import WorkerId
from contracts.node import Node, NodeInfo, NodeLoad, WorkerRole
from contracts.request import WorkerRef
from coordinator.placement.policy import (
    Candidate,
    RouteOffer,
    can_exchange_kv,
    decode_load_s,
    prefill_load_s,
    prefill_rate,
    to_candidate,
)
from coordinator.placement.prefixes import BLOCK_TOKENS, is_cached
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
        self._now_ms = 0
        self.fastest_rate = 0.0

    @property
    def nodes(self) -> list[Node]:
        """All workers that were read, by id, dead ones too."""
        workers = sorted(self._workers.items(), key=lambda item: item[0])
        return [Node(info=w.info, load=w.load, alive=w.is_alive(self._now_ms)) for _, w in workers]

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def refs(self, offers: Iterable[RouteOffer]) -> dict[WorkerId, WorkerRef]:
        """Return where the workers of these are reached."""
        worker_ids = {c.worker_id for offer in offers for c in (offer.prefill, offer.decode)}
        return {worker_id: self._workers[worker_id].info.ref for worker_id in worker_ids}

    def apply(self, update: PoolUpdate) -> bool:
        """Take in what was read, and return whether all was known: else the whole pool is to be read anew."""
        is_known = self.apply_part(update.now_us, update.rows)
        self.end_update(update)
        return is_known

    def apply_part(self, now_us: int, rows: Sequence[PoolRow]) -> bool:
        """Take in some rows of an update, and return whether all were known."""
        self._now_ms = now_us // 1000
        return all([self._apply(row) for row in rows])

    def end_update(self, update: PoolUpdate) -> None:
        """Drop those that a full update does not have, and pass over those that fell silent."""
        if update.is_full:
            for worker_id in self._workers.keys() - {row.worker_id for row in update.rows}:
                self._remove(worker_id)
        for worker in [w for w in self._workers.values() if w.places and not w.is_alive(self._now_ms)]:
            self._order(worker)
        rates = (w.candidate.prefill_rate for w in self._workers.values() if w.places)
        self.fastest_rate = max(rates, default=0.0)

    def update_counts(self, worker_id: WorkerId, counts: WorkerCounts | None, now_ms: float) -> None:
        """Take in fresh counts of one worker, as a claim brings them."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        if counts is None or counts.term != worker.counts.term:
            self._remove(worker_id)  # until the next update brings who it is now
        else:
            worker.counts, worker.counted_ms = counts, now_ms
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
        holders: Mapping[str, tuple[int, int]],
        now_ms: float,
        salt: int = 0,
    ) -> list[Candidate]:
        """Return the workers that a choice for a prompt looks at, by id.

        They are the least loaded of each kind, and `holders` of the prompt's prefix: term -> depth and age, as
        coordinator.placement.prefixes has it. `salt`: of whom among many that wait for work, so that gateways which see
        the same do not look at the same.
        """
        found: dict[WorkerId, Candidate] = {}
        for side in ("prefill", "decode"):
            found |= {c.worker_id: c for c in self._least_loaded(side, num_tokens, exclude, now_ms, salt)}
        for partner in self._partners(list(found.values()), num_tokens, exclude):
            found.setdefault(partner.worker_id, partner)
        for term, (depth, served_blocks) in holders.items():
            worker = self._by_term.get(term)
            if worker is None or not worker.places or worker.candidate.worker_id in exclude:
                continue
            if is_cached(served_blocks, worker.counts.num_served_blocks, worker.info.capacity_tokens):
                cached = min(depth * BLOCK_TOKENS, num_tokens - 1)
                found[worker.candidate.worker_id] = replace(worker.candidate, cached_tokens=cached)
        return [self._as_of(found[worker_id], now_ms) for worker_id in sorted(found)]

    def _as_of(self, candidate: Candidate, now_ms: float) -> Candidate:
        """Return a worker without the prompts that it has computed since it was counted, at its own pace."""
        worker = self._workers[candidate.worker_id]
        if not candidate.pending_tokens or now_ms <= worker.counted_ms:
            return candidate
        computed = (now_ms - worker.counted_ms) / 1000 * prefill_rate(candidate, self.fastest_rate)
        return replace(candidate, pending_tokens=max(0, candidate.pending_tokens - int(computed)))

    def _apply(self, row: PoolRow) -> bool:
        worker = self._workers.get(row.worker_id)
        is_dead = row.counts is not None and row.counts.term == "0"
        if row.counts is None or (worker is not None and worker.counts.term != row.counts.term and not is_dead):
            self._remove(row.worker_id)
            worker = None
        if row.counts is None:
            return True
        if worker is None:
            if row.info is None:
                return False
            worker = self._workers[row.worker_id] = _Worker(row.info, row.counts)
            self._by_term[row.counts.term] = worker
            self._sources.add(worker.candidate.send_words, row.worker_id)
            self._takers.add(worker.candidate.receive_words, row.worker_id)
        worker.counts, worker.counted_ms = row.counts, self._now_ms
        if row.load is not None:
            worker.state(row.load)
        self._order(worker)
        return True

    def _remove(self, worker_id: WorkerId) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        for kind in worker.places:
            self._orders[kind].discard(worker_id)
        self._by_term.pop(worker.term, None)
        self._sources.discard(worker.candidate.send_words, worker_id)
        self._takers.discard(worker.candidate.receive_words, worker_id)

    def _add(self, worker_id: WorkerId, num_blocks: int, **counts: int) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            more = {name: getattr(worker.counts, name) + count for name, count in counts.items()}
            served = worker.counts.num_served_blocks + num_blocks
            worker.counts = replace(worker.counts, num_served_blocks=served, **more)
            self._order(worker)

    def _order(self, worker: "_Worker") -> None:
        """Put a worker where its load belongs, or nowhere while it takes no work."""
        worker.count()
        takes_work = worker.is_alive(self._now_ms) and not worker.counts.is_draining
        places = dict(self._places(worker.candidate, worker.counted_ms)) if takes_work else {}
        for kind in worker.places - places.keys():
            self._orders[kind].discard(worker.candidate.worker_id)
        for kind, load_s in places.items():
            self._orders[kind].put(worker.candidate.worker_id, load_s)
        worker.places = frozenset(places)

    def _places(self, worker: Candidate, counted_ms: float) -> Iterator[tuple[Kind, float]]:
        speed = round(RATE_STEPS * math.log2(worker.prefill_rate)) if worker.prefill_rate else 0
        if worker.role is not WorkerRole.DECODE:
            # By when its queue ends, not how long it is: so the order holds while all queues get shorter.
            load_s = prefill_load_s(worker, self.fastest_rate)
            yield ("prefill", worker.role, speed), load_s and counted_ms / 1000 + load_s
        if worker.role is not WorkerRole.PREFILL:
            yield ("decode", worker.role, 0), decode_load_s(worker)

    def _least_loaded(
        self, side: str, num_tokens: int, exclude: Collection[WorkerId], now_ms: float, salt: int
    ) -> list[Candidate]:
        """Return the first of each kind; if none takes so long a prompt, the one that takes the longest."""
        orders = [order for kind, order in self._orders.items() if kind[0] == side and order.rows]
        most = max(MIN_OF_KIND, SHORTLIST // max(1, len(orders)))
        found: list[Candidate] = []
        for order in orders:
            first = order.start(now_ms / 1000, most, salt) if side == "prefill" else 0
            names = islice(order.rows, first, None)
            there = (self._workers[name].candidate for _, name in names if name not in exclude)
            found += islice((c for c in there if num_tokens <= c.max_prompt_tokens), most)
        if found:
            return found
        there = (self._workers[name].candidate for order in orders for _, name in order.rows if name not in exclude)
        longest = max(there, key=lambda c: c.max_prompt_tokens, default=None)
        return [c for c in (longest,) if c is not None]

    def _partners(self, found: list[Candidate], num_tokens: int, exclude: Collection[WorkerId]) -> Iterator[Candidate]:
        """Yield workers with whom those can exchange KV that can with nobody else who was found."""
        prefills = [c for c in found if c.role is not WorkerRole.DECODE]
        decodes = [c for c in found if c.role is not WorkerRole.PREFILL]
        lonely = (p for p in prefills if not any(can_exchange_kv(p, d) for d in decodes))
        for words in {p.send_words for p in lonely}:
            fit = self._fitting(self._takers.meeting(words), num_tokens, exclude)
            yield from nsmallest(NUM_PARTNERS, (c for c in fit if c.role is not WorkerRole.PREFILL), key=decode_load_s)
        lonely = (d for d in decodes if not any(can_exchange_kv(p, d) for p in prefills))
        for words in {d.receive_words for d in lonely}:
            fit = self._fitting(self._sources.meeting(words), num_tokens, exclude)
            senders = (c for c in fit if c.role is not WorkerRole.DECODE)
            yield from nsmallest(NUM_PARTNERS, senders, key=lambda c: prefill_load_s(c, self.fastest_rate))

    def _fitting(
        self, worker_ids: Iterable[WorkerId], num_tokens: int, exclude: Collection[WorkerId]
    ) -> Iterator[Candidate]:
        workers = (self._workers[worker_id] for worker_id in worker_ids if worker_id not in exclude)
        return (w.candidate for w in workers if w.places and num_tokens <= w.candidate.max_prompt_tokens)


class _Worker:
    """One join of a worker. `candidate`: as placement sees it; `places`: the orders that it is in."""

    def __init__(self, info: NodeInfo, counts: WorkerCounts) -> None:
        self.info, self.counts, self.term = info, counts, counts.term
        self.places: frozenset[Kind] = frozenset()
        self.counted_ms = 0.0
        self.state(NodeLoad())
        self.count()

    def is_alive(self, now_ms: int) -> bool:
        return self.counts.term != "0" and now_ms < self.counts.alive_until_ms

    def state(self, load: NodeLoad) -> None:
        self.load = load
        self._stated = to_candidate(self.info, load)

    def count(self) -> None:
        self.candidate = replace(
            self._stated,
            term=self.term,
            pending_tokens=self.counts.pending_tokens,
            reserved_tokens=self.counts.reserved_tokens,
            num_decodes=self.counts.num_decodes,
            num_answers=self.counts.num_answers,
        )


class _LoadOrder:
    """Workers in the order of their load, then of their ids."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, WorkerId]] = []
        self._load_s: dict[WorkerId, float] = {}

    def put(self, worker_id: WorkerId, load_s: float) -> None:
        if self._load_s.get(worker_id) != load_s:
            self.discard(worker_id)
            self._load_s[worker_id] = load_s
            insort(self.rows, (load_s, worker_id))

    def start(self, now_s: float, most: int, salt: int) -> int:
        """Return where to look first: among those without a queue by now, if they are more than are looked at."""
        num_idle = bisect_left(self.rows, (now_s,))
        return salt % (num_idle - most) if num_idle > most else 0

    def discard(self, worker_id: WorkerId) -> None:
        load_s = self._load_s.pop(worker_id, None)
        if load_s is not None:
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
