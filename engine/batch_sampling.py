"""The tokens of a batch that was launched: drawn by the device, or by the host from its logits."""

import logging
from dataclasses import replace

from contracts.errors import RequestError
from contracts.events import Token
from engine.backend import Runner
from engine.in_flight import InFlightBatch
from engine.messages import EngineFailure
from engine.request_release import RequestRelease
from engine.sampling.grammar_masks import Grammars
from engine.sampling.host_sampler import Sampler
from engine.sequence import Sequence
from engine.sequence_table import SequenceTable

_log = logging.getLogger(__name__)


class TokenDraws:
    """The draws of a batch.

    A request whose grammar can't go on, or whose parameters can't be met, fails alone.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        grammars: Grammars,
        table: SequenceTable,
        requests: RequestRelease,
    ) -> None:
        self._runner, self._sampler, self._grammars = runner, sampler, grammars
        self._table, self._requests = table, requests

    def begin_masks(self, batch: InFlightBatch) -> InFlightBatch:
        """Begin on its masks, now that the tokens before are known."""
        present = [sequence for sequence in batch.sampling if self._table.is_present(sequence)]
        return replace(batch, masks=self._grammars.begin(present))

    def begin(self, batch: InFlightBatch) -> InFlightBatch:
        """Let a device draw from now on.

        What else that takes (tokens for penalties, masks of grammars) is known. The rows of those that can't have a
        token are drawn in vain.
        """
        if batch.computed.pending_tokens is not None:
            return batch
        masks = batch.known_masks()
        present = [sequence for sequence in batch.sampling if self._table.is_present(sequence)]
        lost = tuple(self._unguided(s, masks.errors[s.request_id]) for s in present if s.request_id in masks.errors)
        batch = replace(batch, failed=(*batch.failed, *lost))
        if len(lost) == len(present):
            return batch
        try:
            drawn = self._runner.sample(batch.sampling, batch.computed.logits, masks)
        except Exception:  # whatever a request's parameters bring about
            _log.exception("%d tokens can't be drawn together", len(batch.sampling))
            drawn = None
        return replace(batch, computed=replace(batch.computed, pending_tokens=drawn))

    def collect(self, batch: InFlightBatch) -> tuple[list[Sequence], list[Token], tuple[EngineFailure, ...]]:
        """Wait for the tokens of the sequences that still want one.

        And what became of those that can't have one.
        """
        if batch.computed.pending_tokens is not None:
            drawn = zip(batch.sampling, batch.computed.pending_tokens.wait(), strict=True)
            present = [(sequence, token) for sequence, token in drawn if self._table.is_present(sequence)]
            return [sequence for sequence, _ in present], [token for _, token in present], ()
        wanted = [(row, s) for row, s in enumerate(batch.sampling) if self._table.is_present(s)]
        if not wanted:  # nothing else waits, and what has been computed is free
            self._runner.wait()
            return [], [], ()
        logits = batch.computed.logits
        if len(wanted) < len(batch.sampling):
            logits = logits[[row for row, _ in wanted]]
        sequences = [sequence for _, sequence in wanted]
        found = self._sampler.sample_each(sequences, logits, batch.known_masks())
        lost = tuple(self._undrawn(s, why) for s, why in zip(sequences, found, strict=True) if isinstance(why, str))
        told = [(s, token) for s, token in zip(sequences, found, strict=True) if isinstance(token, Token)]
        if not told:  # nothing else waited for the device, which may be what failed: then this process ends
            self._runner.wait()
        return [sequence for sequence, _ in told], [token for _, token in told], lost

    def _undrawn(self, sequence: Sequence, message: str) -> EngineFailure:
        return self._requests.fail(sequence, f"this request could not be computed: {message}")

    def _unguided(self, sequence: Sequence, message: str) -> EngineFailure:
        why = f"the grammar of this answer (a schema, a regex, choices or tools) can't be gone on with: {message}"
        return self._requests.fail(sequence, why, RequestError.code)
