"""One model on one device: requests in, one batch a step, tokens and computed KV chunks out.

    engine = load_engine(EngineSettings())
    engine.submit(EngineRequest(request_id, token_ids, sampling))
    while engine.has_work():
        output = engine.step()

Handoff, prefill side: submit with `handoff=True`; `step` reports the prompt's KV as ChunkDone; after token 0 the
sequence is held until `release` (also when token 0 ended it: its pages may still be read), or goes on here after
`keep_local`. Handoff, decode side: `reserve` pages, `prepare` if there is time, let the transfer write them through
`pool_bytes`, `adopt` with token 0, decoding continues at index 1; `writer_ended` once nothing will write any more. A
page is free only when request and writer have both let go. Not thread-safe: one thread owns an engine.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from checkpoint.checkpoint import Checkpoint
from contracts.errors import OutOfBlocks, Overloaded, RequestError, TandemError
from contracts.events import FinishReason, Token
from contracts.ids import BlockId, RequestId
from contracts.layout import KVLayout
from engine.backend import Backend, Computed
from engine.cache.block_pool import BlockPool
from engine.in_flight import InFlightBatch
from engine.messages import (
    ChunkDone,
    ChunkScheduled,
    Ended,
    EngineFailure,
    EngineRequest,
    EngineStats,
    Reservation,
    Sampled,
    Started,
    StepObserver,
    StepOutput,
)
from engine.sampling.grammar_masks import PATIENCE_S, Grammars
from engine.scheduler.batch import ScheduledChunk, prompt_tokens_per_mixed_step
from engine.scheduler.launch_pacer import LaunchPacer, kind_of
from engine.scheduler.scheduler import PendingReservation, Scheduler, SchedulerLimits
from engine.sequence import Sequence, Status
from engine.settings import EngineSettings

_log = logging.getLogger(__name__)


_UNWATCHED = StepObserver()
MAX_LATE_BLOCKS = 16
"""So many blocks of a prompt that came from elsewhere enter the prefix cache in a step: all of a long prompt at once
would keep the tokens of the step before for a millisecond. What is left when the answer ends, or gives its blocks back
to be computed again, enters then.
"""


class Engine:
    """See the module's docstring. Built by engine.loader.load_engine."""

    def __init__(
        self,
        settings: EngineSettings,
        checkpoint: Checkpoint,
        backend: Backend,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        cache = backend.cache
        self.checkpoint = checkpoint
        self.dtype = backend.dtype
        self.layout: KVLayout = cache.layout
        self.max_model_len = backend.max_model_len
        budget = settings.max_batched_tokens
        self.max_mixed_tokens = min(settings.max_mixed_tokens or budget, budget)
        self.capacity_tokens = cache.num_blocks * cache.layout.block_size
        self._settings = settings
        self._cache = cache
        self._caches_answers = backend.caches_decoded_kv
        self.runner = backend.runner
        self._close = backend.close
        self._pool = BlockPool(cache.num_blocks, cache.layout.block_size, settings.prefix_cache)
        self._scheduler = Scheduler(
            self._pool,
            SchedulerLimits(settings.max_num_seqs, budget, self.max_mixed_tokens),
            self._insert_all_blocks,
        )
        self._sampler = backend.sampler
        self._grammars = Grammars(checkpoint)
        self._sequences: dict[RequestId, Sequence] = {}
        self._compiling: dict[Sequence, Callable[[Sequence], None]] = {}
        self._incoming_writers: dict[RequestId, list[BlockId]] = {}
        self._refused: tuple[RequestId, int, int] | None = None
        self._why_refused = ""
        self._in_flight: InFlightBatch | None = None
        self._prepared: Sequence | None = None
        self._pace, self._clock = LaunchPacer(), clock
        self._num_launched = self._num_completed = 0
        self._unlanded: list[tuple[int, SequenceOf[int]]] = []
        self._num_steps = self._num_prefill_tokens = self._num_decode_tokens = 0

    @property
    def pool_bytes(self) -> np.ndarray:
        """The KV cache as bytes, see engine.backend.Pages."""
        return self._cache.pool_bytes

    @property
    def transfer_pool(self) -> Any:
        """See engine.backend.Pages."""
        return self._cache.transfer_pool

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError if it can never run, Overloaded when the queue is full."""
        sequence = self._servable(request)
        if self._num_waiting >= self._settings.max_num_waiting:
            raise Overloaded(f"{self._num_waiting} requests are waiting already")
        self._sequences[request.request_id] = sequence
        self._grammars.open(sequence, PATIENCE_S)
        self._once_compiled(sequence, self._scheduler.add)

    def arrive(self) -> int:
        """A place in the order of arrival, for a request that is offered now and may be reserved later."""
        return self._scheduler.next_arrival()

    def reserve(self, request: EngineRequest, arrival: int | None = None) -> Reservation:
        """Pages for the prompt of a request whose KV will arrive, and for token 0. Landing blocks are held twice: by
        request and writer. `arrival`: see `arrive`; None is behind everybody.

        Raises OutOfBlocks if they do not fit now (or all sequence slots are taken), also beside a more urgent or
        earlier prompt that waits; RequestError if they never will. The last that was refused is left room by prompts
        that come after it, until it is reserved or released.
        """
        urgency = request.priority, self.arrive() if arrival is None else arrival
        try:
            sequence = self._with_pages(request, urgency)
        except OutOfBlocks:
            num_blocks = self.layout.num_blocks(len(request.token_ids) + 1)
            self._scheduler.claim = PendingReservation(request.request_id, urgency, num_blocks)
            raise
        self._scheduler.claim = None
        blocks = _block_ids(sequence.blocks[: self.layout.num_blocks(sequence.num_prompt)])
        landing = blocks[sequence.num_inserted_blocks :]
        self._pool.retain(landing)
        sequence.status, sequence.arrival = Status.RESERVED, urgency[1]
        self._sequences[request.request_id] = sequence
        self._grammars.open(sequence)
        self._incoming_writers[request.request_id] = landing
        generations = [self._pool.generations[block] for block in blocks]
        return Reservation(request.request_id, blocks, generations, sequence.num_computed)

    def prepare(self, request_id: RequestId) -> None:
        """A reserved request's first step, as far as it is known before token 0, if it may well be a batch of its own:
        nothing else runs or is reserved. Raises KeyError for a request that is unknown.
        """
        sequence = self._sequences[request_id]
        if not self.has_work() and self._count(Status.RESERVED) == 1:
            sequence.tokens.append(0)
            try:
                self.runner.prepare(ScheduledChunk(sequence, sequence.num_prompt, 1))
                self._prepared = sequence
            except RuntimeError:  # the step itself may fail as well, for this request alone
                self._prepared = None
                _log.exception("the first step of request %s can't be prepared", request_id)
            finally:
                sequence.tokens.pop()

    def rehearse(self) -> None:
        """Prepare what was prepared once more, if it is still to come: the processor has in its caches then what the
        step itself will run.
        """
        if self._prepared is not None and self._is_present(self._prepared):
            self.prepare(self._prepared.request_id)

    def adopt(self, request_id: RequestId, first: Token) -> None:
        """The reserved pages hold the prompt's KV and `first` is token 0, sent already: decode from index 1.

        The caller does not adopt if token 0 ended the request. Raises KeyError for a request that is not reserved,
        RequestError for a token that no model like this one draws.
        """
        sequence = self._sequences[request_id]
        if sequence.status is not Status.RESERVED or sequence in self._compiling:
            raise KeyError(f"{request_id} is {sequence.status}, not reserved")
        vocab = self.checkpoint.config.vocab_size
        if not 0 <= first.token_id < vocab:
            raise RequestError(f"token 0 from prefill is {first.token_id}, outside of 0 to {vocab - 1}")
        sequence.tokens.append(first.token_id)
        sequence.num_computed = sequence.num_prompt  # its first step enters them into the prefix cache
        self._once_compiled(sequence, self._scheduler.resume)

    def incoming_writer_ended(self, request_id: RequestId) -> None:
        """Nothing will write this reservation's pages any more. Idempotent."""
        self._pool.release(self._incoming_writers.pop(request_id, []))

    def release(self, request_id: RequestId) -> None:
        """Forget the request, whatever its state. Its blocks become cached or free; a writer's hold stays.
        Idempotent.
        """
        self._scheduler.give_up(request_id)
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            if self._compiling.pop(sequence, None) is None:
                self._scheduler.remove(sequence)
            if sequence.has_grown and sequence.started:
                self._insert_all_blocks(sequence)
            self._let_go(sequence.blocks)
            self._grammars.forget(sequence)

    def keep_local(self, request_id: RequestId) -> None:
        """A handoff sequence goes on here after all. Nothing to do for one that is unknown or has ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.handoff:
            return
        sequence.handoff = False
        if sequence.status is Status.HELD:
            if self._end_reason(sequence) is not None:
                self.release(request_id)
            else:
                self._scheduler.resume(sequence)

    def step(self, watcher: StepObserver = _UNWATCHED) -> StepOutput:
        """Compute one batch. Empty if nothing can run. A request that can't be computed fails alone, in `failed`.

        A device that draws tokens by itself is given the next batch before the tokens of this one are known.
        """
        was_late = self._in_flight is not None and self._in_flight.is_done
        self._go_on_compiled()
        flight = self._in_flight or self._launch(watcher)
        self._in_flight = None
        if flight is None:
            return StepOutput()
        flight = self._drawing(flight)
        if self._may_run_ahead(flight):
            self._expect(flight)
            self._in_flight = self._launch(watcher)
        if flight.computed.pending_tokens is not None:
            watcher.waiting(lambda: flight.is_done)
        output = self._complete(flight, was_late)
        if self._in_flight is not None and self._in_flight.masks is None:
            self._in_flight = self._guided(self._in_flight)
        return output

    def has_work(self) -> bool:
        """A `step` may compute something. Held and reserved requests wait for a call instead."""
        return self._scheduler.has_work or self._in_flight is not None or bool(self._compiling)

    @property
    def has_reserved(self) -> bool:
        """A request may be adopted any moment."""
        return self._count(Status.RESERVED) > 0

    @property
    def slack_s(self) -> float:
        """How long `step` may wait and the device has work all the same. Who is adopted by then is in the next batch
        already.
        """
        flight = self._in_flight
        if flight is None or flight.computed.pending_tokens is None:
            return 0.0
        return max(0.0, self._pace.due_s(flight.kind, flight.began_s) - self._clock())

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=self._num_waiting,
            num_held=self._count(Status.HELD),
            num_reserved=self._count(Status.RESERVED),
            queue_tokens=sum(
                len(s.tokens) - s.num_computed for s in (*scheduler.waiting, *scheduler.running, *self._compiling)
            ),
            free_tokens=self._pool.num_available * self.layout.block_size,
            prompt_tokens_per_mixed_step=prompt_tokens_per_mixed_step(
                self.max_mixed_tokens, sum(sequence.is_decoding for sequence in scheduler.running)
            ),
            num_cached_blocks=self._pool.num_cached,
            num_steps=self._num_steps,
            prefix_query_tokens=scheduler.num_prefix_queries,
            prefix_hit_tokens=scheduler.num_prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
        )

    def close(self) -> None:
        """Nothing is asked of the device any more. Idempotent."""
        self._close()

    def check(self) -> None:
        """Raises AssertionError, in words, if a block's holds are not those of the sequences and writers that exist."""
        self._pool.check()
        expected = Counter(block for sequence in self._sequences.values() for block in sequence.blocks)
        expected.update(block for landing in self._incoming_writers.values() for block in landing)
        expected.update(block for _, blocks in self._unlanded for block in blocks)
        for block in range(self._pool.num_blocks):
            holds = self._pool.holds(block)
            assert holds == expected[block], f"block {block} is held {holds} times, by {expected[block]} known holders"
        queued = {s.request_id for s in (*self._scheduler.waiting, *self._scheduler.running)}
        assert queued <= set(self._sequences), f"scheduled but unknown: {sorted(queued - set(self._sequences))}"

    def _servable(self, request: EngineRequest) -> Sequence:
        """Raises RequestError if it can never run."""
        num_tokens = len(request.token_ids)
        if request.request_id in self._sequences or request.request_id in self._incoming_writers:
            raise RequestError(f"the request {request.request_id} is here already")
        if num_tokens - request.num_answered <= 0:
            raise RequestError("the prompt is empty", "prompt")
        if num_tokens >= self.max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens; the longest that leaves room for an answer "
                f"has {self.max_model_len - 1} (context of {self.max_model_len})",
                "prompt",
            )
        vocab = self.checkpoint.config.vocab_size
        outside = RequestError(f"the prompt has token ids outside of 0 to {vocab - 1}", "prompt")
        try:
            sequence = _sequence(request)
        except OverflowError:  # of 32 bits
            raise outside from None
        # As unsigned numbers negative ones are the largest. Python's min and max of 8192 ids took 0.18 ms.
        if np.frombuffer(sequence.tokens, np.uint32).max() >= vocab:
            raise outside
        return sequence

    def _with_pages(self, request: EngineRequest, urgency: tuple[int, int]) -> Sequence:
        """See `reserve`."""
        num_reserved = self._count(Status.RESERVED)
        num_places, num_spare = self._scheduler.room_before(urgency, num_reserved)
        if len(self._scheduler.running) + num_reserved + num_places >= self._settings.max_num_seqs:
            raise OutOfBlocks(
                f"all {self._settings.max_num_seqs} sequence slots are taken, by who runs or waits before"
            )
        if self._scheduler.has_preempted_before(urgency):
            # Else a busy pair hands in prompts faster than it finds room to go on.
            raise OutOfBlocks("preempted requests come first")
        tried = request.request_id, self._pool.num_gains, num_spare
        if tried == self._refused:  # a caller tries again and again, beside the steps of others
            raise OutOfBlocks(self._why_refused)
        sequence = self._servable(request)
        sequence.num_scored = sequence.num_prompt  # by whoever computes it
        # Token 0's KV is the first that is computed here.
        if not self._scheduler.take_blocks(sequence, sequence.num_prompt + 1, num_spare):
            self._refused = tried
            wanted, pool = self.layout.num_blocks(sequence.num_prompt + 1), self._pool
            left = f", {num_spare} of them left to who waits before" if num_spare else ""
            self._why_refused = f"{wanted} KV blocks wanted, {pool.num_available} of {pool.num_blocks} available{left}"
            raise OutOfBlocks(self._why_refused)
        return sequence

    @property
    def _num_waiting(self) -> int:
        return len(self._scheduler.waiting) + len(self._compiling)

    def _once_compiled(self, sequence: Sequence, go_on: Callable[[Sequence], None]) -> None:
        """At once, or at the beginning of the step that finds a large grammar compiled: nobody else's step waits."""
        if self._grammars.is_ready(sequence):
            go_on(sequence)
        else:
            self._compiling[sequence] = go_on

    def _go_on_compiled(self) -> None:
        for sequence in [s for s in self._compiling if self._grammars.is_ready(s)]:
            self._compiling.pop(sequence)(sequence)

    def _launch(self, watcher: StepObserver) -> InFlightBatch | None:
        """Schedule a batch and hand it to the device; None if nothing can run."""
        began_s = self._clock()
        batch = self._scheduler.schedule(self._count(Status.RESERVED))
        if not batch.chunks:
            return None
        self._num_launched += 1
        started = tuple(Started(s.request_id, s.num_computed) for s in batch.started)
        for start in started:
            watcher.started(start)
        wanted = [piece.sequence for piece in batch.chunks if piece.samples]
        masks = None if any(s.num_pending for s in wanted) else self._grammars.begin(wanted)
        pieces, computed, failed = self._compute_watched(batch.chunks, watcher)
        chunks = tuple(chunk for piece in pieces for chunk in self._advance(piece))
        sampling = [piece.sequence for piece in pieces if piece.samples]
        self._pace.record_launch(self._clock() - began_s)
        return InFlightBatch(started, pieces, chunks, computed, failed, masks, sampling, kind_of(pieces), began_s)

    def _may_run_ahead(self, flight: InFlightBatch) -> bool:
        """Nothing of the next batch depends on which tokens this one draws. Each running sequence may need a block: if
        that took a preemption, a sequence would be computed again whose last token is not known. Nor do tokens of
        answers wait until a batch is launched that takes the host longer than they take the device.
        """
        if flight.computed.pending_tokens is None or self._pool.num_available < len(self._scheduler.running):
            return False
        return not (any(piece.is_decode for piece in flight.chunks) and self._may_be_long())

    def _may_be_long(self) -> bool:
        """The next batch beside answers, to launch: by the rows of prompts that there are."""
        quick = self.runner.max_graph_rows
        if self.max_mixed_tokens <= quick:
            return False
        prompts = (s for s in (*self._scheduler.running, *self._scheduler.waiting) if not s.is_decoding)
        return any(num_rows > quick for num_rows in accumulate(len(s.tokens) - s.num_computed for s in prompts))

    def _expect(self, flight: InFlightBatch) -> None:
        """Each sequence of the flight is one token longer. Those that go no further here sit the next batch out."""
        for sequence in flight.sampling:
            if self._is_present(sequence):
                sequence.tokens.append(0)
                sequence.num_pending = 1
                if sequence.handoff or self._is_full(sequence):
                    self._scheduler.remove(sequence)
                    sequence.status = Status.ENDING

    def _complete(self, flight: InFlightBatch, was_late: bool) -> StepOutput:
        """Wait for what the device computed, and tell it. `was_late`: see LaunchPacer.landed."""
        sampling, tokens, lost = self._sample_adjusted(flight)
        span_s = self._pace.record_completion(flight.kind, flight.began_s, self._clock(), was_late)
        self._on_completed()
        for sequence, token in zip(sampling, tokens, strict=True):
            if sequence.num_pending:
                sequence.tokens.pop()
                sequence.num_pending = 0
            sequence.tokens.append(token.token_id)
        sampled = tuple(Sampled(s.request_id, token) for s, token in zip(sampling, tokens, strict=True))
        ended = tuple(end for sequence in sampling for end in self._settle(sequence))
        failed = (*flight.failed, *lost)
        scored = tuple(scores.told() for scores in flight.computed.scored)
        output = StepOutput(flight.started, flight.done_chunks, sampled, ended, failed, scored=scored, span_s=span_s)
        return self._counted(output, flight.chunks)

    def _drawing(self, flight: InFlightBatch) -> InFlightBatch:
        """A device draws from now on; what else that takes (tokens for penalties, masks of grammars) is known. The rows
        of those who can't have a token are drawn in vain.
        """
        if flight.computed.pending_tokens is not None:
            return flight
        masks = flight.known_masks()
        present = [sequence for sequence in flight.sampling if self._is_present(sequence)]
        lost = tuple(self._unguided(s, masks.errors[s.request_id]) for s in present if s.request_id in masks.errors)
        flight = replace(flight, failed=(*flight.failed, *lost))
        if len(lost) == len(present):
            return flight
        try:
            drawn = self.runner.sample(flight.sampling, flight.computed.logits, masks.allowed)
        except Exception:  # whatever a request's parameters bring about
            _log.exception("%d tokens can't be drawn together", len(flight.sampling))
            drawn = None
        return replace(flight, computed=replace(flight.computed, pending_tokens=drawn))

    def _guided(self, flight: InFlightBatch) -> InFlightBatch:
        """Masks are begun on, now that the tokens before are known."""
        return replace(flight, masks=self._grammars.begin([s for s in flight.sampling if self._is_present(s)]))

    def _sample_adjusted(self, flight: InFlightBatch) -> tuple[list[Sequence], list[Token], tuple[EngineFailure, ...]]:
        """The tokens of those who still want one, and who can't have one."""
        if flight.computed.pending_tokens is not None:
            drawn = zip(flight.sampling, flight.computed.pending_tokens.wait(), strict=True)
            present = [(sequence, token) for sequence, token in drawn if self._is_present(sequence)]
            return [sequence for sequence, _ in present], [token for _, token in present], ()
        wanted = [(row, s) for row, s in enumerate(flight.sampling) if self._is_present(s)]
        if not wanted:  # nothing else waits, and what has landed is free
            self.runner.wait()
            return [], [], ()
        logits = flight.computed.logits
        if len(wanted) < len(flight.sampling):
            logits = logits[[row for row, _ in wanted]]
        sequences = [sequence for _, sequence in wanted]
        found = self._sampler.sample_each(sequences, logits, flight.known_masks().allowed)
        lost = tuple(self._fail(s, why) for s, why in zip(sequences, found, strict=True) if isinstance(why, str))
        told = [(s, token) for s, token in zip(sequences, found, strict=True) if isinstance(token, Token)]
        if not told:  # nothing else waited for the device, which may be what failed: then this process ends
            self.runner.wait()
        return [sequence for sequence, _ in told], [token for _, token in told], lost

    def _let_go(self, blocks: SequenceOf[int]) -> None:
        """A batch that is still being computed may write to them, and the next to hold them may be a transfer, which is
        on no stream of the engine's.
        """
        if self._num_launched == self._num_completed:
            self._pool.release(blocks)
        else:
            self._unlanded.append((self._num_launched, list(blocks)))

    def _on_completed(self) -> None:
        """The oldest batch has been computed: what was let go before the next one was launched is free."""
        self._num_completed += 1
        while self._unlanded and self._unlanded[0][0] <= self._num_completed:
            self._pool.release(self._unlanded.pop(0)[1])

    def _is_present(self, sequence: Sequence) -> bool:
        """Neither ended nor released since its batch was launched."""
        return self._sequences.get(sequence.request_id) is sequence

    def _compute_watched(
        self, pieces: SequenceOf[ScheduledChunk], watcher: StepObserver
    ) -> tuple[list[ScheduledChunk], Computed, tuple[EngineFailure, ...]]:
        for piece in pieces:
            if piece.sequence.handoff:
                first = piece.sequence.num_announced
                blocks = self._blocks_between(piece.sequence, first, piece.end)
                place = (first, piece.end - first, blocks, self.runner.early_planes)
                watcher.chunk_scheduled(ChunkScheduled(piece.sequence.request_id, *place))
        try:
            return self._compute(pieces, watcher)
        finally:
            watcher.chunks_launched(is_all=True)

    def _compute(
        self, pieces: SequenceOf[ScheduledChunk], watcher: StepObserver
    ) -> tuple[list[ScheduledChunk], Computed, tuple[EngineFailure, ...]]:
        """The pieces that ran and what they gave. If the batch as a whole fails, each piece runs alone."""
        try:
            return list(pieces), self.runner.forward(pieces, watcher.chunks_launched), ()
        except RuntimeError:
            _log.exception("a batch of %d pieces failed", len(pieces))
        runs = [self._compute_alone(piece) for piece in pieces]
        logits = [computed.logits for done, computed, _ in runs if done]
        scored = tuple(scored for _, computed, _ in runs for scored in computed.scored)
        failed = tuple(failure for _, _, failures in runs for failure in failures)
        whole = Computed(torch.cat(logits or [torch.empty(0)]), scored)
        return [piece for done, _, _ in runs for piece in done], whole, failed

    def _compute_alone(self, piece: ScheduledChunk) -> tuple[list[ScheduledChunk], Computed, tuple[EngineFailure, ...]]:
        try:
            return [piece], self.runner.forward_without_sampling([piece]), ()
        except RuntimeError as error:
            _log.exception("a piece of %d tokens failed", piece.num_tokens)
            return [], Computed(torch.empty(0)), (self._fail(piece.sequence, str(error)),)

    def _unguided(self, sequence: Sequence, message: str) -> EngineFailure:
        self.release(sequence.request_id)
        why = f"the grammar of this answer (a schema, a regex, choices or tools) can't be gone on with: {message}"
        return EngineFailure(sequence.request_id, RequestError.code, why)

    def _fail(self, sequence: Sequence, message: str) -> EngineFailure:
        self.release(sequence.request_id)
        return EngineFailure(sequence.request_id, TandemError.code, f"this request could not be computed: {message}")

    def _advance(self, piece: ScheduledChunk) -> list[ChunkDone]:
        """KV up to the piece's end exists now. Announces it if it is to be handed over."""
        sequence = piece.sequence
        sequence.num_computed = piece.end
        sequence.num_scored = max(sequence.num_scored, min(piece.end + 1, sequence.num_prompt))
        self._insert_blocks(sequence, MAX_LATE_BLOCKS if piece.is_decode else len(sequence.blocks))
        if not sequence.handoff:
            return []
        first, sequence.num_announced = sequence.num_announced, piece.end
        blocks = self._blocks_between(sequence, first, piece.end)
        checksums = self._cache.checksums(blocks)
        return [ChunkDone(sequence.request_id, first, piece.end - first, blocks, checksums)]

    def _blocks_between(self, sequence: Sequence, first_token: int, end: int) -> list[BlockId]:
        return _block_ids(sequence.blocks[first_token // self.layout.block_size : self.layout.num_blocks(end)])

    def _insert_all_blocks(self, sequence: Sequence) -> None:
        self._insert_blocks(sequence, len(sequence.blocks))

    def _insert_blocks(self, sequence: Sequence, at_most: int) -> None:
        """Full blocks enter the prefix cache."""
        size = self.layout.block_size
        most = len(sequence.tokens) - sequence.num_pending if self._caches_answers else sequence.num_prompt
        num_tokens = min(sequence.num_computed, most)
        num_full = num_tokens // size
        if num_full <= sequence.num_inserted_blocks:
            return
        num_full = min(num_full, sequence.num_inserted_blocks + at_most)
        digests = sequence.extend_digests(size, num_full)
        for index in range(sequence.num_inserted_blocks, num_full):
            token_ids = sequence.tokens[index * size : (index + 1) * size]
            self._pool.insert(sequence.blocks[index], digests[index], token_ids)
        sequence.num_inserted_blocks = num_full

    def _settle(self, sequence: Sequence) -> list[Ended]:
        """After a token: end the answer, or hold it for its handoff, or leave it running."""
        reason = self._end_reason(sequence)
        if sequence.handoff:
            self._scheduler.remove(sequence)
            sequence.status = Status.HELD
        elif reason is not None:
            self.release(sequence.request_id)
        elif sequence.status is Status.ENDING:  # kept local while its token was drawn
            self._scheduler.resume(sequence)
        return [] if reason is None else [Ended(sequence.request_id, sequence.num_generated, reason)]

    def _end_reason(self, sequence: Sequence) -> FinishReason | None:
        if self._sampler.stops(sequence.sampling, sequence.tokens[-1]):
            return FinishReason.STOP
        return FinishReason.LENGTH if self._is_full(sequence) else None

    def _is_full(self, sequence: Sequence) -> bool:
        return sequence.num_generated >= sequence.sampling.max_tokens or len(sequence.tokens) >= self.max_model_len

    def _counted(self, output: StepOutput, pieces: SequenceOf[ScheduledChunk]) -> StepOutput:
        num_decode = sum(piece.is_decode for piece in pieces)
        num_prefill = sum(piece.num_tokens for piece in pieces) - num_decode
        self._num_steps += 1
        self._num_decode_tokens += num_decode
        self._num_prefill_tokens += num_prefill
        return replace(output, num_prefill_tokens=num_prefill, num_decode_tokens=num_decode)

    def _count(self, status: Status) -> int:
        return sum(sequence.status is status for sequence in self._sequences.values())


def _sequence(request: EngineRequest) -> Sequence:
    head = (request.request_id, request.token_ids, request.sampling)
    return Sequence(*head, request.handoff, request.priority, request.cache_salt, request.num_answered)


def _block_ids(blocks: SequenceOf[int]) -> list[BlockId]:
    return [BlockId(block) for block in blocks]
