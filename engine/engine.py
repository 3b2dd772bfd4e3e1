"""One model on one device: requests in, one batch a step, tokens and computed KV chunks out.

    engine = load_engine(EngineSettings())
    engine.submit(EngineRequest(request_id, token_ids, sampling))
    while engine.has_work():
        output = engine.step()

Handoff, prefill side: submit with `handoff=True`; `step` reports the prompt's KV as ChunkDone; after token 0 the
sequence is held until `release` (also when token 0 ended it: its pages may still be read), or goes on here after
`keep_local`. Handoff, decode side: `reserve` pages, let the transfer write them through `pool_bytes`, `adopt` with
token 0, decoding continues at index 1; `writer_ended` once nothing will write any more. A page is free only when
request and writer have both let go. Not thread-safe: one thread owns an engine.
"""

import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import torch

from checkpoint.checkpoint import Checkpoint
from contracts.errors import OutOfBlocks, Overloaded, RequestError, TandemError
from contracts.events import FinishReason, Token
from contracts.ids import BlockId, RequestId
from contracts.layout import KVLayout
from engine.batch import Piece
from engine.block_pool import BlockPool
from engine.grammar import Grammars, Masks
from engine.kv_cache import KVCache
from engine.linear import FORMATS
from engine.messages import (
    ChunkDone,
    Ended,
    EngineFailure,
    EngineRequest,
    EngineSettings,
    EngineStats,
    Reservation,
    Sampled,
    Started,
    StepOutput,
)
from engine.runner import Computed, Runner
from engine.sampler import Sampler
from engine.scheduler import Limits, Scheduler
from engine.sequence import Sequence, Status

_log = logging.getLogger(__name__)


def _ignore(_: Started) -> None: ...


class Engine:
    """See the module's docstring. Built by engine.load.load_engine."""

    def __init__(
        self,
        settings: EngineSettings,
        checkpoint: Checkpoint,
        cache: KVCache,
        runner: Runner,
        max_model_len: int,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = settings.dtype
        self.layout: KVLayout = cache.layout
        self.pool_bytes: np.ndarray = cache.pool_bytes
        self.max_model_len = max_model_len
        self.capacity_tokens = cache.num_blocks * cache.layout.block_size
        self._settings = settings
        # Where prompts and answers are computed in different formats, an answer's KV is not what a prompt's would be.
        self._caches_answers = FORMATS[settings.dtype].is_uniform
        self.runner = runner
        self._pool = BlockPool(cache.num_blocks, cache.layout.block_size, settings.prefix_cache)
        self._scheduler = Scheduler(
            self._pool, Limits(settings.max_num_seqs, settings.max_batched_tokens, max_model_len)
        )
        self._sampler = Sampler(checkpoint.eos_token_ids)
        self._grammars = Grammars(checkpoint)
        self._sequences: dict[RequestId, Sequence] = {}
        self._writers: dict[RequestId, list[BlockId]] = {}
        self._num_steps = self._num_prefill_tokens = self._num_decode_tokens = 0

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError if it can never run, Overloaded when the queue is full."""
        self._require_servable(request)
        if len(self._scheduler.waiting) >= self._settings.max_num_waiting:
            raise Overloaded(f"{len(self._scheduler.waiting)} requests are waiting already")
        sequence = _sequence(request)
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def reserve(self, request: EngineRequest) -> Reservation:
        """Pages for the prompt of a request whose KV will arrive. Landing blocks are held twice: by request and writer.

        Raises OutOfBlocks if they do not fit now (or all sequence slots are taken), RequestError if they never will.
        """
        self._require_servable(request)
        if len(self._scheduler.running) + self._count(Status.RESERVED) >= self._settings.max_num_seqs:
            raise OutOfBlocks(f"all {self._settings.max_num_seqs} sequence slots are taken")
        if self._scheduler.has_preempted:  # else a busy pair hands in prompts faster than it finds room to go on
            raise OutOfBlocks("preempted requests come first")
        sequence = _sequence(request)
        sequence.num_scored = sequence.num_prompt  # by whoever computes it
        skip_tokens = self._scheduler.take_prefix(sequence)
        try:
            landing = self._pool.allocate(self.layout.num_blocks(sequence.num_prompt) - len(sequence.blocks))
        except OutOfBlocks:
            self._pool.release(sequence.blocks)
            raise
        self._pool.retain(landing)
        sequence.blocks.extend(landing)
        sequence.status = Status.RESERVED
        self._sequences[request.request_id] = sequence
        self._writers[request.request_id] = landing
        blocks = _block_ids(sequence.blocks)
        return Reservation(request.request_id, blocks, [self._pool.generations[b] for b in blocks], skip_tokens)

    def adopt(self, request_id: RequestId, first: Token) -> None:
        """The reserved pages hold the prompt's KV and `first` is token 0, sent already: decode from index 1.

        The caller does not adopt if token 0 ended the request. Raises KeyError for a request that is not reserved.
        """
        sequence = self._sequences[request_id]
        if sequence.status is not Status.RESERVED:
            raise KeyError(f"{request_id} is {sequence.status}, not reserved")
        sequence.tokens.append(first.token_id)
        sequence.num_computed = sequence.num_prompt
        self._insert_blocks(sequence)
        self._scheduler.resume(sequence)

    def writer_ended(self, request_id: RequestId) -> None:
        """Nothing will write this reservation's pages any more. Idempotent."""
        self._pool.release(self._writers.pop(request_id, []))

    def release(self, request_id: RequestId) -> None:
        """Forget the request, whatever its state. Its blocks become cached or free; a writer's hold stays.
        Idempotent.
        """
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)
            self._pool.release(sequence.blocks)
            self._grammars.forget(request_id)

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

    def step(self, on_started: Callable[[Started], None] = _ignore) -> StepOutput:
        """Compute one batch. Empty if nothing can run. A request that can't be computed fails alone, in `failed`.

        `on_started` hears of each request that the scheduler picked for the first time before anything is computed, so
        that what must be arranged elsewhere can be arranged under the compute.
        """
        batch = self._scheduler.schedule()
        if not batch.pieces:
            return StepOutput()
        started = tuple(Started(s.request_id, s.num_computed) for s in batch.started)
        for start in started:
            on_started(start)
        pending = self._grammars.begin([piece.sequence for piece in batch.pieces if piece.samples])
        pieces, computed, failed = self._compute(batch.pieces)
        logits = computed.logits
        chunks = tuple(chunk for piece in pieces for chunk in self._advance(piece))
        masks = pending.result() if pending else Masks()
        sampling = [piece.sequence for piece in pieces if piece.samples]
        lost = tuple(self._fail(s, masks.errors[s.request_id]) for s in sampling if s.request_id in masks.errors)
        if lost:
            logits = logits[[row for row, s in enumerate(sampling) if s.request_id not in masks.errors]]
            sampling = [s for s in sampling if s.request_id not in masks.errors]
        tokens = self._sampler.sample(sampling, logits, masks.allowed) if sampling else []
        for sequence, token in zip(sampling, tokens, strict=True):
            sequence.tokens.append(token.token_id)
        sampled = tuple(Sampled(s.request_id, token) for s, token in zip(sampling, tokens, strict=True))
        ended = tuple(end for sequence in sampling for end in self._settle(sequence))
        output = StepOutput(started, chunks, sampled, ended, (*failed, *lost), scored=computed.scored)
        return self._counted(output, pieces)

    def has_work(self) -> bool:
        """A `step` may compute something. Held and reserved requests wait for a call instead."""
        return self._scheduler.has_work

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_held=self._count(Status.HELD),
            num_reserved=self._count(Status.RESERVED),
            queue_tokens=sum(len(s.tokens) - s.num_computed for s in (*scheduler.waiting, *scheduler.running)),
            free_tokens=self._pool.num_available * self.layout.block_size,
            num_cached_blocks=self._pool.num_cached,
            num_steps=self._num_steps,
            prefix_query_tokens=scheduler.num_prefix_queries,
            prefix_hit_tokens=scheduler.num_prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
        )

    def check(self) -> None:
        """Raises AssertionError, in words, if a block's holds are not those of the sequences and writers that exist."""
        self._pool.check()
        expected = Counter(block for sequence in self._sequences.values() for block in sequence.blocks)
        expected.update(block for landing in self._writers.values() for block in landing)
        for block in range(self._pool.num_blocks):
            holds = self._pool.holds(block)
            assert holds == expected[block], f"block {block} is held {holds} times, by {expected[block]} known holders"
        queued = {s.request_id for s in (*self._scheduler.waiting, *self._scheduler.running)}
        assert queued <= set(self._sequences), f"scheduled but unknown: {sorted(queued - set(self._sequences))}"

    def _require_servable(self, request: EngineRequest) -> None:
        num_tokens = len(request.token_ids)
        if request.request_id in self._sequences or request.request_id in self._writers:
            raise RequestError(f"the request {request.request_id} is here already")
        if num_tokens == 0:
            raise RequestError("the prompt is empty", "prompt")
        if num_tokens >= self.max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens; the longest that leaves room for an answer "
                f"has {self.max_model_len - 1} (context of {self.max_model_len})",
                "prompt",
            )
        vocab = self.checkpoint.config.vocab_size
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocab:
            raise RequestError(f"the prompt has token ids outside of 0 to {vocab - 1}", "prompt")

    def _compute(self, pieces: SequenceOf[Piece]) -> tuple[list[Piece], Computed, tuple[EngineFailure, ...]]:
        """The pieces that ran and what they gave. If the batch as a whole fails, each piece runs alone."""
        try:
            return list(pieces), self.runner.forward(pieces), ()
        except RuntimeError as error:
            _log.exception("a batch of %d pieces failed", len(pieces))
            if len(pieces) == 1:
                return [], Computed(torch.empty(0)), (self._fail(pieces[0].sequence, str(error)),)
        runs = [self._compute([piece]) for piece in pieces]
        logits = [computed.logits for done, computed, _ in runs if done]
        scored = tuple(scored for _, computed, _ in runs for scored in computed.scored)
        failed = tuple(failure for _, _, failures in runs for failure in failures)
        whole = Computed(torch.cat(logits or [torch.empty(0)]), scored)
        return [piece for done, _, _ in runs for piece in done], whole, failed

    def _fail(self, sequence: Sequence, message: str) -> EngineFailure:
        self.release(sequence.request_id)
        return EngineFailure(sequence.request_id, TandemError.code, f"this request could not be computed: {message}")

    def _advance(self, piece: Piece) -> list[ChunkDone]:
        """KV up to the piece's end exists now. Announces it if it is to be handed over."""
        sequence = piece.sequence
        sequence.num_computed = piece.end
        sequence.num_scored = max(sequence.num_scored, min(piece.end + 1, sequence.num_prompt))
        self._insert_blocks(sequence)
        if not sequence.handoff:
            return []
        first, sequence.num_announced = sequence.num_announced, piece.end
        size = self.layout.block_size
        blocks = sequence.blocks[first // size : self.layout.num_blocks(piece.end)]
        return [ChunkDone(sequence.request_id, first, piece.end - first, _block_ids(blocks))]

    def _insert_blocks(self, sequence: Sequence) -> None:
        """Full blocks enter the prefix cache."""
        size = self.layout.block_size
        num_tokens = sequence.num_computed if self._caches_answers else min(sequence.num_computed, sequence.num_prompt)
        num_full = num_tokens // size
        if num_full <= sequence.num_inserted_blocks:
            return
        digests = sequence.extend_digests(size)
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
        return [] if reason is None else [Ended(sequence.request_id, sequence.num_generated, reason)]

    def _end_reason(self, sequence: Sequence) -> FinishReason | None:
        if self._sampler.stops(sequence.sampling, sequence.tokens[-1]):
            return FinishReason.STOP
        if sequence.num_generated >= sequence.sampling.max_tokens or len(sequence.tokens) >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _counted(self, output: StepOutput, pieces: SequenceOf[Piece]) -> StepOutput:
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
    return Sequence(*head, request.handoff, request.priority, request.cache_salt)


def _block_ids(blocks: SequenceOf[int]) -> list[BlockId]:
    return [BlockId(block) for block in blocks]
