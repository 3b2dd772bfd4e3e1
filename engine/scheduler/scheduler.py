"""The choice of the tokens that run in the next step.

Continuous batching, chunked prefill under a token budget, no torch and no clock.

Decodes come first and prefill chunks fill what is left of the budget, so a long prompt never stalls a running answer
(Sarathi-Serve, Agrawal et al., OSDI 2024).
"""

import logging
from array import array
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from contracts.ids import RequestId
from contracts.kv_loss import EXACT
from engine.cache.block_pool import BlockPool
from engine.cache.load_plan import LowerTiers
from engine.fair_turns import FairTurns, Urgency
from engine.prefix_loads import end_load, missing_prefix
from engine.scheduler.batch import Batch, ScheduledChunk
from engine.scheduler.draft_rows import DraftRows
from engine.scheduler.mixed_budget import MixedBudget
from engine.scheduler.scheduler_limits import SchedulerLimits
from engine.scheduler.step_budget import StepBudget
from engine.sequence import Sequence, Status

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PendingReservation:
    """What an offer from elsewhere waits for: a place among those that run, and so many blocks."""

    request_id: RequestId
    urgency: Urgency
    num_blocks: int


class Scheduler:
    """The order of requests: by priority, and within one by turns that are fair among tenants (FairTurns).

    The one that waits longest is not promised a turn while more urgent ones keep coming. When blocks run out, the least
    urgent sequence gives its own back and is computed again later.

    Offers from elsewhere wait in another queue, whose first has the `claim`. The first of each queue leaves that of the
    other, if it comes before, room to begin: neither queue starves, and of two that wait only one waits for the other.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        before_preemption: Callable[[Sequence], None] = lambda _: None,
        drafts: DraftRows | None = None,
    ) -> None:
        self._pool = pool
        self._limits = limits
        self.drafts = drafts
        self._before_preemption = self._on_loaded = before_preemption  # either way its blocks become findable
        self.mixed_budget = MixedBudget(
            limits.max_mixed_tokens, pool.block_size, limits.graph_rows, limits.itl_objective_s
        )
        self.turns = FairTurns()
        self._refused: tuple[Sequence, int, int] | None = None
        self.claim: PendingReservation | None = None
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.loading: dict[RequestId, Sequence] = {}
        self.lower_tiers: LowerTiers | None = None
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.loading)

    @property
    def num_active(self) -> int:
        """Return how many have their pages: those that run, and those whose prefix is being loaded."""
        return len(self.running) + len(self.loading)

    def has_preempted_before(self, urgency: Urgency) -> bool:
        preempted = (sequence for sequence in self.waiting if sequence.started or sequence.has_grown)
        return any(sequence.urgency < urgency for sequence in preempted)

    def room_before(self, urgency: Urgency, num_reserved: int) -> tuple[int, int]:
        """Return the places and blocks that an offer leaves to the first that waits.

        So the next step finds it room: beside the offer and all that run or may run by then, which grow by up to a
        block in that step and are left another.

        Nothing to one that is to be handed over: two workers whose prompts wait for each other's pages would not go on.
        """
        first = self.waiting[0] if self.waiting else None
        if first is None or first.urgency > urgency or first.handoff:
            return 0, 0
        num_blocks, num_growing = self._num_blocks(len(first.tokens)), self.num_active + num_reserved + 1
        return (1, num_blocks + 2 * num_growing) if self._may_begin(num_blocks, num_reserved) else (0, 0)

    def give_up(self, request_id: RequestId) -> None:
        """The claim, if it is that request's."""
        if self.claim is not None and self.claim.request_id == request_id:
            self.claim = None

    def add(self, sequence: Sequence) -> None:
        sequence.turn = self.turns.give(sequence.priority, sequence.tenant, sequence.cost)
        insort(self.waiting, sequence, key=_URGENCY)

    def resume(self, sequence: Sequence) -> None:
        """Run a sequence that has its blocks already: adopted from elsewhere, or held and continued here."""
        if sequence.turn is None:
            sequence.turn = self.turns.give(sequence.priority, sequence.tenant, sequence.cost)
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_URGENCY)

    def remove(self, sequence: Sequence) -> None:
        """Forget it; its blocks stay with the caller."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
            if not sequence.started:
                self.turns.give_back(sequence.priority, sequence.tenant, sequence.cost)
        elif sequence.status is Status.LOADING and self.lower_tiers is not None:
            self.lower_tiers.cancel(sequence.request_id)
            del self.loading[sequence.request_id]
            if not sequence.started:
                self.turns.give_back(sequence.priority, sequence.tenant, sequence.cost)

    def take_blocks(self, sequence: Sequence, num_tokens: int, num_spare: int, num_incoming: int | None = None) -> bool:
        """Give `sequence` blocks for so many tokens, the cached ones of its prompt first: those are computed.

        False, and nothing changes, if fewer than `num_spare` were left to others. `num_incoming`: the KV of so many
        tokens, and of the rest, comes from elsewhere as far as it is not cached; None: it is computed here.

        At least its last token is computed, and all of a prompt that is to be scored: a cached block has no logits.
        """
        size = self._pool.block_size
        limit = (len(sequence.tokens) - 1) // size if sequence.num_scored >= sequence.num_prompt else 0
        accepted = sequence.accepted_loss
        groups, found = self._pool.groups, self._pool.find(sequence.each_digest(size, limit), sequence.tokens, accepted)
        cached = found[: groups.usable(found) if num_incoming is None else groups.usable_before(found, num_incoming)]
        missing = self._num_blocks(num_tokens) - len(cached)
        if not self._pool.fits(missing + num_spare, cached):
            return False
        most_tokens = max(num_tokens, sequence.answer_start + sequence.sampling.max_tokens)
        lease = groups.open(most_tokens, 0 if num_incoming is None else num_tokens - num_incoming)
        if lease is None:
            return False
        # Where others went on, and where the same prompt would, for another choice of its answer.
        lease.branches, hit = (len(found), (sequence.num_prompt - 1) // size), len(cached) * size
        groups.cover(lease, cached, hit if num_incoming is None else num_incoming, hit, hit)
        self._pool.retain(cached)
        sequence.lease = lease
        sequence.blocks.extend(cached)
        sequence.blocks.extend(self._pool.allocate(missing))
        if num_incoming is not None:
            groups.cover(lease, sequence.blocks, num_incoming, hit, num_tokens)
        sequence.num_inserted_blocks = len(cached)
        sequence.num_computed = len(cached) * size
        if accepted and (num_exact := self._pool.num_exact(cached, sequence.digests)) < len(cached):
            sequence.lose(num_exact * size, accepted)
        return True

    def schedule(self, num_reserved: int = 0) -> Batch:
        """The next step.

        Takes the blocks that it needs, preempting if it must; empty if nothing can run. `num_reserved`: answers that
        are expected from elsewhere. They would wait for the step's end like those that run, and a place is theirs.
        """
        self._end_loads()
        pieces = self._decodes()
        has_answers = len(pieces) + num_reserved > 0
        waiting = self._waiting_prompts() if has_answers and self.mixed_budget.has_objective else (0, 0)
        if self.drafts is not None and pieces:
            num_left = min(self._limits.max_batched_tokens - len(pieces), self._limits.max_draft_rows)
            pieces = self.drafts.add(pieces, len(self.running), num_left)
            for piece in pieces:
                self._cover(piece)
        num_rows = sum(piece.num_rows for piece in pieces)
        beside_answers = self.mixed_budget.prompt_tokens(num_rows, *waiting)
        budget = StepBudget(self._limits.max_batched_tokens - num_rows, beside_answers, has_answers)
        if prompts := sorted((s for s in self._in_turn if not s.is_decoding), key=_rest):
            # Who comes before the rest of a prompt that is being computed does not wait for it, which may be long.
            pieces += self._admit(budget, num_reserved, before=_rest(prompts[0]))
            pieces += self._chunks(prompts, budget)
        pieces += self._admit(budget, num_reserved)
        pieces.sort(key=_phase)
        started = tuple(piece.sequence for piece in pieces if not piece.sequence.started)
        for sequence in started:
            sequence.started = True
            self.turns.begin(*sequence.urgency)
        return Batch(tuple(pieces), started)

    def _waiting_prompts(self) -> tuple[int, int]:
        """Return the tokens of prompts that are to be computed, and those computed of the first."""
        prompts = [s for s in (*self.running, *self.waiting) if not s.is_decoding]
        return sum(len(s.tokens) - s.num_computed for s in prompts), prompts[0].num_computed if prompts else 0

    @property
    def _in_turn(self) -> list[Sequence]:
        return self.running[: self._limits.max_num_seqs]

    def _decodes(self) -> list[ScheduledChunk]:
        pieces: list[ScheduledChunk] = []
        for sequence in [s for s in self._in_turn if s.is_decoding]:
            if sequence.status is Status.RUNNING and self._make_room(sequence):
                pieces.append(ScheduledChunk(sequence, sequence.num_computed, 1))
        for piece in pieces:  # not one that was preempted for another's sake
            self._cover(piece)
        return pieces

    def _cover(self, piece: ScheduledChunk) -> None:
        """Hold the pages of groups of short life that computing a chunk reads and writes."""
        sequence, first = piece.sequence, piece.first_token
        if sequence.lease is not None:
            self._pool.groups.settle(sequence.lease, first)  # of drafts, more were accepted since the last step
            self._pool.groups.cover(sequence.lease, sequence.blocks, first, first, first + piece.num_rows)

    def _make_room(self, sequence: Sequence) -> bool:
        """Make room for one more token of the sequence.

        Preempts less urgent ones, or itself: then returns False.
        """
        missing = self._num_blocks(len(sequence.tokens)) - len(sequence.blocks)
        while missing > self._pool.num_available:
            victim = self._least_urgent(sequence)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks.extend(self._pool.allocate(missing))
        return True

    def _least_urgent(self, sequence: Sequence) -> Sequence | None:
        """The last that is not more urgent than `sequence` and whose blocks nobody else reads."""
        candidates = [s for s in self.running if s.urgency >= sequence.urgency and not s.is_pinned]
        return candidates[-1] if candidates else None

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._before_preemption(sequence)
        self._give_back(sequence)
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_URGENCY)
        self.num_preemptions += 1
        _log.debug(
            "request %s is preempted: its %d tokens are computed again once there are KV blocks",
            sequence.request_id, len(sequence.tokens),
        )  # fmt: skip

    def _chunks(self, sequences: list[Sequence], budget: StepBudget) -> list[ScheduledChunk]:
        pieces: list[ScheduledChunk] = []
        for sequence in sequences:
            piece = self._chunk(sequence, budget.num_tokens)
            if piece is None or not budget.take(piece):
                break
            self._cover(piece)
            pieces.append(piece)
        return pieces

    def _chunk(self, sequence: Sequence, budget: int) -> ScheduledChunk | None:
        """Return as much of the prompt (or, after a preemption, of the answer) as the budget allows.

        A chunk of what is handed over ends on a block's edge, unless it is the last: no block is sent half full. So do
        all chunks of prompts whose states are kept at blocks' ends.
        """
        first = sequence.num_computed
        whole = sequence.num_prefilled if first < sequence.num_prefilled else len(sequence.tokens)
        end = min(whole, first + budget)
        if sequence.lease is not None:
            end = self._pool.groups.limit(sequence.lease, first, end)
        if end < whole and self._is_cut_at_blocks(sequence):
            end -= end % self._pool.block_size
        return ScheduledChunk(sequence, first, end - first) if end > first else None

    def _is_cut_at_blocks(self, sequence: Sequence) -> bool:
        is_prompt = sequence.num_computed < sequence.num_prefilled
        return sequence.handoff or (is_prompt and self._pool.groups.has_states)

    def _admit(self, budget: StepBudget, num_reserved: int, before: Urgency | None = None) -> list[ScheduledChunk]:
        """Begin prompts that wait, all or those `before` somebody, as far as there is room for them."""
        pieces: list[ScheduledChunk] = []
        while self.waiting and self.num_active + num_reserved < self._limits.max_num_seqs and budget.num_tokens > 0:
            sequence = self.waiting[0]
            if before is not None and sequence.urgency > before:
                break
            least = min(self._pool.block_size, len(sequence.tokens)) if self._is_cut_at_blocks(sequence) else 0
            if budget.num_tokens < least:
                break  # nothing of it could be computed
            if not self._finds_room(sequence, num_reserved):
                break
            if self._begins_to_load(sequence):
                del self.waiting[0]
                continue
            piece = self._chunk(sequence, budget.num_tokens)
            if piece is None or not budget.take(piece):
                self._give_back(sequence)
                break
            del self.waiting[0]
            self.resume(sequence)
            self._cover(piece)
            pieces.append(piece)
            self._count_prefix(sequence)
        return pieces

    def _begins_to_load(self, sequence: Sequence) -> bool:
        """Return whether lower tiers fill pages of this sequence now; it runs once they have."""
        if self.lower_tiers is None or sequence.num_scored < sequence.num_prompt:
            return False
        load = missing_prefix(sequence, self._pool.block_size)
        if load is None or not self.lower_tiers.begin(load):
            return False
        sequence.status = Status.LOADING
        self.loading[sequence.request_id] = sequence
        return True

    def _end_loads(self) -> None:
        """Run the sequences whose loads have ended, behind what was loaded."""
        if self.lower_tiers is None or not self.loading:
            return
        for ended in self.lower_tiers.finished():
            sequence = self.loading.pop(ended.request_id)
            end_load(sequence, ended, self._pool)
            sequence.load_s = ended.seconds
            if self.waiting or self.loading:  # one of them may share what was loaded
                self._on_loaded(sequence)  # else once its batch is launched: it takes thousands of tokens 0.5 ms
            self._count_prefix(sequence)
            self.resume(sequence)

    def _count_prefix(self, sequence: Sequence) -> None:
        self.num_prefix_queries += len(sequence.tokens)
        self.num_prefix_hits += sequence.num_computed

    def _claimed_before(self, sequence: Sequence, num_reserved: int) -> tuple[int, int]:
        """Places and blocks."""
        claim = self.claim
        if claim is None or claim.urgency > sequence.urgency:
            return 0, 0
        return (1, claim.num_blocks) if self._may_begin(claim.num_blocks, num_reserved) else (0, 0)

    def _may_begin(self, num_blocks: int, num_reserved: int) -> bool:
        """Return whether a request of so many blocks can be waited for.

        Blocks that no running sequence will set free are held, or being read by a peer: to leave room for who waits for
        those would keep an idle worker idle.
        """
        return bool(self.num_active or num_reserved) or num_blocks <= self._pool.num_available

    def _finds_room(self, sequence: Sequence, num_reserved: int) -> bool:
        """Blocks for the whole prompt.

        Leaves one block for each running sequence to grow into, and its claim to an offer that comes before. What found
        none looks again when there may be more: each step of the others would wait for a look-up of all of a long
        prompt.
        """
        num_places, num_claimed = self._claimed_before(sequence, num_reserved)
        if self.num_active + num_reserved + num_places >= self._limits.max_num_seqs:
            return False
        num_spare = self.num_active + num_claimed
        tried = sequence, self._pool.num_gains, num_spare
        if tried == self._refused:
            return False
        finds = self.take_blocks(sequence, len(sequence.tokens), num_spare)
        self._refused = None if finds else tried
        return finds

    def _give_back(self, sequence: Sequence) -> None:
        self._pool.groups.end(sequence.lease)
        self._pool.release(sequence.blocks)
        sequence.lease = None
        sequence.blocks = array("i")  # not the same one emptied: a runner knows by the array whose table a device has
        sequence.num_computed = sequence.num_inserted_blocks = 0
        sequence.loss = EXACT  # that was of these blocks' KV

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)


def _phase(piece: ScheduledChunk) -> tuple[bool, bool, bool]:
    """Smaller first, as Batch has them."""
    return not piece.is_answer, not piece.is_decode, bool(piece.draft)


def _rest(sequence: Sequence) -> Urgency:
    """Return the urgency of what is left of a prompt: its turn has gone on by what was computed of it."""
    priority, (start, arrival) = sequence.urgency
    return priority, (start + sequence.cost * sequence.num_computed / len(sequence.tokens), arrival)


_URGENCY = attrgetter("urgency")
