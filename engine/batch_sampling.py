"""The tokens of a batch that was launched: drawn by the device, or by the host from its logits."""

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import msgspec
import torch

from contracts.errors import RequestError
from contracts.events import Token
from engine.backend import Runner
from engine.in_flight import InFlightBatch, LogitRow
from engine.messages import EngineFailure
from engine.request_release import RequestRelease
from engine.sampling.grammar_masks import Grammars
from engine.sampling.host_sampler import Sampler
from engine.sampling.token_masks import TokenMasks
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
        token are drawn in vain. Rows of a draft are adjusted by the tokens before them, so `collect` draws them.
        """
        if batch.computed.pending_tokens is not None or any(batch.drafts):
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
            tokens = batch.computed.pending_tokens.wait()
            drawn = [(sequence, tokens[row]) for row, sequence in zip(batch.first_rows, batch.sampling, strict=True)]
            present = [(sequence, token) for sequence, token in drawn if self._table.is_present(sequence)]
            return [sequence for sequence, _ in present], [token for _, token in present], ()
        rows = zip(batch.first_rows, batch.sampling, batch.drafts, strict=True)
        wanted = [LogitRow(row, each, draft.drawn(0)) for row, each, draft in rows if self._table.is_present(each)]
        if not wanted:  # nothing else waits, and what has been computed is free
            self._runner.wait()
            return [], [], ()
        told, lost = self._draw(wanted, batch.computed.logits, batch.known_masks())
        if (hidden := batch.computed.hidden) is not None:
            row_of = {each.sequence: each.row for each in wanted}
            told = [(each, _with_embedding(token, each, hidden[row_of[each]])) for each, token in told]
        if not told:  # nothing else waited for the device, which may be what failed: then this process ends
            self._runner.wait()
        return [sequence for sequence, _ in told], [token for _, token in told], lost

    def collect_further(
        self, batch: InFlightBatch, wanted: SequenceOf[LogitRow]
    ) -> tuple[list[tuple[Sequence, Token]], tuple[EngineFailure, ...]]:
        """Draw from rows of the batch behind drafted tokens, which their sequences have by now.

        A device that drew by itself has drawn from all rows: by the position of each, so it drew what follows if the
        drafted tokens are right. Returns the tokens, and what became of those that can't have one.
        """
        if not wanted:
            return [], ()
        if batch.computed.pending_tokens is not None:
            tokens = batch.computed.pending_tokens.wait()
            return [(each.sequence, tokens[each.row]) for each in wanted], ()
        masks = self._grammars.begin(sequences := [each.sequence for each in wanted]).result()
        unguided = tuple(
            self._unguided(s, masks.errors[s.request_id]) for s in sequences if s.request_id in masks.errors
        )
        left = [each for each in wanted if each.sequence.request_id not in masks.errors]
        told, lost = self._draw(left, batch.computed.logits, masks) if left else ([], ())
        return told, (*unguided, *lost)

    def _draw(
        self, wanted: SequenceOf[LogitRow], logits: torch.Tensor, masks: TokenMasks
    ) -> tuple[list[tuple[Sequence, Token]], tuple[EngineFailure, ...]]:
        """Have the host draw from these rows."""
        if len(wanted) < len(logits):
            logits = logits[[each.row for each in wanted]]
        sequences = [each.sequence for each in wanted]
        guesses = {place: each.guess for place, each in enumerate(wanted) if each.guess is not None}
        found = self._sampler.sample_each(sequences, logits, masks, guesses)
        lost = tuple(self._undrawn(s, why) for s, why in zip(sequences, found, strict=True) if isinstance(why, str))
        told = [(s, token) for s, token in zip(sequences, found, strict=True) if isinstance(token, Token)]
        return told, lost

    def _undrawn(self, sequence: Sequence, message: str) -> EngineFailure:
        return self._requests.fail(sequence, f"this request could not be computed: {message}")

    def _unguided(self, sequence: Sequence, message: str) -> EngineFailure:
        why = f"the grammar of this answer (a schema, a regex, choices or tools) can't be gone on with: {message}"
        return self._requests.fail(sequence, why, RequestError.code)


def _with_embedding(token: Token, sequence: Sequence, hidden_H: torch.Tensor) -> Token:
    """Return the token with the row that it was drawn from, if the sequence asks for it."""
    if not sequence.sampling.returns_embedding:
        return token
    return msgspec.structs.replace(token, embedding=hidden_H.numpy().astype("<f4").tobytes())
