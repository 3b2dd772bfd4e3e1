"""Which workers serve a request: a cost model in plain arithmetic. lua/place.lua does the same sums in the same order.

Costs are in seconds of time to first token, plus what the newcomer costs the answers already running.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from contracts.errors import Overloaded, RequestError, TandemError, Unavailable
from contracts.ids import Epoch, Incarnation, RequestId, WorkerId
from contracts.node import NodeLoad, WorkerRole
from coordinator.store.store import AFFINITY_BLOCK, AFFINITY_BLOCKS, AFFINITY_TTL_S

OUTPUT_CREDIT_TOKENS = 256
"""Credit for an answer is at most this. `max_tokens` is a bound that clients leave at its default of thousands, while
answers in chats average 200 to 350 tokens, of which a running one holds half. What does grow longer shows in the
worker's own report of free tokens, which counts beyond the credit.
"""

OVERCOMMIT = 4.0
"""KV credit over capacity. Beyond 1, requests wait for pages at the workers.

Users expect a server to queue, and to refuse only once the queue is several pools long.
"""

MAX_PREFILL_WAIT_S = 30.0
"""Prompts queue for no longer than clients are patient; beyond, they are refused with the time to come back. Nobody is
before a worker has measured how long that is.
"""

PREFILL_RATE = 2000.0
DECODE_RATE = 200.0
TRANSFER_RATE = 50_000.0
"""Tokens a second of a worker that has not measured its own yet: those of a small model on a CPU. Who has not measured
prefill counts as the fastest of those that have: else the first to serve a long prompt would be given all that follow.
"""

HANDOFF_S = 0.005
"""What a handoff costs beside the bytes: messages, and the step that is under way at decode. No rate of a worker tells
it: 0.5 ms was measured on an idle pair of GPUs, 4 beside answers, 5 to 38 on a CPU (docs/placement.md).
"""

BAD_PATH_S = 2.0
"""What a handoff costs that does not get through, and is tried elsewhere: the time in which a connection must be made
(kv_transfer.settings). Paths are marked, not workers, and a marked one is no worse than this: where all are full but
for it, it is tried.
"""

ITL_S = 0.01
"""lambda x dITL: what one more answer costs those running beside it."""

STALL_WEIGHT = 0.5
LONG_GAP_S = 0.04
"""Prompts in a mixed worker, computed or waiting, take about half of each step from each of the answers it decodes.
That counts in full where gaps between tokens get as long as LONG_GAP_S, and the less the shorter they stay. Answers
whose prompts still wait at prefill lose nothing: counted, too, a queue there made the decode worker look ever more
worth sparing, and grew.
"""

TOP = 8
"""Pairs are made from the few cheapest of each side, if any two of these meet."""

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0

CONSTANTS: dict[str, float] = {
    "AFFINITY_BLOCK": AFFINITY_BLOCK,
    "AFFINITY_BLOCKS": AFFINITY_BLOCKS,
    "AFFINITY_TTL_S": AFFINITY_TTL_S,
    "OVERCOMMIT": OVERCOMMIT,
    "MAX_PREFILL_WAIT_S": MAX_PREFILL_WAIT_S,
    "PREFILL_RATE": PREFILL_RATE,
    "DECODE_RATE": DECODE_RATE,
    "TRANSFER_RATE": TRANSFER_RATE,
    "HANDOFF_S": HANDOFF_S,
    "BAD_PATH_S": BAD_PATH_S,
    "ITL_S": ITL_S,
    "STALL_WEIGHT": STALL_WEIGHT,
    "LONG_GAP_S": LONG_GAP_S,
    "TOP": TOP,
}
"""What the script needs to know."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A live worker that takes work. Tokens include credits taken since its last heartbeat; rates are 0 while unknown.

    `num_answers`: of `num_decodes`, those whose prompts are computed. `cached_tokens`: of this prompt's prefix, served
    here before. `send_words`, `receive_words`: as of NodeInfo. `prompt_tokens_per_mixed_step`, `bad_paths`: as of
    NodeLoad.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    role: WorkerRole
    layout_id: str
    max_model_len: int
    capacity_tokens: int
    prompt_tokens_per_mixed_step: int
    pending_tokens: int
    reserved_tokens: int
    num_decodes: int
    num_answers: int
    cached_tokens: int = 0
    send_words: frozenset[str]
    receive_words: frozenset[str]
    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    transfer_rate: float = 0.0
    bad_paths: frozenset[Incarnation] = frozenset()


@dataclass(frozen=True)
class PlacementChoice:
    """`uncached_tokens`: what the prefill worker has to compute."""

    prefill: Candidate
    decode: Candidate
    uncached_tokens: int


def choose(candidates: Sequence[Candidate], num_tokens: int, need_tokens: int) -> PlacementChoice:
    """The cheapest pair, or one worker as both. `candidates` come sorted by worker id, which breaks ties.

    Raises Unavailable, RequestError or Overloaded.
    """
    if need_tokens == num_tokens + 1:
        candidates = [_as_whole(c) for c in candidates if c.role != WorkerRole.DECODE]
    knows_rate = any(c.prefill_rate for c in candidates)
    candidates = with_default_rates(candidates)
    prefills = _fitting([c for c in candidates if c.role != WorkerRole.DECODE], "prefill", num_tokens)
    decodes = _fitting([c for c in candidates if c.role != WorkerRole.PREFILL], "decode", num_tokens)
    # Who meets nobody is passed over first: it is always idle, and would hide that the others are full.
    prefills = [p for p in prefills if any(_can_exchange_kv(p, d) for d in decodes)]
    if not prefills:
        raise no_pair()
    ready = [p for p in prefills if not knows_rate or p.pending_tokens <= _max_pending(p)]
    if not ready:
        raise overloaded("prefill", min((p.pending_tokens - _max_pending(p)) / p.prefill_rate for p in prefills))
    decodes = [d for d in decodes if any(_can_exchange_kv(p, d) for p in ready)]
    roomy = [d for d in decodes if _excess(d, need_tokens) <= 0 or d.reserved_tokens == 0]
    if not roomy:
        raise overloaded("decode", min(_excess(d, need_tokens) / d.decode_rate for d in decodes))
    ready = sorted(ready, key=lambda p: _prefill_s(p, num_tokens))
    roomy = sorted(roomy, key=lambda d: _decode_s(d, need_tokens))
    pairs = _pairs(ready[:TOP], roomy[:TOP]) or _pairs(ready, roomy)
    # Of pairs that cost the same, one of equal layouts: nothing is converted on the way.
    costs = [(cost_s(p, d, num_tokens, need_tokens), p.layout_id != d.layout_id) for p, d in pairs]
    prefill, decode = pairs[costs.index(min(costs))]
    return PlacementChoice(prefill, decode, num_tokens - prefill.cached_tokens)


def with_default_rates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """With a rate in place of each that is unknown."""
    fastest = max((c.prefill_rate for c in candidates), default=0.0) or PREFILL_RATE
    return [
        replace(
            c,
            prefill_rate=c.prefill_rate or fastest,
            decode_rate=c.decode_rate or DECODE_RATE,
            transfer_rate=c.transfer_rate or TRANSFER_RATE,
        )
        for c in candidates
    ]


def cost_s(prefill: Candidate, decode: Candidate, num_tokens: int, need_tokens: int) -> float:
    """Wait and compute, what of the transfer shows, wait on decode; and the delay of others. Of known rates."""
    compute_s = (num_tokens - prefill.cached_tokens) / prefill.prefill_rate
    stall_s = _stall_weight(prefill) * compute_s * prefill.num_answers
    cost = _prefill_s(prefill, num_tokens) + _decode_s(decode, need_tokens) + stall_s
    if prefill.worker_id == decode.worker_id:
        return cost
    transfer_s = (num_tokens - decode.cached_tokens) / prefill.transfer_rate
    crowding_s = ITL_S * prefill.num_decodes + _stall_weight(decode) * (decode.pending_tokens / decode.prefill_rate)
    detour_s = BAD_PATH_S if decode.incarnation in prefill.bad_paths else 0.0
    return cost + (HANDOFF_S + max(0.0, transfer_s - compute_s)) + crowding_s + detour_s


def decode_need(num_tokens: int, max_tokens: int) -> int:
    """KV credit of a request, in tokens."""
    return num_tokens + min(max_tokens, OUTPUT_CREDIT_TOKENS)


def max_prefixes(capacity_tokens: int) -> int:
    """How many prefix blocks of a worker are remembered: what its cache can hold."""
    return max(AFFINITY_BLOCKS, capacity_tokens // AFFINITY_BLOCK)


def sound_rate(rate: float) -> float:
    """A measured rate, or 0.0 for what can't be one."""
    return rate if math.isfinite(rate) and rate > 0 else 0.0


def is_busy(load: NodeLoad) -> bool:
    """Whether `free_tokens` is a measurement: a worker that has not measured yet says 0."""
    return load.num_running > 0


def no_worker(side: str) -> TandemError:
    return Unavailable(f"no live {side} worker that takes work")


def no_pair() -> TandemError:
    return Unavailable("no decode worker can take the KV of a prefill worker; GET /ready says where they differ")


def too_long(num_tokens: int, most_tokens: int) -> TandemError:
    return RequestError(f"a prompt of {num_tokens} tokens; no worker takes more than {most_tokens}")


def superseded(worker_id: WorkerId) -> TandemError:
    return Unavailable(f"worker id {worker_id!r} belongs to a newer process; give this one another id")


def stale(request_id: RequestId, epoch: Epoch) -> TandemError:
    return Unavailable(f"request {request_id} has ended, or is past attempt {epoch}")


def overloaded(side: str, wait_s: float) -> Overloaded:
    return Overloaded(f"all {side} workers are full", min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))


def to_lua() -> str:
    """The constants as Lua locals."""
    return "\n".join(f"local {name} = {value!r}" for name, value in CONSTANTS.items())


def _stall_weight(worker: Candidate) -> float:
    gap_s = worker.prompt_tokens_per_mixed_step / worker.prefill_rate
    return STALL_WEIGHT * min(1.0, gap_s / LONG_GAP_S)


def _can_exchange_kv(prefill: Candidate, decode: Candidate) -> bool:
    return prefill.worker_id == decode.worker_id or not prefill.send_words.isdisjoint(decode.receive_words)


def _as_whole(candidate: Candidate) -> Candidate:
    """An answer of one token ends where its prompt is computed: its KV would be moved for nothing."""
    return replace(candidate, role=WorkerRole.MIXED, send_words=frozenset(), receive_words=frozenset())


def _pairs(prefills: list[Candidate], decodes: list[Candidate]) -> list[tuple[Candidate, Candidate]]:
    return [(p, d) for p in prefills for d in decodes if _can_exchange_kv(p, d)]


def _fitting(candidates: list[Candidate], side: str, num_tokens: int) -> list[Candidate]:
    if not candidates:
        raise no_worker(side)
    fitting = [c for c in candidates if num_tokens <= _longest(c)]
    if not fitting:
        raise too_long(num_tokens, max(_longest(c) for c in candidates))
    return fitting


def _longest(candidate: Candidate) -> int:
    """The longest prompt it takes: one token of answer must fit too."""
    return min(candidate.max_model_len, candidate.capacity_tokens) - 1


def _max_pending(prefill: Candidate) -> float:
    return prefill.prefill_rate * MAX_PREFILL_WAIT_S


def _excess(decode: Candidate, need_tokens: int) -> float:
    return decode.reserved_tokens + need_tokens - decode.capacity_tokens * OVERCOMMIT


def _prefill_s(prefill: Candidate, num_tokens: int) -> float:
    return (prefill.pending_tokens + (num_tokens - prefill.cached_tokens)) / prefill.prefill_rate


def _decode_s(decode: Candidate, need_tokens: int) -> float:
    over_tokens = max(0, decode.reserved_tokens + need_tokens - decode.capacity_tokens)
    return over_tokens / decode.decode_rate + ITL_S * (decode.num_decodes + 1)
