"""The placement policy: which workers could serve a request, and what each choice costs.

Costs are in seconds of time to first token, plus what the newcomer costs the answers already running. A cost is linear
in the counts of the two workers, so that a store can add it up anew by fresher ones: `WorkerCost`.
"""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from contracts.ids import WorkerId
from contracts.node import NodeLoad, WorkerRole
from coordinator.placement.candidate import DECODE_RATE, Candidate, with_default_rates
from coordinator.placement.reuse import with_load
from coordinator.refusals import no_pair, no_worker, overloaded, too_long
from coordinator.store.store import WorkerCost, WorkerCounts

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

SPILL_WAIT_S = 0.04
"""How much sooner a decode worker has to compute a prompt than all prefill workers, to be given it.

So it gets what their queues cannot hold: at most a hundredth of the prompts of 1024 tokens at 40/s, a tenth of those
of 8192 at 8/s, where one GPU cannot compute all. It is simulated (bench.serving.simulated_pair).
"""

SPILL_GAP_S = 0.015
"""The longest step of prompts beside answers with which a decode worker computes any: it is there for short gaps."""

TOP = 8
"""Pairs are made from the few cheapest of each side, if any two of these can exchange KV."""

NUM_OFFERED = 8
"""Workers between whom routes, as many at most, are offered, half of them a side: the store knows the cheapest."""


Pair = tuple[Candidate, Candidate]
"""The worker that computes the prompt, and the one that answers; one may be both."""


class RouteOffer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A route that may be taken, with its cost by the counts of the view.

    `base_s`: the part of the cost that no count changes. `uncached_tokens`: what the prefill worker has to compute.
    """

    prefill: Candidate
    decode: Candidate
    uncached_tokens: int
    base_s: float
    prefill_cost: WorkerCost
    decode_cost: WorkerCost
    cost_s: float


def choose(
    candidates: Sequence[Candidate],
    num_tokens: int,
    need_tokens: int,
    *,
    fastest_rate: float = 0.0,
    num_offered: int = NUM_OFFERED,
    top: int = TOP,
    room: float = 1.0,
) -> list[RouteOffer]:
    """Return routes between the cheapest workers, the cheapest first; a route may be one worker as both.

    `candidates` come sorted by worker id, which breaks ties. `fastest_rate`: the highest prefill rate that is known,
    perhaps of a worker that is no candidate; 0 for that of the candidates. `room`: the part of the workers' queues that
    this request may fill, see `max_pending`. Raises Unavailable, RequestError or Overloaded.
    """
    if need_tokens == num_tokens + 1:
        candidates = [_as_whole(c) for c in candidates if c.role is not WorkerRole.DECODE]
    fastest_rate = fastest_rate or max((c.prefill_rate for c in candidates), default=0.0)
    candidates = [with_load(c, num_tokens) if c.held else c for c in with_default_rates(candidates, fastest_rate)]
    prefills = _fitting([c for c in candidates if c.role is not WorkerRole.DECODE], "prefill", num_tokens)
    decodes = _fitting([c for c in candidates if c.role is not WorkerRole.PREFILL], "decode", num_tokens)
    # Workers that no other can exchange KV with are passed over first: they idle, and would hide that others are full.
    taken, names = {d.receive_words for d in decodes}, {d.worker_id for d in decodes}
    sent = _shared({p.send_words for p in prefills}, taken)
    prefills = [p for p in prefills if p.send_words in sent or p.worker_id in names]
    if not prefills:
        raise no_pair()
    ready = [p for p in prefills if not fastest_rate or p.pending_tokens <= max_pending(p, room)]
    if not ready:
        raise overloaded("prefill", min((p.pending_tokens - max_pending(p, room)) / p.prefill_rate for p in prefills))
    taken, names = _shared(taken, {p.send_words for p in ready}), {p.worker_id for p in ready}
    decodes = [d for d in decodes if d.receive_words in taken or d.worker_id in names]
    over = {d.worker_id: d.reserved_tokens - max_reserved(d, need_tokens, room) for d in decodes}
    roomy = [d for d in decodes if over[d.worker_id] <= 0 or d.reserved_tokens == 0]
    if not roomy:
        raise overloaded("decode", min(over[d.worker_id] / d.decode_rate for d in decodes))
    ready = sorted(ready, key=lambda p: _prefill_s(p, num_tokens))
    roomy = sorted(roomy, key=lambda d: _decode_s(d, need_tokens))
    few = _cheapest(ready[:top], roomy[:top], num_tokens, need_tokens)
    pairs = few or _cheapest(ready, roomy, num_tokens, need_tokens)
    # Only with a prefill worker there, which it relieves: a pool that lost them all is to be noticed.
    if takers := [(d, d) for d in roomy[:top] if may_take_prompts(d)]:
        pairs = sorted([*pairs, *takers], key=lambda pair: offer(*pair, num_tokens, need_tokens).cost_s)
    return [offer(p, d, num_tokens, need_tokens) for p, d in _first_workers(pairs, num_offered)]


def offer(prefill: Candidate, decode: Candidate, num_tokens: int, need_tokens: int) -> RouteOffer:
    """Return a route and its cost: wait, compute, transfer, and the delay of others.

    Rates must be known.
    """
    is_pair = prefill.worker_id != decode.worker_id
    base_s = _base_s(prefill, decode, num_tokens)
    prefill_cost, decode_cost = _prefill_cost(prefill, num_tokens, is_pair), _decode_cost(decode, is_pair)
    return RouteOffer(
        prefill=prefill,
        decode=decode,
        uncached_tokens=prefill.uncached_tokens(num_tokens),
        base_s=base_s,
        prefill_cost=prefill_cost,
        decode_cost=decode_cost,
        cost_s=base_s + _seconds(prefill_cost, prefill, need_tokens) + _seconds(decode_cost, decode, need_tokens),
    )


def _shared(words: set[frozenset[str]], others: set[frozenset[str]]) -> set[frozenset[str]]:
    """Return those that have a word in common with one of the others."""
    return {those for those in words if any(not those.isdisjoint(other) for other in others)}


def max_pending(prefill: Candidate, room: float = 1.0) -> float:
    """Return how many tokens of prompts may wait at a worker that takes one more.

    `room`: less than 1 for a tenant that has more than its part of what is in progress, so that others find some.
    """
    return prefill.prefill_rate * MAX_PREFILL_WAIT_S * room


def max_reserved(decode: Candidate, need_tokens: int, room: float = 1.0) -> float:
    """Return how much KV may be promised at a worker that takes one more answer; none always may.

    `room` as for `max_pending`.
    """
    return decode.capacity_tokens * OVERCOMMIT * room - need_tokens


def decode_need(num_tokens: int, max_tokens: int) -> int:
    """Return the KV credit of a request, in tokens."""
    return num_tokens + min(max_tokens, OUTPUT_CREDIT_TOKENS)


def is_busy(load: NodeLoad) -> bool:
    """Return whether `free_tokens` is a measurement: a worker that has not measured yet says 0."""
    return load.num_running > 0


def is_idle(load: NodeLoad) -> bool:
    """Return whether a worker has neither a prompt nor an answer.

    Pages that wait to be handed over are no free tokens.
    """
    return not (load.num_running or load.num_waiting or load.queue_tokens)


def prefill_load_s(role: WorkerRole, counts: WorkerCounts, rate: float) -> float:
    """Return the wait that a prompt finds at a worker: the order in which workers are looked at."""
    stall_s = ITL_S * counts.num_decodes if role is WorkerRole.MIXED else 0.0
    return counts.pending_tokens / rate + stall_s


def decode_load_s(counts: WorkerCounts, capacity_tokens: int, decode_rate: float) -> float:
    """Return the wait that an answer of common length finds at a worker."""
    over_tokens = max(0, counts.reserved_tokens + OUTPUT_CREDIT_TOKENS - capacity_tokens)
    return over_tokens / (decode_rate or DECODE_RATE) + ITL_S * (counts.num_decodes + 1)


def _seconds(cost: WorkerCost, worker: Candidate, need_tokens: int) -> float:
    tokens_over = max(0, worker.reserved_tokens + need_tokens - worker.capacity_tokens)
    return cost.seconds(worker.pending_tokens, worker.num_decodes, tokens_over, worker.num_answers)


def may_take_prompts(decode: Candidate) -> bool:
    """Return whether a decode worker has said that its answers hardly notice the prompts it computes."""
    gap_s = decode.prompt_tokens_per_mixed_step / decode.prefill_rate
    is_short = decode.bounds_gaps and 0 < gap_s <= SPILL_GAP_S
    return is_short and decode.role is WorkerRole.DECODE and decode.pending_tokens <= max_pending(decode)


def _stall_weight(worker: Candidate) -> float:
    gap_s = worker.prompt_tokens_per_mixed_step / worker.prefill_rate
    return STALL_WEIGHT * min(1.0, gap_s / LONG_GAP_S)


def _as_whole(candidate: Candidate) -> Candidate:
    """Return a worker as both sides of an answer of one token, whose KV would be moved for nothing."""
    return replace(candidate, role=WorkerRole.MIXED, send_words=frozenset(), receive_words=frozenset())


def _fitting(candidates: list[Candidate], side: str, num_tokens: int) -> list[Candidate]:
    if not candidates:
        raise no_worker(side)
    fitting = [c for c in candidates if num_tokens <= c.max_prompt_tokens]
    if not fitting:
        raise too_long(num_tokens, max(c.max_prompt_tokens for c in candidates))
    return fitting


def _cheapest(prefills: list[Candidate], decodes: list[Candidate], num_tokens: int, need_tokens: int) -> list[Pair]:
    """Return all pairs that serve, the cheapest first.

    Where the cost is the same, one of equal layouts comes first, since nothing is converted on the way, then that of
    the shorter queues.
    """
    rows: list[tuple[float, bool, int, Pair]] = []
    answering = [(d, _seconds(_decode_cost(d, True), d, need_tokens)) for d in decodes]
    for p in prefills:
        ready_s = _ready_s(p, num_tokens)
        waiting_s = ready_s + ITL_S + _seconds(_prefill_cost(p, num_tokens, True), p, need_tokens)
        for d, answering_s in answering:
            if p.worker_id == d.worker_id:
                cost_s = offer(p, d, num_tokens, need_tokens).cost_s
            elif not p.send_words.isdisjoint(d.receive_words):
                cost_s = waiting_s + answering_s + _handoff_s(p, d, num_tokens, ready_s)
            else:
                continue
            rows.append((cost_s, p.layout_id != d.layout_id, len(rows), (p, d)))
    return [pair for *_, pair in sorted(rows)]


def _first_workers(pairs: list[Pair], num_workers: int) -> list[Pair]:
    """Return the first pairs of so many workers, half of them a side where two serve."""
    sides: tuple[set[WorkerId], set[WorkerId]] = set(), set()
    found: list[Pair] = []
    for pair in pairs:
        names = [worker.worker_id for worker in pair]
        most = num_workers if names[0] == names[1] else num_workers // 2
        has_room = all(name in side or len(side) < most for name, side in zip(names, sides, strict=True))
        if has_room and len(sides[0] | sides[1] | {*names}) <= num_workers:
            sides[0].add(names[0])
            sides[1].add(names[1])
            found.append(pair)
            if len(found) == num_workers:
                break
    return found


def _base_s(prefill: Candidate, decode: Candidate, num_tokens: int) -> float:
    ready_s = _ready_s(prefill, num_tokens)
    if prefill.worker_id == decode.worker_id:
        return ready_s + ITL_S + (SPILL_WAIT_S if decode.role is WorkerRole.DECODE else 0.0)
    return ready_s + ITL_S + _handoff_s(prefill, decode, num_tokens, ready_s)


def _compute_s(prefill: Candidate, num_tokens: int) -> float:
    return prefill.uncached_tokens(num_tokens) / prefill.prefill_rate


def _ready_s(prefill: Candidate, num_tokens: int) -> float:
    """Return how long a prompt takes once it is its turn: to load a part, and to compute the rest."""
    return prefill.load_s + _compute_s(prefill, num_tokens)


def _handoff_s(prefill: Candidate, decode: Candidate, num_tokens: int, ready_s: float) -> float:
    """Return what a handoff costs; the transfer is hidden while the prompt is loaded and computed."""
    exposed_s = (num_tokens - decode.cached_tokens) / prefill.transfer_rate - ready_s
    detour_s = BAD_PATH_S if decode.incarnation in prefill.bad_paths else 0.0
    return HANDOFF_S + detour_s + (exposed_s if exposed_s > 0.0 else 0.0)


def _prefill_cost(prefill: Candidate, num_tokens: int, is_pair: bool) -> WorkerCost:
    crowding_s = ITL_S if is_pair else 0.0
    stall_s = _stall_weight(prefill) * _compute_s(prefill, num_tokens)
    return WorkerCost(1 / prefill.prefill_rate, crowding_s, 0.0, stall_s)


def _decode_cost(decode: Candidate, is_pair: bool) -> WorkerCost:
    stall_s = _stall_weight(decode) / decode.prefill_rate if is_pair else 0.0
    return WorkerCost(stall_s, ITL_S, 1 / decode.decode_rate, 0.0)


def _prefill_s(prefill: Candidate, num_tokens: int) -> float:
    return prefill.pending_tokens / prefill.prefill_rate + _ready_s(prefill, num_tokens)


def _decode_s(decode: Candidate, need_tokens: int) -> float:
    over_tokens = max(0, decode.reserved_tokens + need_tokens - decode.capacity_tokens)
    return over_tokens / (decode.decode_rate or DECODE_RATE) + ITL_S * (decode.num_decodes + 1)
