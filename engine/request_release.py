"""The end of a request: everything that it holds is let go."""

import logging

from contracts.errors import TandemError
from contracts.ids import RequestId
from engine.cache.deferred_release import DeferredRelease
from engine.cache.prefix_insertion import PrefixInserter
from engine.intake import Intake
from engine.messages import EngineFailure
from engine.prefix_loads import ReservedLoads
from engine.sampling.grammar_masks import Grammars
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence
from engine.sequence_table import SequenceTable
from engine.speculative.speculator import Speculator

_log = logging.getLogger(__name__)


class RequestRelease:
    """The one place where a request's blocks are let go, however it ends. A writer's hold stays."""

    def __init__(
        self,
        table: SequenceTable,
        scheduler: Scheduler,
        intake: Intake,
        grammars: Grammars,
        prefix_cache: PrefixInserter,
        blocks: DeferredRelease,
        loads: ReservedLoads,
        speculator: Speculator | None = None,
    ) -> None:
        self._table, self._scheduler, self._intake, self._grammars = table, scheduler, intake, grammars
        self._prefix_cache, self._blocks = prefix_cache, blocks
        self._loads, self._speculator = loads, speculator

    def release(self, request_id: RequestId) -> None:
        """Forget the request, whatever its state. Its blocks become cached or free. Idempotent."""
        self._scheduler.give_up(request_id)
        sequence = self._table.pop(request_id)
        if sequence is None:
            return
        _log.debug(
            "request %s is over here, after %d tokens of its answer: %d KV blocks are let go",
            request_id, sequence.num_generated, len(sequence.blocks),
        )  # fmt: skip
        self._loads.cancel(request_id)
        if not self._intake.drop(sequence):
            self._scheduler.remove(sequence)
        if sequence.has_grown and sequence.started:
            self._prefix_cache.insert_all(sequence)
        self._blocks.release(sequence.blocks, sequence.lease)
        self._grammars.forget(sequence)
        if self._speculator is not None:
            self._speculator.end_sequence(sequence)

    def fail(self, sequence: Sequence, message: str, code: str = TandemError.code) -> EngineFailure:
        """Release the request and return what is to be told of it."""
        self.release(sequence.request_id)
        return EngineFailure(sequence.request_id, code, message)
