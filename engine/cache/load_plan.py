"""The decision what of a prompt is loaded from lower tiers, and what is computed.

Causal attention lets nothing be computed behind a block that is not there: what is loaded is a prefix, and what it
saves is its computing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contracts.ids import RequestId
from contracts.kv_loss import EXACT

ATTENTION_TOKENS = 16384
"""The position at which a token's attention takes as long as all else of it: some 8 billion parameters' is there.

A rough figure is enough: it makes later blocks dearer, and sets no deadline.
"""
MAX_DELAY_SHARE = 0.1
"""A load may delay a first token by so much of what computing the whole prompt takes."""
MAX_BATCH = 8
"""The most blocks that are read at once: so many are lost at most when a load is given up."""


@dataclass(frozen=True)
class TierOffer:
    """A tier that holds the first `num_held` of the wanted blocks.

    `latency_s` is what a load takes before its first block, `block_s` what each takes.
    """

    name: str
    num_held: int
    latency_s: float
    block_s: float


@dataclass(frozen=True)
class LoadPart:
    """Blocks `[first, last)` of the wanted ones, from one tier."""

    tier: str
    first: int
    last: int


@dataclass(frozen=True)
class LoadPlan:
    """The parts in order, without a gap.

    `load_s` and `compute_s`: how long loading and computing them is thought to take, in seconds.
    """

    parts: tuple[LoadPart, ...]
    load_s: float
    compute_s: float

    @property
    def num_blocks(self) -> int:
        return self.parts[-1].last if self.parts else 0


NOTHING = LoadPlan((), 0.0, 0.0)


def compute_seconds(
    first_token: int, num_tokens: int, tokens_per_s: float, attention_tokens: float = ATTENTION_TOKENS
) -> float:
    """Return how long the KV of these tokens takes to compute; each later one attends to one more."""
    middle = first_token + num_tokens / 2
    return num_tokens / tokens_per_s * (1 + middle / attention_tokens)


@dataclass(frozen=True)
class LoadBudget:
    """The time that a load of the blocks from `first_token` on may take, for a prompt of `num_tokens`.

    It grows by what computing the loaded blocks would have taken, so that a load which falls behind ends early: what is
    missing then is computed, and loading and computing together take at most MAX_DELAY_SHARE longer than computing all.
    Where a peer would send the blocks, its link takes the place of computing, with `attention_tokens` infinite: each
    token takes as long as another. `late_s`: by how much the prompt is behind computing already as the load begins.
    """

    first_token: int
    num_tokens: int
    block_size: int
    tokens_per_s: float
    attention_tokens: float = ATTENTION_TOKENS
    late_s: float = 0.0

    @property
    def slack_s(self) -> float:
        """Return how far a load may be behind computing, in seconds; 0.0 if the prompt has used that up."""
        return max(0.0, MAX_DELAY_SHARE * self.compute_s(self.num_tokens - self.first_token) - self.late_s)

    def limit_s(self, num_loaded: int) -> float:
        """Return after how many seconds a load is given up that has filled so many blocks."""
        return self.slack_s + self.compute_s(num_loaded * self.block_size)

    def plan(self, offers: Iterable[TierOffer], next_token: int) -> LoadPlan:
        """Return what to load of the blocks from `next_token` on, see `plan_load`."""
        return plan_load(offers, next_token, self.block_size, self.tokens_per_s, self.attention_tokens)

    def blocks_per_batch(self, block_s: float) -> int:
        """Return how many blocks to read at once, where each takes `block_s`: a batch uses half of the slack."""
        return max(1, min(MAX_BATCH, int(self.slack_s / 2 / block_s)))

    def compute_s(self, num_tokens: int) -> float:
        """Return how long computing the first `num_tokens` of the wanted ones takes, in seconds."""
        return compute_seconds(self.first_token, num_tokens, self.tokens_per_s, self.attention_tokens)


def plan_load(
    offers: Iterable[TierOffer],
    first_token: int,
    block_size: int,
    tokens_per_s: float,
    attention_tokens: float = ATTENTION_TOKENS,
) -> LoadPlan:
    """Return what to load of the blocks from `first_token` on.

    It is the prefix that saves the most time, if any does. Each block comes from the fastest tier that holds it. The
    saving grows or falls evenly between the ends of what tiers hold, so only those are looked at.
    """
    by_speed = sorted((offer for offer in offers if offer.num_held), key=lambda offer: offer.block_s)
    best, saved_s = NOTHING, 0.0
    parts: list[LoadPart] = []
    load_s, done = 0.0, 0
    for offer in by_speed:
        if offer.num_held <= done:
            continue
        parts.append(LoadPart(offer.name, done, offer.num_held))
        load_s += offer.latency_s + (offer.num_held - done) * offer.block_s
        done = offer.num_held
        compute_s = compute_seconds(first_token, done * block_size, tokens_per_s, attention_tokens)
        if compute_s - load_s > saved_s:
            best, saved_s = LoadPlan(tuple(parts), load_s, compute_s), compute_s - load_s
    return best


class TierRate:
    """How fast a tier gives blocks: means over its answers, the latest of most weight.

    A tier that is passed over is thought a little faster each time, so that it is tried again after a bad spell.
    """

    WEIGHT = 0.3
    OPTIMISM = 1.02

    def __init__(self, nbytes_per_s: float, latency_s: float) -> None:
        self._best, self._least_s = nbytes_per_s, latency_s
        self.nbytes_per_s, self.latency_s = nbytes_per_s, latency_s

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a load."""
        if nbytes > 0 and seconds > 0:
            self.nbytes_per_s += self.WEIGHT * (nbytes / seconds - self.nbytes_per_s)
            self._best = max(self._best, self.nbytes_per_s)

    def add_lookup(self, seconds: float) -> None:
        """Count how long the tier took to say what it holds."""
        self.latency_s += self.WEIGHT * (seconds - self.latency_s)
        self._least_s = min(self._least_s, self.latency_s)

    def passed_over(self) -> None:
        self.nbytes_per_s = min(self._best, self.nbytes_per_s * self.OPTIMISM)
        self.latency_s = max(self._least_s, self.latency_s / self.OPTIMISM)


@dataclass(frozen=True)
class PrefixLoad:
    """A sequence that has its pages, and whose prefix may be in lower tiers.

    `digests` and `blocks`, of equal length, are those behind its prefix hit, from `first_token` on; `parent` is the
    digest before them, None at the prompt's start. `num_tokens`: of the prompt. `loss`: of the KV that may be loaded
    where there is none that is exact, see contracts.kv_loss. `late_s`: see LoadBudget.
    """

    request_id: RequestId
    first_token: int
    num_tokens: int
    parent: bytes | None
    digests: Sequence[bytes]
    blocks: Sequence[int]
    loss: str = EXACT
    late_s: float = 0.0


@dataclass(frozen=True)
class EndedLoad:
    """A load that is over.

    The first `num_blocks` hold their KV, which is exact in the first `num_exact` of them. `seconds`: how long the
    sequence waited for it.
    """

    request_id: RequestId
    num_blocks: int
    seconds: float
    num_exact: int


@dataclass(frozen=True)
class NewBlock:
    """A block that entered the prefix cache; its content is there as long as its generation is the same.

    `digest` and `parent`, that of the block before, are those under which these are found: of inexact KV if that is
    what they hold. `loss`: see contracts.kv_loss. `is_decoded`: some of its tokens were decoded here.
    """

    block: int
    generation: int
    digest: bytes
    parent: bytes | None
    first_token: int
    loss: str = EXACT
    is_decoded: bool = False


class LowerTiers(Protocol):
    """The tiers below the pool, as an engine sees them. All calls come from the engine's thread."""

    def begin(self, load: PrefixLoad) -> bool:
        """Begin to fill blocks, unless that does not pay; returns whether it began."""
        ...

    def finished(self) -> list[EndedLoad]:
        """Return the loads that have ended, each once.

        Nothing is written to their pages any more. A load ends within its LoadBudget, whatever happens.
        """
        ...

    def begin_reserved(self, load: PrefixLoad, tokens_per_s: float) -> bool:
        """Begin to fill blocks that a peer would send at this rate, unless that does not pay.

        Returns whether it began. Only tiers in this machine are asked: a peer has asked the others itself.
        """
        ...

    def finished_reserved(self) -> list[EndedLoad]:
        """Return the loads of `begin_reserved` that have ended, as `finished` those of `begin`."""
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Give a load up: nothing is written to its pages once this returns. It is not told as finished."""
        ...

    def offer(self, block: NewBlock) -> None:
        """Take a block to keep, soon and by another thread, or not."""
        ...
