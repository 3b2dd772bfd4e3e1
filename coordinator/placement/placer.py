"""The placer of a gateway: it keeps a view, lets the policy choose, and the store claim."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from zlib import crc32

import msgspec

from contracts.errors import Overloaded, RequestError, TandemError, Unavailable
from contracts.ids import Epoch, GatewayId, RequestId, WorkerId
from contracts.node import Node
from contracts.request import Route, WorkerRef
from coordinator import refusals
from coordinator.placement import policy, prefixes
from coordinator.placement.candidate import Candidate
from coordinator.placement.policy import RouteOffer
from coordinator.placement.pool_view import SHORTLIST, PoolView
from coordinator.placement.prefixes import NO_PREFIXES, Holder, PromptPrefixes, TierDepths
from coordinator.store.store import Claim, Claimed, ClaimedRoute, ClaimedWorker, MigrationClaim, Store

CHANGES_PERIOD_S, FULL_PERIOD_S = 0.25, 2.0
"""How old a view gets before the changes, or all of the pool, are read. Workers beat each second, so changes bring all
that live: the whole is for what Redis lost or its clock skipped."""
MIN_PERIOD_S, WORKERS_PER_CLAIM = 0.002, 64
"""Changes are read sooner where placements are many: after one of our own for so many workers, since other gateways
have placed as much that is not known here. So what reading costs a placement does not depend on the pool. In a small
one all workers are offered, and the store knows."""
MAX_AGE_S = 1.0
"""A placement waits for a view that is older."""
MAX_CLAIMS = 4
"""Claims of routes that one placement makes at most, each by what the one before found."""


class PlaceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to place, or (`epoch` > 1) to place again.

    The former attempt's credits then come back in the same step. `lease_s`: unless its gateway renews within it, the
    request is reaped. `exclude`: workers that refused it. `room`: the part of the workers' queues that it may fill.
    """

    request_id: RequestId
    epoch: Epoch = Epoch(1)
    gateway_id: GatewayId
    num_tokens: int
    max_tokens: int
    lease_s: float
    prefixes: PromptPrefixes = NO_PREFIXES
    exclude: tuple[WorkerId, ...] = ()
    room: float = 1.0

    @property
    def need_tokens(self) -> int:
        return policy.decode_need(self.num_tokens, self.max_tokens)


class Placer:
    """Places requests on the workers of one pool. Owned by the event loop."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._view, self._since_us = PoolView(), 0
        self._read_s = self._full_s = -math.inf
        self._num_begun = self._newest = self._num_claims = 0
        self._reading: asyncio.Task[None] | None = None

    async def nodes(self) -> list[Node]:
        """Return the workers of the pool as they are now, by id."""
        await self._refresh(self._num_begun)
        return self._view.nodes

    async def place(self, request: PlaceRequest) -> Route:
        """Choose by the policy and take the credits; the same call again gives the same route.

        Raises Overloaded (no credit now), Unavailable (no live prefill or decode worker; or the request has ended or
        is past that epoch), RequestError (no worker could ever hold it).
        """
        seen, full_side = self._num_begun, "prefill"
        await self._keep_fresh(self._clock())
        looked_up, keys = request.prefixes.looked_up, request.prefixes.held_keys(self._view.kv_forms)
        found = await self._store.prefix_holders(looked_up, [held.key for held in keys]) if looked_up else []
        found, in_tiers = found[: len(looked_up)], found[len(looked_up) :]
        holders = prefixes.holders(request.prefixes, found, 4 * SHORTLIST)
        tiers = prefixes.tier_depths(keys, in_tiers, 2 * SHORTLIST) if keys else prefixes.NO_TIERS
        for num_refused in range(MAX_CLAIMS + 1):
            if num_refused > 1:  # the counts that came with the first refusal were not all
                await self._refresh(seen)
            offers, refusal = self._choose(request, holders, tiers)
            if refusal is not None and self._newest <= seen:
                await self._refresh(seen)  # no refusal by an old view
                offers, refusal = self._choose(request, holders, tiers)
            if refusal is None and num_refused == MAX_CLAIMS:  # others were faster each time
                offers, refusal = [], refusals.overloaded(full_side, refusals.MIN_RETRY_S)
            refs = self._view.refs(offers)
            self._num_claims += 1
            written = list(zip(looked_up, prefixes.others(found), strict=True))
            claim = self._claim(request, offers, refusal)
            claimed = await self._store.claim(claim, written)
            if claimed.repeated is not None:
                prefill, decode = claimed.repeated
                return Route(request.request_id, request.epoch, prefill, decode)
            if refusal is not None:
                raise refusal
            if (offer := self._learn(request, offers, claimed)) is not None:
                prefill, decode = refs[offer.prefill.worker_id], refs[offer.decode.worker_id]
                source = self._view.source(offer.prefill, holders, tiers)
                return Route(request.request_id, request.epoch, prefill, decode, source)
            full_side = _full_side(claim, claimed)
        raise AssertionError("the last claim has a refusal")

    async def place_migration(
        self, request_id: RequestId, epoch: Epoch, source: WorkerRef, need_tokens: int, exclude: Sequence[WorkerId]
    ) -> Route:
        """Take the credit of another worker for an answer that `source` decodes; that of the source stays.

        Raises Unavailable if there is no worker that can take it and has room for all of it now.
        """
        await self._keep_fresh(self._clock())
        for candidate, ref in self._view.destinations(source.worker_id, need_tokens, exclude)[:MAX_CLAIMS]:
            max_reserved = candidate.capacity_tokens - need_tokens  # one that has to wait for pages stays where it is
            worker = ClaimedWorker(ref.worker_id, candidate.term, candidate.capacity_tokens, 0.0, max_reserved)
            claim = MigrationClaim(request_id=request_id, epoch=epoch, worker=worker, need_tokens=need_tokens)
            if max_reserved >= 0 and await self._store.claim_migration(claim):
                return Route(request_id, epoch, source, ref)
        raise refusals.no_worker("decode")

    async def close(self) -> None:
        """Read no more."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _keep_fresh(self, now: float) -> None:
        """Read on beside the placement, or first if what is known is too old."""
        if now - self._read_s > MAX_AGE_S:
            await self._refresh(self._newest)
        elif self._reading is None and now - self._read_s > self._period_s():
            self._start_reading()

    def _period_s(self) -> float:
        num_workers = self._view.num_workers
        is_busy = num_workers > policy.NUM_OFFERED and self._num_claims * WORKERS_PER_CLAIM >= num_workers
        return min(MIN_PERIOD_S, CHANGES_PERIOD_S) if is_busy else CHANGES_PERIOD_S

    async def _refresh(self, seen: int) -> None:
        """Wait for a view of a read that begins later than the first `seen`. Raises Unavailable."""
        while self._newest <= seen:
            # One that is over and not yet put away would be awaited without a turn of the loop, for ever.
            if (reading := self._reading) is None or reading.done():
                reading = self._start_reading()
            await asyncio.shield(reading)

    def _start_reading(self) -> "asyncio.Task[None]":
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(self._end_reading)
        return self._reading

    def _end_reading(self, task: "asyncio.Task[None]") -> None:
        if self._reading is task:
            self._reading = None
        if not task.cancelled():
            task.exception()  # told to those who wait, if any do: the next placement tries again

    async def _read(self) -> None:
        self._num_begun += 1
        number, began_s, self._num_claims = self._num_begun, self._clock(), 0
        is_full = began_s - self._full_s > FULL_PERIOD_S
        now_us = await self._take_in(self._since_us, is_full)
        if now_us < self._since_us:
            now_us, is_full = await self._take_in(0, True), True
        self._since_us, self._read_s, self._newest = now_us, began_s, number
        self._full_s = began_s if is_full else self._full_s

    async def _take_in(self, since_us: int, is_full: bool) -> int:
        """Take the pool into the view a part at a time, between which others have their turn.

        Returns the store's time; -1 if the store has lost what was read, and the whole pool is to be read anew.
        """
        now_us = -1
        self._view.begin_read()
        async with aclosing(self._store.pool(since_us, is_full)) as parts:
            async for part in parts:
                now_us, is_full = part.now_us, part.is_full
                if now_us < since_us or not self._view.apply(part):
                    return -1
                await asyncio.sleep(0)
        self._view.end_read(is_full)
        return now_us

    def _now_ms(self) -> float:
        """Return the store's time, by what it was at the last read."""
        return self._since_us / 1000 + (self._clock() - self._read_s) * 1000

    def _choose(
        self, request: PlaceRequest, holders: Mapping[str, Holder], tiers: TierDepths
    ) -> tuple[list[RouteOffer], TandemError | None]:
        salt = crc32(request.request_id.encode())
        shortlist = self._view.shortlist(request.num_tokens, request.exclude, holders, self._now_ms(), salt, tiers)
        try:
            needs = request.num_tokens, request.need_tokens
            return policy.choose(shortlist, *needs, fastest_rate=self._view.fastest_rate, room=request.room), None
        except TandemError as refusal:
            return [], refusal

    def _claim(self, request: PlaceRequest, offers: list[RouteOffer], refusal: TandemError | None) -> Claim:
        workers = list({c.worker_id: c for offer in offers for c in (offer.prefill, offer.decode)}.values())
        index = {worker.worker_id: i for i, worker in enumerate(workers)}
        return Claim(
            request_id=request.request_id,
            epoch=request.epoch,
            gateway_id=request.gateway_id,
            need_tokens=request.need_tokens,
            lease_ms=int(request.lease_s * 1000),
            refusal=_counter(refusal),
            workers=[self._claimed_worker(worker, request) for worker in workers],
            routes=[_claimed_route(offer, index) for offer in offers],
            num_blocks=request.num_tokens // prefixes.BLOCK_TOKENS,
            prefix_tail=request.prefixes.tail,
            prefix_kept_ms=int(prefixes.KEPT_S * 1000),
        )

    def _claimed_worker(self, worker: Candidate, request: PlaceRequest) -> ClaimedWorker:
        max_pending = policy.max_pending(worker, request.room) if self._view.fastest_rate else math.inf
        max_reserved = policy.max_reserved(worker, request.need_tokens, request.room)
        return ClaimedWorker(worker.worker_id, worker.term, worker.capacity_tokens, max_pending, max_reserved)

    def _learn(self, request: PlaceRequest, offers: list[RouteOffer], claimed: Claimed) -> RouteOffer | None:
        """Take the fresh counts into the view, and what was taken; return that, or nothing."""
        now_ms = self._now_ms()
        names = dict.fromkeys(c.worker_id for offer in offers for c in (offer.prefill, offer.decode))
        for worker_id, counts in zip(names, claimed.counts, strict=True):
            self._view.update_counts(worker_id, counts, now_ms)
        if claimed.route is None:
            return None
        offer = offers[claimed.route]
        self._view.take(offer, request.need_tokens, request.num_tokens // prefixes.BLOCK_TOKENS)
        return offer


def _claimed_route(offer: RouteOffer, index: dict[WorkerId, int]) -> ClaimedRoute:
    return ClaimedRoute(
        index[offer.prefill.worker_id],
        index[offer.decode.worker_id],
        offer.uncached_tokens,
        offer.base_s,
        offer.prefill_cost,
        offer.decode_cost,
    )


def _full_side(claim: Claim, claimed: Claimed) -> str:
    """Return which side of a claim's routes took nothing, by the counts that came back."""
    pairs = zip(claim.workers, claimed.counts, strict=True)
    computes = [
        counts is not None
        and counts.term == offered.term
        and not counts.is_draining
        and counts.pending_tokens <= offered.max_pending_tokens
        for offered, counts in pairs
    ]
    return "decode" if any(computes[route.prefill] for route in claim.routes) else "prefill"


def _counter(refusal: TandemError | None) -> str:
    match refusal:
        case None:
            return ""
        case Overloaded():
            return "overloaded"
        case RequestError():
            return "too_long"
        case _:
            assert isinstance(refusal, Unavailable)
            return "unavailable"
