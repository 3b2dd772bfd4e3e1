"""The figures of an engine."""

from collections.abc import Collection
from dataclasses import dataclass

from engine.cache.block_pool import BlockPool
from engine.messages import EngineStats
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence, Status
from engine.sequence_table import SequenceTable
from engine.speculative.speculator import DraftCounters


@dataclass
class StepCounters:
    """The steps since the start and their tokens."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0

    def add(self, num_prefill: int, num_decode: int) -> None:
        self.num_steps += 1
        self.num_prefill_tokens += num_prefill
        self.num_decode_tokens += num_decode


def engine_stats(
    table: SequenceTable,
    scheduler: Scheduler,
    compiling: Collection[Sequence],
    pool: BlockPool,
    counters: StepCounters,
    drafts: DraftCounters | None = None,
) -> EngineStats:
    """Return how an engine stands now. `compiling`: the sequences that wait for their grammars."""
    drafts = drafts or DraftCounters()
    queued = (*scheduler.waiting, *scheduler.running, *scheduler.loading.values(), *compiling)
    num_answers = sum(sequence.is_decoding for sequence in scheduler.running)
    num_prompt_tokens = sum(len(s.tokens) - s.num_computed for s in queued if not s.is_decoding)
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + len(scheduler.loading) + len(compiling),
        num_held=table.count(Status.HELD),
        num_reserved=table.count(Status.RESERVED),
        queue_tokens=sum(len(s.tokens) - s.num_computed for s in queued),
        free_tokens=pool.num_available * pool.block_size,
        prompt_tokens_per_mixed_step=scheduler.mixed_budget.prompt_tokens(num_answers, num_prompt_tokens),
        num_cached_blocks=pool.num_cached,
        num_steps=counters.num_steps,
        prefix_query_tokens=scheduler.num_prefix_queries,
        prefix_hit_tokens=scheduler.num_prefix_hits,
        num_preemptions=scheduler.num_preemptions,
        num_prefill_tokens=counters.num_prefill_tokens,
        num_decode_tokens=counters.num_decode_tokens,
        num_drafts=drafts.num_drafts,
        num_draft_tokens=drafts.num_draft_tokens,
        num_accepted_by_place=tuple(drafts.accepted_by_place),
    )
