"""The requests that come in: what can be served, and what waits for its grammar."""

from collections.abc import Callable, Collection

import numpy as np

from contracts.errors import Overloaded, RequestError
from engine.adapters import Adapters, LoadedAdapter
from engine.messages import EngineRequest
from engine.sampling.grammar_masks import PATIENCE_S, Grammars
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence
from engine.sequence_table import SequenceTable


class Intake:
    """The door of an engine. No step waits for a grammar that compiles: its request does."""

    def __init__(
        self,
        table: SequenceTable,
        scheduler: Scheduler,
        grammars: Grammars,
        vocab_size: int,
        max_model_len: int,
        max_num_waiting: int,
        gives_hidden: bool,
        adapters: Adapters,
        is_classifier: bool,
    ) -> None:
        self._table, self._scheduler, self._grammars = table, scheduler, grammars
        self._vocab_size, self._max_model_len, self._max_num_waiting = vocab_size, max_model_len, max_num_waiting
        self._gives_hidden, self._adapters, self._is_classifier = gives_hidden, adapters, is_classifier
        self._compiling: dict[Sequence, Callable[[Sequence], None]] = {}

    @property
    def compiling(self) -> Collection[Sequence]:
        """The sequences whose grammars are being compiled."""
        return self._compiling.keys()

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting) + len(self._compiling)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError if it can never run, Overloaded when the queue is full."""
        sequence = self.sequence_of(request)
        if self.num_waiting >= self._max_num_waiting:
            raise Overloaded(f"{self.num_waiting} requests are waiting already")
        self._table.add(sequence)
        self._grammars.open(sequence, PATIENCE_S)
        self.once_compiled(sequence, self._scheduler.add)

    def sequence_of(self, request: EngineRequest) -> Sequence:
        """Return a sequence of the request.

        Raises RequestError if it can never run, AdapterMissing if it can't here.
        """
        num_tokens = len(request.token_ids)
        if self._table.knows(request.request_id):
            raise RequestError(f"the request {request.request_id} is here already")
        if num_tokens - request.num_answered <= 0:
            raise RequestError("the prompt is empty", "prompt")
        if request.sampling.returns_embedding and not self._gives_hidden:
            raise RequestError("this worker gives no embeddings: workers on CPUs do")
        if self._is_classifier and not request.sampling.returns_embedding:
            raise RequestError("this model classifies texts, and writes none")
        if num_tokens >= self._max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens; the longest that leaves room for an answer "
                f"has {self._max_model_len - 1} (context of {self._max_model_len})",
                "prompt",
            )
        outside = RequestError(f"the prompt has token ids outside of 0 to {self._vocab_size - 1}", "prompt")
        try:
            sequence = _sequence(request, self._adapters.find(request.adapter))
        except OverflowError:  # of 32 bits
            raise outside from None
        # As unsigned numbers negative ones are the largest. Python's min and max of 8192 ids took 0.18 ms.
        if np.frombuffer(sequence.tokens, np.uint32).max() >= self._vocab_size:
            raise outside
        return sequence

    def once_compiled(self, sequence: Sequence, go_on: Callable[[Sequence], None]) -> None:
        """Go on at once, or at the beginning of the step that finds a large grammar compiled."""
        if self._grammars.is_ready(sequence):
            go_on(sequence)
        else:
            self._compiling[sequence] = go_on

    def go_on_compiled(self) -> None:
        for sequence in [s for s in self._compiling if self._grammars.is_ready(s)]:
            self._compiling.pop(sequence)(sequence)

    def drop(self, sequence: Sequence) -> bool:
        """Forget a sequence that waits for its grammar. Returns False for one that does not."""
        return self._compiling.pop(sequence, None) is not None


def _sequence(request: EngineRequest, adapter: LoadedAdapter | None) -> Sequence:
    return Sequence(
        request.request_id,
        request.token_ids,
        request.sampling,
        handoff=request.handoff,
        priority=request.priority,
        cache_salt=request.cache_salt,
        num_answered=request.num_answered,
        accepted_loss=request.loss,
        late_s=request.late_s,
        tenant=request.tenant,
        cost=request.cost,
        adapter=adapter,
    )
