"""The tiers below the KV cache, joined to the engine.

What is new goes down (tier_writer), and prefixes that are missing come up (tier_loader), both by threads beside the
engine's. Nothing of this is on a step's path: the engine's thread reads indices in memory, and waits for no disk or
store. Every queue is bounded. A load that falls behind computing is given up, and the engine computes what is missing.
"""

import math
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence

from contracts.hashing import block_key, inexact_digest
from contracts.held_prefixes import HeldChange
from contracts.ids import RequestId
from contracts.kv_store import BlockKey, KVStore
from contracts.layout import KVLayout
from contracts.node import TierSpeed
from engine.cache.load_plan import EndedLoad, LoadBudget, NewBlock, PrefixLoad, TierRate, compute_seconds
from engine.cuda.kv.tier_pages import TierPages
from kv_transfer.tiers.record_codec import RecordCodec
from worker.core.block_load import BlockLoad, LoadPurpose
from worker.core.device_saver import DeviceBlockSaver
from worker.core.fillers import first_guess, make_fillers
from worker.core.host_pages import HostPages
from worker.core.record_check import RecordCheck
from worker.core.tier_loader import NUM_THREADS, TierLoader
from worker.core.tier_writer import BlockNaming, BlockSaver

_COUNTED = (
    "loaded_prompts", "missed_prompts", "loaded_blocks", "missed_blocks", "loads_given_up", "loaded_handoffs",
    "handoff_loaded_blocks",
)  # fmt: skip
_MAX_REMEMBERED = 1 << 16
_GAUGES = {"blocks", "bytes", "on", "writable", "foreign_blocks"}


class KVTiers:
    """The engine's LowerTiers over `tiers`, the fastest first.

    `pages`: the pool; `generations`: see BlockPool.
    `tokens_per_s` returns how fast prompts are computed, which is known from the start. `ring` wakes the engine's
    thread. `levels`: of compression, that records may be written at.
    """

    def __init__(
        self,
        tiers: Sequence[KVStore],
        layout: KVLayout,
        pages: HostPages | TierPages,
        generations: Sequence[int],
        tokens_per_s: Callable[[], float],
        ring: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        levels: Sequence[str] = (),
    ) -> None:
        codec = RecordCodec(layout, levels)
        self._layout, self._tokens_per_s, self._ring, self._clock = layout, tokens_per_s, ring, clock
        self._loads: dict[RequestId, BlockLoad] = {}
        self._ended: queue.SimpleQueue[BlockLoad] = queue.SimpleQueue()
        self._counts = Counter(dict.fromkeys(_COUNTED, 0))
        self._load_s = 0.0
        self._fastest = tiers[0].name
        self._came_from_fastest: set[bytes] = set()
        self._untold: dict[LoadPurpose, list[EndedLoad]] = {purpose: [] for purpose in LoadPurpose}
        naming = BlockNaming(layout.block_size, self._key, self._block_compute_s, codec.accepted_loss)
        saved = generations, naming, codec
        if isinstance(pages, HostPages):
            self._saver = BlockSaver(tiers, layout, pages, *saved)
        else:
            self._saver = DeviceBlockSaver(tiers, layout, pages, *saved)
        self._loaders: dict[str, TierLoader] = {}
        for tier in tiers:
            check, rate = RecordCheck(tier, layout, codec), TierRate(*first_guess(tier.name, pages))
            fillers = make_fillers(check, rate, pages, NUM_THREADS)
            self._loaders[tier.name] = TierLoader(check, rate, fillers, self._on_tier_done, clock)

    # The engine's thread.

    def begin(self, load: PrefixLoad) -> bool:
        """Begin a load if a tier in this machine holds what pays, or a store may; see LowerTiers."""
        budget = self._compute_budget(load)
        if budget.slack_s > 0 and self._begin(load, LoadPurpose.PROMPT, budget):
            return True
        self._counts["missed_prompts"] += 1
        self._counts["missed_blocks"] += len(load.digests)
        return False

    def count_held(self, digests: Sequence[bytes]) -> int:
        """Return how many of these blocks the tiers in this machine hold, up to the first that none has."""
        keys, num_held = [self._key(digest) for digest in digests], -1
        local = [loader.tier for loader in self._loaders.values() if loader.tier.is_local and loader.can_load]
        found = 0
        while num_held < found < len(keys):  # they may take turns within a prompt
            num_held = found
            for tier in local:
                found += tier.lookup(keys[found:]) if found < len(keys) else 0
        return found

    def begin_for_peer(self, load: PrefixLoad) -> bool:
        """Begin to fill blocks that a peer will read, if that is faster than computing them.

        They come from tiers in this machine. `num_loaded` tells how far it is, `finished_for_peers` of its end, and
        `cancel` gives it up.
        """
        return self._begin(load, LoadPurpose.PEER, self._compute_budget(load))

    def num_loaded(self, request_id: RequestId) -> int:
        """Return how many blocks of a load that has not been told as finished are in their pages."""
        return self._loads[request_id].num_done if request_id in self._loads else 0

    def finished_for_peers(self) -> list[EndedLoad]:
        """Return the loads for peers that have ended, each once, as `finished` those of the engine."""
        return self._take_ended(LoadPurpose.PEER)

    def begin_reserved(self, load: PrefixLoad, tokens_per_s: float) -> bool:
        """Begin to fill blocks that a peer would send at this rate; see LowerTiers."""
        budget = LoadBudget(load.first_token, load.num_tokens, self._layout.block_size, tokens_per_s, math.inf)
        return self._begin(load, LoadPurpose.HANDOFF, budget)

    def finished_reserved(self) -> list[EndedLoad]:
        """Return the loads of `begin_reserved` that have ended; see LowerTiers."""
        return self._take_ended(LoadPurpose.HANDOFF)

    def _begin(self, load: PrefixLoad, purpose: LoadPurpose, budget: LoadBudget) -> bool:
        exact = [self._key(digest) for digest in load.digests]
        lossy = [self._key(inexact_digest(digest, load.loss)) for digest in load.digests] if load.loss else []
        entry = BlockLoad(load, exact, lossy, budget, self._clock(), purpose)
        if purpose is LoadPurpose.PEER:  # who sends what is there meanwhile
            entry.on_progress = self._ring
        self._loads[load.request_id] = entry
        if not self._ask_next(entry):
            del self._loads[load.request_id]
            return False
        return True

    def finished(self) -> list[EndedLoad]:
        """Return the loads that have ended, those that fell behind computing among them; see LowerTiers."""
        return self._take_ended(LoadPurpose.PROMPT)

    def _take_ended(self, purpose: LoadPurpose) -> list[EndedLoad]:
        self._collect()
        ended, self._untold[purpose] = self._untold[purpose], []
        return ended

    def _collect(self) -> None:
        """Sort the loads that have ended by who wanted them."""
        ended: list[BlockLoad] = []
        while not self._ended.empty():
            load = self._ended.get()
            if self._loads.get(load.wanted.request_id) is load:  # else it was cancelled, and may be asked for again
                ended.append(load)
        now = self._clock()
        for load in [load for load in self._loads.values() if load.deadline_s < now and load not in ended]:
            load.stop()
            self._counts["loads_given_up"] += 1
            self._loaders[load.asked[-1]].gave_up(load)
            ended.append(load)
        for load in ended:
            self._untold[load.purpose].append(self._end(load, now))

    def _end(self, load: BlockLoad, now: float) -> EndedLoad:
        """Count a load that has ended, and forget it."""
        request_id, seconds = load.wanted.request_id, now - load.start_s
        del self._loads[request_id]
        self._count(load, seconds)
        is_of_fastest = load.asked == [self._fastest] and len(self._came_from_fastest) < _MAX_REMEMBERED
        if is_of_fastest and load.purpose is not LoadPurpose.PEER:  # whose blocks are never offered
            self._came_from_fastest.update(load.wanted.digests[: load.num_done])
        return EndedLoad(request_id, load.num_done, seconds, load.num_exact)

    def _count(self, load: BlockLoad, seconds: float) -> None:
        match load.purpose:
            case LoadPurpose.PROMPT:
                self._counts["loaded_blocks"] += load.num_done
                self._counts["missed_blocks"] += len(load.keys) - load.num_done
                self._counts["loaded_prompts" if load.num_done else "missed_prompts"] += 1
                self._load_s += seconds
            case LoadPurpose.HANDOFF:
                self._counts["handoff_loaded_blocks"] += load.num_done
                self._counts["loaded_handoffs"] += load.num_done > 0
            case LoadPurpose.PEER:
                pass  # the server of prefixes counts what it sends

    def seconds_to_deadline(self) -> float | None:
        """Return when `finished` has to be called next at the latest; None if nothing is being loaded."""
        deadlines = [load.deadline_s for load in self._loads.values()]
        return max(min(deadlines) - self._clock(), 0.0) if deadlines else None

    def cancel(self, request_id: RequestId) -> None:
        """Give a load up; see LowerTiers."""
        for purpose, untold in self._untold.items():
            self._untold[purpose] = [ended for ended in untold if ended.request_id != request_id]
        if load := self._loads.pop(request_id, None):
            load.stop()

    def offer(self, block: NewBlock) -> None:
        """Queue a block to be copied out, or drop it; see LowerTiers.

        Not one that the fastest tier has just given: a prompt of thousands of tokens would wait for all their keys.
        """
        if block.digest in self._came_from_fastest:
            self._came_from_fastest.discard(block.digest)
        else:
            self._saver.offer(block)

    def counters(self) -> dict[str, float]:
        """Return all that counts up, by metric names: `kv_` for all tiers, `kv_host_` and so on for one."""
        counts = {f"kv_{name}": float(value) for name, value in sorted(self._counts.items())}
        counts["kv_load_seconds"] = self._load_s
        counts |= {f"kv_{name}": value for name, value in self._saver.counters().items()}
        for name, loader in self._loaders.items():
            of_tier = {key: value for key, value in loader.tier.stats().items() if key not in _GAUGES}
            counts |= {f"kv_{name}_{key}": value for key, value in (of_tier | loader.counters()).items()}
        return counts

    def gauges(self) -> dict[str, float]:
        """Return what each tier holds now, and the rate at which it gives blocks."""
        gauges: dict[str, float] = {"kv_loads": len(self._loads)}
        for name, loader in self._loaders.items():
            gauges |= {f"kv_{name}_{key}": value for key, value in loader.tier.stats().items() if key in _GAUGES}
            gauges[f"kv_{name}_bytes_per_second"] = loader.rate.nbytes_per_s
        return gauges

    def speeds(self) -> tuple[TierSpeed, ...]:
        """Return how fast each tier that is on gives KV."""
        return tuple(loader.speed for loader in self._loaders.values() if loader.can_load)

    def take_changes(self) -> list[HeldChange]:
        """Return which prefixes tiers hold since the last call, or hold no more."""
        return [
            HeldChange(name, key, is_held)
            for name, loader in self._loaders.items()
            for key, is_held in loader.tier.held.take_changes()
        ]

    @property
    def is_idle(self) -> bool:
        """Return whether all that was offered is kept or dropped, and nothing is being loaded."""
        return not self._loads and self._saver.is_idle

    def close(self) -> None:
        """End the threads; nothing is read from the pool or written to it any more."""
        for load in self._loads.values():
            load.stop()
        self._saver.close()
        for loader in self._loaders.values():
            loader.close()
            loader.tier.close()

    # Which tier is asked.

    def _on_tier_done(self, load: BlockLoad) -> None:
        """Let the next tier go on with a load, or end it; called by loaders' threads."""
        if load.is_over or not self._ask_next(load):
            self._ended.put(load)
            self._ring()

    def _ask_next(self, load: BlockLoad) -> bool:
        """Give a load to the tier that goes on with it, each once; returns whether there is one.

        Those in this machine come first: to know what they hold takes no time.
        """
        if load.num_done == len(load.keys):
            return False
        rest = [loader for name, loader in self._loaders.items() if name not in load.asked]
        local = [loader for loader in rest if loader.tier.is_local and loader.can_load]
        offers = [loader.offer(len(load.held_by(loader.tier))) for loader in local]
        plan = load.budget.plan(offers, load.next_token)
        used = {part.tier for part in plan.parts}
        for loader, offer in zip(local, offers, strict=True):
            if offer.num_held and offer.name not in used:
                loader.rate.passed_over()
        if plan.parts:
            first = plan.parts[0]
            self._loaders[first.tier].put(load, load.num_done + first.last)
            return True
        for loader in rest if load.purpose is LoadPurpose.PROMPT else []:  # a peer asks a store itself
            if not loader.tier.is_local and loader.may_pay(load):
                loader.put(load, load.num_done)
                return True
        return False

    # What keys and computing are.

    def _key(self, digest: bytes) -> BlockKey:
        return BlockKey(block_key(self._layout.shared_id, digest))

    def _compute_budget(self, load: PrefixLoad) -> LoadBudget:
        size = self._layout.block_size
        return LoadBudget(load.first_token, load.num_tokens, size, self._tokens_per_s(), late_s=load.late_s)

    def _block_compute_s(self, first_token: int) -> float:
        return compute_seconds(first_token, self._layout.block_size, self._tokens_per_s())
