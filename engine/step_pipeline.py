"""The pipeline of steps.

A batch is launched while the one before it is computed, and completed when that is done.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import accumulate

from engine.backend import Runner
from engine.batch_sampling import TokenDraws
from engine.cache.block_pool import BlockPool
from engine.cache.deferred_release import DeferredRelease
from engine.draft_verification import DraftVerification
from engine.forward_pass import ForwardPass
from engine.in_flight import InFlightBatch
from engine.intake import Intake
from engine.messages import Ended, EngineFailure, Sampled, Started, StepObserver, StepOutput, Verified
from engine.request_release import RequestRelease
from engine.sampling.grammar_masks import Grammars
from engine.scheduler.batch import Batch, ScheduledChunk
from engine.scheduler.launch_pacer import LaunchPacer, kind_of
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence, Status
from engine.sequence_table import SequenceTable
from engine.stats import StepCounters
from engine.stop_check import StopCheck

_log = logging.getLogger(__name__)


class StepPipeline:
    """The steps of an engine ("overlap scheduling").

    A device that draws tokens by itself is given the next batch before the tokens of this one are known.
    """

    def __init__(
        self,
        table: SequenceTable,
        scheduler: Scheduler,
        pool: BlockPool,
        intake: Intake,
        grammars: Grammars,
        requests: RequestRelease,
        blocks: DeferredRelease,
        forward_pass: ForwardPass,
        draws: TokenDraws,
        stop_check: StopCheck,
        runner: Runner,
        max_mixed_tokens: int,
        clock: Callable[[], float],
        verification: DraftVerification | None = None,
    ) -> None:
        self._table, self._scheduler, self._pool, self._intake = table, scheduler, pool, intake
        self._grammars, self._requests, self._blocks = grammars, requests, blocks
        self._forward_pass, self._draws, self._stop_check = forward_pass, draws, stop_check
        self._runner, self._max_mixed_tokens, self._clock = runner, max_mixed_tokens, clock
        self._verification = verification
        self._pacer = LaunchPacer()
        self.in_flight: InFlightBatch | None = None
        self._completed_s: float | None = None
        self.counters = StepCounters()

    def has_work(self) -> bool:
        return self._scheduler.has_work or self.in_flight is not None or bool(self._intake.compiling)

    @property
    def slack_s(self) -> float:
        """How long `step` may wait and the device has work all the same."""
        batch = self.in_flight
        if batch is None or batch.computed.pending_tokens is None:
            return 0.0
        return max(0.0, self._pacer.due_s(batch.kind, batch.began_s) - self._clock())

    def step(self, observer: StepObserver) -> StepOutput:
        """Compute one batch. Empty if nothing can run."""
        was_late = self.in_flight is not None and self.in_flight.is_done
        self._intake.go_on_compiled()
        is_ahead = self.in_flight is not None
        batch = self.in_flight or self.launch(observer)
        self.in_flight = None
        if batch is None:
            return StepOutput()
        batch = self._draws.begin(batch)
        if self._may_run_ahead(batch):
            self._expect(batch)
            self.in_flight = self.launch(observer)
        output = self._complete(batch, was_late, is_ahead)
        if not self.has_work():
            self._completed_s = None
        return output

    def launch(self, observer: StepObserver) -> InFlightBatch | None:
        """Schedule a batch and hand it to the device; None if nothing can run."""
        began_s = self._clock()
        batch = self._scheduler.schedule(self._table.count(Status.RESERVED))
        if not batch.chunks:
            return None
        scheduling_s = self._clock() - began_s
        self._blocks.on_launched()
        started = tuple(Started(s.request_id, s.num_computed, s.load_s) for s in batch.started)
        for start in started:
            observer.started(start)
        if _log.isEnabledFor(logging.DEBUG):
            self._log_batch(batch)
        wanted = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        masks = None if any(s.num_pending for s in wanted) else self._grammars.begin(wanted)
        chunks, computed, failed = self._forward_pass.run(batch.chunks, observer)
        done = tuple(each for chunk in chunks for each in self._forward_pass.advance(chunk))
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        drafts = [chunk.draft for chunk in chunks if chunk.samples]
        self._pacer.record_launch(self._clock() - began_s)
        return InFlightBatch(
            started, chunks, done, computed, failed, masks, sampling, drafts, kind_of(chunks), began_s, scheduling_s
        )  # fmt: skip

    def _log_batch(self, batch: Batch) -> None:
        """Log what this step computes, and of requests that begin how much the prefix cache had."""
        for sequence in batch.started:
            _log.debug(
                "request %s begins: %d of its %d prompt tokens are cached",
                sequence.request_id, sequence.num_computed, sequence.num_prompt,
            )  # fmt: skip
        num_decode = sum(chunk.is_decode for chunk in batch.chunks)
        _log.debug(
            "a step of %d answers and %d tokens of prompts; %d requests wait, %d of %d KV blocks are free",
            num_decode, sum(chunk.num_tokens for chunk in batch.chunks) - num_decode, self._intake.num_waiting,
            self._pool.num_available, self._pool.num_blocks,
        )  # fmt: skip

    def _may_run_ahead(self, batch: InFlightBatch) -> bool:
        """Return whether nothing of the next batch depends on which tokens this one draws.

        Each running sequence may need a block: if that took a preemption, a sequence would be computed again whose last
        token is not known. Nor do tokens of answers wait until a batch is launched that takes the host longer than they
        take the device.
        """
        if batch.computed.pending_tokens is None or self._pool.num_available < len(self._scheduler.running):
            return False
        if self._verification is not None and self._verification.awaits(batch):
            return False
        return not (any(chunk.is_decode for chunk in batch.chunks) and self._may_be_long())

    def _may_be_long(self) -> bool:
        """Return whether the next batch with answers may be long to launch, by the rows of prompts."""
        quick = self._runner.max_graph_rows
        if self._max_mixed_tokens <= quick:
            return False
        prompts = (s for s in (*self._scheduler.running, *self._scheduler.waiting) if not s.is_decoding)
        return any(num_rows > quick for num_rows in accumulate(len(s.tokens) - s.num_computed for s in prompts))

    def _expect(self, batch: InFlightBatch) -> None:
        """Make each sequence of the batch one token longer.

        Those that go no further here sit the next batch out.
        """
        for sequence in batch.sampling:
            if self._table.is_present(sequence):
                sequence.tokens.append(0)
                sequence.num_pending = 1
                if sequence.handoff or self._stop_check.is_full(sequence):
                    self._scheduler.remove(sequence)
                    sequence.status = Status.ENDING

    def _complete(self, batch: InFlightBatch, was_late: bool, is_ahead: bool) -> StepOutput:
        """Wait for what the device computed, and return it. `was_late`: see LaunchPacer.record_completion.

        `is_ahead`: it was launched while the batch before it was computed.
        """
        sampling, tokens, lost = self._draws.collect(batch)
        for sequence, token in zip(sampling, tokens, strict=True):
            if sequence.num_pending:
                sequence.tokens.pop()
                sequence.num_pending = 0
            sequence.tokens.append(token.token_id)
        if self.in_flight is not None and self.in_flight.masks is None:  # first of all: the next draw waits for them
            self.in_flight = self._draws.begin_masks(self.in_flight)
        further, verified, failed = self._verify(batch.known_drafts())
        now_s = self._clock()
        span_s = self._pacer.record_completion(batch.kind, batch.began_s, now_s, was_late)
        self._record_drafts(batch, is_ahead, span_s, now_s)
        self._blocks.on_completed()
        num_prefill, num_decode = self._count(batch.chunks, span_s, sum(each.num_accepted for each in verified))
        return StepOutput(
            started=batch.started,
            chunks=batch.done_chunks,
            sampled=(*(Sampled(s.request_id, token) for s, token in zip(sampling, tokens, strict=True)), *further),
            ended=tuple(end for sequence in sampling for end in self._settle(sequence)),
            failed=(*batch.failed, *lost, *failed),
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decode,
            scored=tuple(scores.told() for scores in batch.computed.scored),
            span_s=span_s,
            verified=tuple(verified),
        )

    def _verify(self, batch: InFlightBatch) -> tuple[list[Sampled], list[Verified], list[EngineFailure]]:
        """Return what the drafts of the batch came to; nothing without speculative decoding."""
        if self._verification is None or not any(batch.drafts):
            return [], [], []
        return self._verification.verify(batch)

    def _record_drafts(self, batch: InFlightBatch, is_ahead: bool, span_s: float, now_s: float) -> None:
        """Learn how long a step of answers alone takes, with drafts or without.

        A device that waited for its launch waited since the step before, unless there was nothing to do.
        """
        completed_s, self._completed_s = self._completed_s, now_s
        if self._verification is None or not all(chunk.is_decode for chunk in batch.chunks):
            return
        if batch.computed.pending_tokens is not None and not is_ahead and completed_s is not None:
            span_s = now_s - completed_s
        num_rows = sum(chunk.num_rows for chunk in batch.chunks)
        self._verification.record_step(num_rows, span_s, is_ahead, batch.scheduling_s)

    def _settle(self, sequence: Sequence) -> list[Ended]:
        """End the answer after a token, or hold it for its handoff, or leave it running."""
        if not self._table.is_present(sequence):  # a token behind a drafted one could not be drawn
            return []
        reason = self._stop_check.reason(sequence)
        if sequence.handoff:
            self._scheduler.remove(sequence)
            sequence.status = Status.HELD
        elif reason is not None:
            self._requests.release(sequence.request_id)
        elif sequence.status is Status.ENDING:  # kept local while its token was drawn
            self._scheduler.resume(sequence)
        return [] if reason is None else [Ended(sequence.request_id, sequence.num_generated, reason)]

    def _count(self, chunks: SequenceOf[ScheduledChunk], span_s: float, num_accepted: int) -> tuple[int, int]:
        """Account the batch; return its tokens of prompts and of answers, accepted ones of drafts among these."""
        num_answers = sum(chunk.is_decode for chunk in chunks)
        num_rows = sum(chunk.num_rows for chunk in chunks if chunk.is_decode)
        num_prefill = sum(chunk.num_tokens for chunk in chunks) - num_answers
        num_attended = float(sum(c.num_tokens * c.first_token for c in chunks if not c.is_decode))
        self._scheduler.mixed_budget.record(num_prefill, num_rows, span_s, num_attended)
        self.counters.add(num_prefill, num_answers + num_accepted)
        return num_prefill, num_answers + num_accepted
