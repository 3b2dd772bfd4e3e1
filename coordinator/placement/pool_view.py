"""A gateway's view of the pool: what each worker stated and counted when it was last read.

Queues of prompts are taken to get shorter at their workers' own pace in between. Nothing here asks or waits; times are
the store's own, as its updates bring them.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import nsmallest
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from contracts.ids import WorkerId
from contracts.node import Node, WorkerRole
from contracts.request import WorkerRef
from coordinator.placement.candidate import Candidate, HeldPrefix, prefill_rate, sound_rate
from coordinator.placement.load_order import LoadOrder, WordIndex, lonely
from coordinator.placement.policy import RouteOffer
from coordinator.placement.pool_worker import Kind, PoolWorker
from coordinator.placement.prefixes import BLOCK_TOKENS, NO_TIERS, Holder, KVForm, TierDepths, is_cached
from coordinator.placement.reuse import PULL_S
from coordinator.store.store import SHARED_TIER, PoolRow, PoolUpdate, WorkerCounts

SHORTLIST = 16
"""Workers a side that a choice looks at, beside those that hold the prompt's prefix."""
MIN_OF_KIND = 4
"""Workers of each kind, role and speed, that are looked at, however many kinds there are."""
NUM_PARTNERS = 4
"""For each set of ways to exchange KV that none of the least loaded shares."""

MAX_FORMS = 2
"""Forms of KV by whose keys a prompt is looked up in tiers: those that most workers with tiers have."""


class _Source(NamedTuple):
    """The holder of a prefix: how many blocks of it, whether perhaps the answer behind it, and the worker.

    `tier_rate`: the tokens a second that its tier gives, which holds the last of them; infinite for its cache.
    """

    depth: int
    has_answer: bool
    worker: PoolWorker
    tier_rate: float = math.inf


class PoolView:
    """The workers of a pool that were read last, with this gateway's own claims since."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, PoolWorker] = {}
        self._by_term: dict[str, PoolWorker] = {}
        self._orders: defaultdict[Kind, LoadOrder] = defaultdict(LoadOrder)
        self._sources, self._takers = WordIndex(), WordIndex()
        self._now_ms = self._num_reads = 0
        self.fastest_rate, self._has_fastest_changed = 0.0, False
        self._forms: Counter[KVForm] = Counter()

    @property
    def nodes(self) -> list[Node]:
        """All workers that were read, by id, dead ones too."""
        workers = sorted(self._workers.items(), key=lambda item: item[0])
        return [w.node(self._now_ms) for _, w in workers]

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def kv_forms(self) -> list[KVForm]:
        """Return the forms of the KV that tiers of workers hold, MAX_FORMS at most; none without tiers."""
        return [form for form, _ in self._forms.most_common(MAX_FORMS)] if self._forms else []

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
        tiers: TierDepths = NO_TIERS,
    ) -> list[Candidate]:
        """Return the workers that a choice for a prompt looks at, by id.

        They are the least loaded of each kind, and who holds the prompt's prefix: `holders` in their caches, by term,
        and those of `tiers`. `salt`: of whom among many that wait for work, so that gateways which see the same do not
        look at the same.
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
        for worker in islice(self._with_tiers(tiers, exclude), SHORTLIST):
            found.setdefault(worker.worker_id, worker.candidate)
        those = [self._as_of(found[worker_id], now_ms) for worker_id in sorted(found)]
        if not (tiers or holders):
            return those
        sources = self._givers(holders, tiers)
        # Those of the role decode seldom compute a prompt.
        decode = WorkerRole.DECODE
        return [c if c.role is decode else self._with_held(c, sources, tiers, num_tokens) for c in those]

    def source(
        self, prefill: Candidate, holders: Mapping[str, Holder], tiers: TierDepths = NO_TIERS
    ) -> WorkerRef | None:
        """Return the worker that seems to hold the most of a prompt beyond what `prefill` holds.

        In its cache, or in tiers of its own. None if none does. Of equal depth it is who may have decoded the answer
        behind. One that drains still gives.
        """
        found = _source_of(prefill, self._givers(holders, tiers))
        if found is None:
            return None
        depth, has_answer, worker, _ = found
        own_tokens = prefill.cached_tokens + (0 if prefill.is_pulled else prefill.loaded_tokens)
        return worker.info.ref if (depth, has_answer) > (own_tokens // BLOCK_TOKENS, False) else None

    def _givers(self, holders: Mapping[str, Holder], tiers: TierDepths) -> list[_Source]:
        """Return who holds a prompt's prefix and may give it, those who hold the most first."""
        found = [
            _Source(holder.depth, holder.is_continued and worker.info.role is not WorkerRole.PREFILL, worker)
            for worker, holder in self._holding(holders)
        ]
        for term, depths in tiers.items():
            if (worker := self._by_term.get(term)) is not None:
                of_tiers = [(speed, depths.get(speed.tier, 0)) for speed in worker.load.tiers]
                found += [
                    _Source(depth, False, worker, speed.tokens_per_s)
                    for speed, depth in of_tiers
                    if depth and speed.tokens_per_s > 0
                ]
        alive = [source for source in found if source.worker.is_alive(self._now_ms)]
        return sorted(alive, key=lambda source: (-source.depth, not source.has_answer, -source.tier_rate))

    def _with_tiers(self, tiers: TierDepths, exclude: Collection[WorkerId]) -> Iterator[PoolWorker]:
        """Yield the workers that may take a prompt and have its prefix in tiers of their own."""
        for term in tiers:
            worker = self._by_term.get(term)
            if worker is None or worker.info.role is WorkerRole.DECODE or worker.worker_id in exclude:
                continue
            if self._takes_work(worker):
                yield worker

    def _with_held(
        self, candidate: Candidate, sources: Sequence[_Source], tiers: TierDepths, num_tokens: int
    ) -> Candidate:
        """Return a candidate with what it can load of a prompt: from its tiers, and from another worker."""
        worker = self._workers[candidate.worker_id]
        own, shared = tiers.get(worker.term, {}), tiers.get(worker.form.name if worker.form else "", {})
        held = [
            HeldPrefix(min(depth * BLOCK_TOKENS, num_tokens - 1), speed.tokens_per_s, speed.latency_s)
            for speed in worker.load.tiers
            if (depth := (shared if speed.tier == SHARED_TIER else own).get(speed.tier, 0)) and speed.tokens_per_s > 0
        ]
        source = _source_of(candidate, sources)
        if source is not None and source.depth * BLOCK_TOKENS > candidate.cached_tokens:
            num_held = min(source.depth * BLOCK_TOKENS, num_tokens - 1)
            # A link whose speed nobody has measured may not be there when it is needed.
            rate = sound_rate(source.worker.load.transfer_rate) or candidate.transfer_rate
            if rate and math.isfinite(source.tier_rate):  # its tier fills its cache first
                rate = 1 / (1 / rate + 1 / source.tier_rate)
            held += [HeldPrefix(num_held, rate, PULL_S, is_peer=True)] if rate else []
        return replace(candidate, held=tuple(held)) if held else candidate

    def _holding(self, holders: Mapping[str, Holder]) -> Iterator[tuple["PoolWorker", Holder]]:
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
        has_changed = worker is not None and row.info is not None and worker.info != row.info  # its role, its adapters
        if row.counts is None or (is_another and not is_dead) or has_changed:
            self._remove(row.worker_id)
            worker = None
        if row.counts is None:
            return True
        if worker is None:
            if row.info is None:
                return False
            worker = self._workers[row.worker_id] = PoolWorker(row.info, row.counts)
            self._by_term[row.counts.term] = worker
            self._sources.add(worker.send_words, row.worker_id)
            self._takers.add(worker.receive_words, row.worker_id)
        worker.num_read = self._num_reads
        worker.count(row.counts, self._now_ms)
        if row.load is not None and row.load != worker.load:
            before = worker.form
            worker.state(row.load)
            self._count_form(before, worker.form)
        self._order(worker)
        return True

    def _remove(self, worker_id: WorkerId) -> None:
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        self._place(worker, {})
        self._count_form(worker.form, None)
        self._by_term.pop(worker.term, None)
        self._sources.discard(worker.send_words, worker_id)
        self._takers.discard(worker.receive_words, worker_id)

    def _count_form(self, before: KVForm | None, now: KVForm | None) -> None:
        """Count a worker whose tiers hold, or held, KV of a form."""
        if before == now:
            return
        if now is not None:
            self._forms[now] += 1
        if before is not None:
            self._forms[before] -= 1
            if not self._forms[before]:
                del self._forms[before]

    def _add(self, worker_id: WorkerId, num_blocks: int, **counts: int) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            more = {name: getattr(worker.counts, name) + count for name, count in counts.items()}
            served = worker.counts.num_served_blocks + num_blocks
            worker.count(replace(worker.counts, num_served_blocks=served, **more), worker.counted_ms)
            self._order(worker)

    def _takes_work(self, worker: "PoolWorker") -> bool:
        return worker.is_alive(self._now_ms) and not worker.counts.is_draining

    def _order(self, worker: "PoolWorker") -> None:
        """Put a worker where its load belongs, or nowhere while it takes no work."""
        self._place(worker, worker.loads_s(self.fastest_rate) if self._takes_work(worker) else {})

    def _place(self, worker: "PoolWorker", loads_s: Mapping[Kind, float]) -> None:
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

    def _those(self, order: "LoadOrder", first: int, exclude: Collection[WorkerId]) -> Iterator[Candidate]:
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
        for words in lonely({p.send_words for p in prefills if p.role is not WorkerRole.MIXED}, taken):
            fit = self._fitting(self._takers.meeting(words), num_tokens, exclude)
            takers = (worker for worker in fit if worker.info.role is not WorkerRole.PREFILL)
            yield from (w.candidate for w in nsmallest(NUM_PARTNERS, takers, key=PoolWorker.decode_load_s))
        for words in lonely({d.receive_words for d in decodes if d.role is not WorkerRole.MIXED}, sent):
            fit = self._fitting(self._sources.meeting(words), num_tokens, exclude)
            givers = (worker for worker in fit if worker.info.role is not WorkerRole.DECODE)
            key = partial(PoolWorker.prefill_load_s, fastest_rate=self.fastest_rate)
            yield from (w.candidate for w in nsmallest(NUM_PARTNERS, givers, key=key))

    def _fitting(
        self, worker_ids: Iterable[WorkerId], num_tokens: int, exclude: Collection[WorkerId]
    ) -> Iterator["PoolWorker"]:
        workers = (self._workers[worker_id] for worker_id in worker_ids if worker_id not in exclude)
        return (w for w in workers if self._takes_work(w) and num_tokens <= w.candidate.max_prompt_tokens)


def _source_of(candidate: Candidate, sources: Iterable[_Source]) -> _Source | None:
    """Return the other worker of the same layout that holds the most."""
    for source in sources:
        worker = source.worker
        if worker.worker_id != candidate.worker_id and worker.info.layout_id == candidate.layout_id:
            return source
    return None
