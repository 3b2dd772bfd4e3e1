"""The decision what of a prompt is loaded from lower tiers, and what is computed.

Causal attention lets nothing be computed behind a block that is not there: what is loaded is a prefix, and what it
saves is its computing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contracts.ids import RequestId

ATTENTION_TOKENS = 16384
"""The position at which a token's attention takes as long as all else of it: some 8 billion parameters' is there.

A rough figure is enough: it makes later blocks dearer, and sets no deadline.
"""
MAX_WAIT_SHARE = 1.1
"""A load is given up once it took so much of the time that computing would have taken."""


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

    @property
    def limit_s(self) -> float:
        """Return how long the load may take at most."""
        return MAX_WAIT_SHARE * self.compute_s


NOTHING = LoadPlan((), 0.0, 0.0)


def compute_seconds(first_token: int, num_tokens: int, tokens_per_s: float) -> float:
    """Return how long the KV of these tokens takes to compute; each later one attends to one more."""
    middle = first_token + num_tokens / 2
    return num_tokens / tokens_per_s * (1 + middle / ATTENTION_TOKENS)


def plan_load(offers: Iterable[TierOffer], first_token: int, block_size: int, tokens_per_s: float) -> LoadPlan:
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
        compute_s = compute_seconds(first_token, done * block_size, tokens_per_s)
        if compute_s - load_s > saved_s:
            best, saved_s = LoadPlan(tuple(parts), load_s, compute_s), compute_s - load_s
    return best


class TierRate:
    """How fast a tier gives blocks: a mean over its loads, the latest of most weight.

    A tier that is passed over is thought a little faster each time, so that it is tried again after a bad spell.
    """

    WEIGHT = 0.3
    OPTIMISM = 1.02

    def __init__(self, nbytes_per_s: float, latency_s: float) -> None:
        self._best = nbytes_per_s
        self.nbytes_per_s, self.latency_s = nbytes_per_s, latency_s

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a load."""
        if nbytes > 0 and seconds > 0:
            self.nbytes_per_s += self.WEIGHT * (nbytes / seconds - self.nbytes_per_s)
            self._best = max(self._best, self.nbytes_per_s)

    def passed_over(self) -> None:
        self.nbytes_per_s = min(self._best, self.nbytes_per_s * self.OPTIMISM)


@dataclass(frozen=True)
class PrefixLoad:
    """A sequence that has its pages, and whose prefix may be in lower tiers.

    `digests` and `blocks`, of equal length, are those behind its prefix hit, from `first_token` on; `parent` is the
    digest before them, None at the prompt's start.
    """

    request_id: RequestId
    first_token: int
    parent: bytes | None
    digests: Sequence[bytes]
    blocks: Sequence[int]


@dataclass(frozen=True)
class NewBlock:
    """A block that entered the prefix cache; its content is there as long as its generation is the same."""

    block: int
    generation: int
    digest: bytes
    parent: bytes | None
    first_token: int


class LowerTiers(Protocol):
    """The tiers below the pool, as an engine sees them. All calls come from the engine's thread."""

    def begin(self, load: PrefixLoad) -> bool:
        """Begin to fill blocks, unless that does not pay; returns whether it began."""
        ...

    def finished(self) -> list[tuple[RequestId, int]]:
        """Return the loads that have ended, each once, with how many of their first blocks hold their KV now.

        Nothing is written to their pages any more. A load ends by its deadline, whatever happens.
        """
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Give a load up: nothing is written to its pages once this returns. It is not told as finished."""
        ...

    def offer(self, block: NewBlock) -> None:
        """Take a block to keep, soon and by another thread, or not."""
        ...
