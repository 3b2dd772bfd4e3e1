"""A worker as placement sees it: what it stated, what it counted, and what it has of a prompt."""

import math
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from contracts.ids import Incarnation, WorkerId
from contracts.node import NodeInfo, NodeLoad, WorkerRole

PREFILL_RATE = 2000.0
DECODE_RATE = 200.0
TRANSFER_RATE = 50_000.0
"""Tokens a second of a worker that has not measured its own yet: those of a small model on a CPU. One that has not
measured prefill counts as the fastest of those that have: else the first to serve a long prompt would be given all that
follow.
"""


class HeldPrefix(msgspec.Struct, frozen=True, gc=False):
    """The first `num_tokens` of a prompt, held by a tier, or (`is_peer`) by another worker's cache.

    They come `latency_s` after they are asked for, at `tokens_per_s`.
    """

    num_tokens: int
    tokens_per_s: float
    latency_s: float
    is_peer: bool = False


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A live worker that takes work, as placement sees it.

    Tokens include credits taken since its last heartbeat; rates are 0 while unknown. `term`: of its join.
    `num_answers`: of `num_decodes`, those whose prompts are computed. `cached_tokens`: of this prompt's prefix, served
    here before; `held`: what of it tiers of this worker or another one hold. Of these a load is expected to bring
    `loaded_tokens` more, in `load_s`; `is_pulled`: from the other worker. `send_words`, `receive_words`: as of
    NodeInfo. `prompt_tokens_per_mixed_step`, `bounds_gaps`, `bad_paths`: as of NodeLoad.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    term: str = ""
    role: WorkerRole
    layout_id: str
    max_model_len: int
    capacity_tokens: int
    prompt_tokens_per_mixed_step: int
    bounds_gaps: bool = False
    pending_tokens: int = 0
    reserved_tokens: int = 0
    num_decodes: int = 0
    num_answers: int = 0
    cached_tokens: int = 0
    held: tuple[HeldPrefix, ...] = ()
    loaded_tokens: int = 0
    load_s: float = 0.0
    is_pulled: bool = False
    send_words: frozenset[str]
    receive_words: frozenset[str]
    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    transfer_rate: float = 0.0
    bad_paths: frozenset[Incarnation] = frozenset()

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt it takes: one token of answer must fit, too."""
        return min(self.max_model_len, self.capacity_tokens) - 1

    def uncached_tokens(self, num_tokens: int) -> int:
        """Return how many of a prompt's tokens it would compute."""
        return num_tokens - self.cached_tokens - self.loaded_tokens


def with_default_rates(candidates: Iterable[Candidate], fastest_rate: float = 0.0) -> list[Candidate]:
    """Return the candidates with a rate in place of each that is unknown."""
    return [
        c
        if c.prefill_rate and c.decode_rate and c.transfer_rate
        else replace(
            c,
            prefill_rate=prefill_rate(c.prefill_rate, fastest_rate),
            decode_rate=c.decode_rate or DECODE_RATE,
            transfer_rate=c.transfer_rate or TRANSFER_RATE,
        )
        for c in candidates
    ]


def to_candidate(
    info: NodeInfo, load: NodeLoad, send_words: frozenset[str], receive_words: frozenset[str]
) -> Candidate:
    """Return a worker as placement sees it, without what is placed on it. The words are those of `info`."""
    return Candidate(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        role=info.role,
        layout_id=info.layout_id,
        send_words=send_words,
        receive_words=receive_words,
        max_model_len=info.max_model_len,
        capacity_tokens=info.capacity_tokens,
        prompt_tokens_per_mixed_step=load.prompt_tokens_per_mixed_step,
        bounds_gaps=load.bounds_gaps,
        prefill_rate=sound_rate(load.prefill_rate),
        decode_rate=sound_rate(load.decode_rate),
        transfer_rate=sound_rate(load.transfer_rate),
        bad_paths=frozenset(load.bad_paths),
    )


def sound_rate(rate: float) -> float:
    """Return a measured rate, or 0.0 for what can't be one."""
    return rate if math.isfinite(rate) and rate > 0 else 0.0


def prefill_rate(measured: float, fastest_rate: float) -> float:
    """Return the rate that a worker measured, or else is taken to have, in tokens a second."""
    return measured or fastest_rate or PREFILL_RATE
