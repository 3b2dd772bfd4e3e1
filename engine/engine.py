"""One model on one device: requests in, one batch a step, tokens and computed KV chunks out.

    engine = load_engine(EngineSettings())
    engine.submit(EngineRequest(request_id, token_ids, sampling))
    while engine.has_work():
        output = engine.step()

Handoff, prefill side: submit with `handoff=True`; `step` reports the prompt's KV as ChunkDone; after token 0 the
sequence is held until `release` (also when token 0 ended it: its pages may still be read), or goes on here after
`keep_local`. Handoff, decode side: `reserve` pages, `prepare` if there is time, let the transfer write them through
`pool_bytes`, `adopt` with token 0, decoding continues at index 1; `incoming_writer_ended` once nothing will write any
more. A page is free only when request and writer have both let go. A running answer moves the same way: `exports`
tells its KV while it runs, see engine.answer_export. Not thread-safe: one thread owns an engine.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from checkpoint.checkpoint import Checkpoint
from contracts.errors import ConfigError
from contracts.events import Token
from contracts.ids import RequestId
from contracts.layout import KVLayout
from engine.adapters import Adapters
from engine.answer_export import AnswerExport
from engine.backend import Backend, ignore_leaving
from engine.batch_sampling import TokenDraws
from engine.cache.block_pool import BlockPool, ignore_emptied
from engine.cache.deferred_release import DeferredRelease
from engine.cache.kv_groups import KVGroups
from engine.cache.load_plan import LowerTiers
from engine.cache.prefix_insertion import PrefixInserter
from engine.draft_verification import DraftVerification
from engine.fair_turns import Turn
from engine.forward_pass import ForwardPass
from engine.handoff import Handoff
from engine.intake import Intake
from engine.messages import EngineRequest, EngineStats, Reservation, StepObserver, StepOutput
from engine.prefill_measurement import measure_prefill_rate
from engine.prefix_export import PrefixExport
from engine.prefix_loads import ReservedLoads
from engine.request_release import RequestRelease
from engine.sampling.grammar_masks import Grammars
from engine.scheduler.draft_rows import DraftRows
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_limits import SchedulerLimits
from engine.sequence import Status
from engine.sequence_table import SequenceTable
from engine.settings import EngineSettings
from engine.speculative.acceptance_rule import acceptance_rule_of
from engine.speculative.choice import head_name, speculator_of
from engine.stats import engine_stats
from engine.step_pipeline import StepPipeline
from engine.stop_check import StopCheck

_UNOBSERVED = StepObserver()


class Engine:
    """The facade of an engine, see the module's docstring. engine.loader makes it."""

    def __init__(
        self,
        settings: EngineSettings,
        checkpoint: Checkpoint,
        backend: Backend,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        cache, sampler = backend.cache, backend.sampler
        vocab_size, max_model_len = checkpoint.config.vocab_size, backend.max_model_len
        budget = settings.max_batched_tokens
        self.checkpoint = checkpoint
        self.dtype = backend.dtype
        self.layout: KVLayout = cache.layout
        self.max_model_len = max_model_len
        max_mixed_tokens = min(settings.max_mixed_tokens or budget, budget)
        self.capacity_tokens = cache.num_blocks * cache.layout.block_size
        self._max_chunk_tokens = min(budget, max_model_len - 1, self.capacity_tokens)
        drafting = None if head_name(settings.speculate) is None else backend.drafting
        self.runner, self.sampler = backend.runner if drafting is None else drafting.runner, sampler
        self._cache, self._close = cache, backend.close
        emptied = ignore_emptied if drafting is None else drafting.drafter.forget_blocks
        num_draft_tokens = 0 if settings.speculate == "off" else settings.draft_tokens
        self.groups = groups = KVGroups(cache.layout, backend.page_tables, num_draft_tokens)
        self.pool = pool = BlockPool(cache.num_blocks, cache.layout.block_size, settings.prefix_cache, emptied, groups)
        self._prefix_cache = prefix_cache = PrefixInserter(pool, backend.caches_decoded_kv)
        limits = SchedulerLimits(
            settings.max_num_seqs, budget, max_mixed_tokens, self.runner.graph_rows, settings.itl_objective_s,
            self.runner.max_draft_rows,
        )  # fmt: skip
        drafter = None if drafting is None else drafting.drafter
        self.speculator = speculator = speculator_of(settings, max_model_len, drafter)
        draft_rows = None if speculator is None else DraftRows(pool, speculator)
        self.scheduler = scheduler = Scheduler(pool, limits, prefix_cache.insert_all, draft_rows)
        self.grammars = grammars = Grammars(checkpoint, sampler.mask_memory())
        self.sequences = table = SequenceTable()
        stop_check = StopCheck(sampler, max_model_len)
        self.adapters = Adapters(backend.load_adapter)
        for name, path in settings.lora_modules:
            self.adapters.load(name, path)
        self._intake = intake = Intake(
            table, scheduler, grammars, vocab_size, max_model_len, settings.max_num_waiting, self.runner.gives_hidden,
            self.adapters, checkpoint.config.num_labels > 0,
        )  # fmt: skip
        self.deferred = blocks = DeferredRelease(pool)
        self._reserved_loads = loads = ReservedLoads(table, pool)
        self._requests = requests = RequestRelease(
            table, scheduler, intake, grammars, prefix_cache, blocks, loads, speculator
        )
        forward_pass = ForwardPass(self.runner, cache, prefix_cache, requests, groups)
        draws = TokenDraws(self.runner, sampler, grammars, table, requests)
        verification = None
        if speculator is not None and draft_rows is not None:
            rule = acceptance_rule_of(settings)
            facts = draws, table, stop_check, speculator, draft_rows, rule
            verification = DraftVerification(*facts, backend.on_accepted)
        self.pipeline = StepPipeline(
            table, scheduler, pool, intake, grammars, requests, blocks, forward_pass, draws, stop_check, self.runner,
            max_mixed_tokens, clock, verification,
        )  # fmt: skip
        self._handoff = Handoff(
            table, scheduler, pool, prefix_cache, intake, grammars, requests, stop_check, self.runner, vocab_size,
            max_model_len, settings.max_num_seqs, self.pipeline.has_work,
        )  # fmt: skip
        settle = ignore_leaving if drafting is None else drafting.drafter.settle
        self.exports = AnswerExport(table, scheduler, pool, cache, settle)
        self.prefix_exports = PrefixExport(table, pool, cache)

    @property
    def pool_bytes(self) -> np.ndarray:
        """The KV cache as bytes, see engine.backend.PagedCache."""
        return self._cache.pool_bytes

    @property
    def transfer_pool(self) -> Any:
        """See engine.backend.PagedCache."""
        return self._cache.transfer_pool

    def use_lower_tiers(self, tiers: LowerTiers) -> None:
        """Look for prefixes in tiers below the pool from now on, and offer them what is computed.

        Raises ConfigError for an engine whose blocks do not keep all of their pages.
        """
        if not self.groups.are_whole:
            raise ConfigError("keeps_whole_blocks is False; tiers read and write whole blocks: set it for this engine")
        self.scheduler.lower_tiers = self._prefix_cache.lower_tiers = self._reserved_loads.lower_tiers = tiers

    def measure_prefill_rate(self) -> float:
        """Return how many tokens of a prompt are computed per second, by computing some.

        For an engine that has nothing to do yet: it takes up to a second, or twice what 16 tokens take.
        """
        assert not self.has_work()
        vocab_size = self.checkpoint.config.vocab_size
        return measure_prefill_rate(self.runner, self.pool, self._max_chunk_tokens, vocab_size)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError if it can never run, Overloaded when the queue is full."""
        self._intake.submit(request)

    def step(self, observer: StepObserver = _UNOBSERVED) -> StepOutput:
        """Compute one batch.

        Empty if nothing can run. A request that can't be computed fails alone, in `failed`.

        A device that draws tokens by itself is given the next batch before the tokens of this one are known.
        """
        return self.pipeline.step(observer)

    def has_work(self) -> bool:
        """Return whether a `step` may compute something. Held and reserved requests wait for a call instead."""
        return self.pipeline.has_work()

    def release(self, request_id: RequestId) -> None:
        """Forget the request, whatever its state.

        Its blocks become cached or free; a writer's hold stays. Idempotent.
        """
        self._requests.release(request_id)

    def arrive(self, request: EngineRequest) -> Turn:
        """Return the turn of a request that is offered now and may be reserved later, unless it is given up."""
        return self.scheduler.turns.give(request.priority, request.tenant, request.cost)

    def give_up_turn(self, request: EngineRequest) -> None:
        """Forget the turn of a request that arrived and is not to be reserved."""
        self.scheduler.turns.give_back(request.priority, request.tenant, request.cost)

    def reserve(self, request: EngineRequest, turn: Turn | None = None, num_tokens: int | None = None) -> Reservation:
        """Reserve pages for the prompt of a request whose KV will arrive, and for token 0.

        Incoming blocks are held twice: by request and writer. `turn`: see `arrive`; None is after all others.
        `num_tokens`: of an answer that moves here while it goes on, so much KV may arrive; what `adopt` finds unused
        is free again.

        Raises OutOfBlocks if they do not fit now (or all sequence slots are taken), also beside a more urgent or
        earlier prompt that waits; RequestError if they never will. The last that was refused is left room by prompts
        that come after it, until it is reserved or released.
        """
        return self._handoff.reserve(request, turn, num_tokens)

    def load_reserved(self, request_id: RequestId, tokens_per_s: float) -> bool:
        """Begin to fill the first pages of a reservation from lower tiers, if that pays.

        It does where it is faster than `tokens_per_s`, at which these would arrive. Returns whether it began: until
        `finished_loads` tells of its end nobody else may write to the pages. Raises KeyError for a request that is
        unknown.
        """
        return self._reserved_loads.begin(request_id, tokens_per_s)

    def finished_loads(self) -> list[tuple[RequestId, int]]:
        """Return the loads of reservations that have ended, each once, those that fell behind among them.

        With each goes how many of the request's first tokens have their KV by now: the others have to arrive.
        """
        return self._reserved_loads.finished()

    def prepare(self, request_id: RequestId) -> None:
        """Prepare a reserved request's first step, as far as it is known before token 0.

        Only if it may well be a batch of its own: nothing else runs or is reserved. Raises KeyError for a request that
        is unknown.
        """
        self._handoff.prepare(request_id)

    def adopt(self, request_id: RequestId, first: Token, drawn: Sequence[Token] = ()) -> None:
        """Decode from index 1: the reserved pages hold the prompt's KV and `first` is token 0, sent already.

        Of an answer that moves, `drawn` are its tokens between those of the request and `first`, whose KV is in the
        pages as well. The caller does not adopt if `first` ended the request. Raises KeyError for a request that is not
        reserved, RequestError for a token that no model like this one draws, Corrupt for tokens that do not follow.
        """
        self._handoff.adopt(request_id, first, drawn)

    def incoming_writer_ended(self, request_id: RequestId, num_checked: int = 0) -> int:
        """Let a reservation's pages go, as far as the writer held them: nothing will write there. Idempotent.

        Of a handoff that ended before all had come, after `release`, the KV of the first `num_checked` tokens is there
        and was checked: whole blocks of it are kept for whoever has the same prefix. Returns of how many tokens.
        """
        return self._handoff.incoming_writer_ended(request_id, num_checked)

    def incoming_lost(self, request_id: RequestId, first_token: int, loss: str) -> None:
        """Note that the KV of a reservation is inexact from this token on, see contracts.kv_loss.

        So is what is computed after it. It is cached for requests that accept this loss, if this one does.
        """
        self._handoff.incoming_lost(request_id, first_token, loss)

    def keep_local(self, request_id: RequestId) -> None:
        """Go on here with a handoff sequence after all. Nothing to do for one that is unknown or has ended."""
        self._handoff.keep_local(request_id)

    @property
    def has_reserved(self) -> bool:
        """Whether a request may be adopted any moment."""
        return self.sequences.count(Status.RESERVED) > 0

    @property
    def slack_s(self) -> float:
        """How long `step` may wait and the device has work all the same.

        A request that is adopted by then is in the next batch already.
        """
        return self.pipeline.slack_s

    def prompt_tokens_beside(self, num_answers: int) -> int:
        """Return how many tokens of a prompt that waits alone are computed in a step with so many answers."""
        return self.scheduler.mixed_budget.prompt_tokens(num_answers, 0)

    @property
    def bounds_gaps(self) -> bool:
        """Whether steps with answers and prompts are kept to an objective."""
        return self.scheduler.mixed_budget.has_objective

    def stats(self) -> EngineStats:
        return engine_stats(
            self.sequences,
            self.scheduler,
            self._intake.compiling,
            self.pool,
            self.pipeline.counters,
            None if self.speculator is None else self.speculator.counters,
        )

    def close(self) -> None:
        """Ask nothing of the device any more. Idempotent."""
        self._close()

    def check(self) -> None:
        """Raise AssertionError if a block's holds are not those of the sequences and writers there are."""
        self.pool.check()
        expected = self.sequences.holds()
        expected.update(self.deferred.holds())
        for block in range(self.pool.num_blocks):
            holds = self.pool.holds(block)
            assert holds == expected[block], f"block {block} is held {holds} times, by {expected[block]} known holders"
        self.groups.check(self.sequences.leases() | self.deferred.leases())
        known = {sequence.request_id for sequence in self.sequences}
        queued = {
            s.request_id for s in (*self.scheduler.waiting, *self.scheduler.running)
        } | self.scheduler.loading.keys()
        assert queued <= known, f"scheduled but unknown: {sorted(queued - known)}"
