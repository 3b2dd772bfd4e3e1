"""The verification of drafts: which of their tokens the model would have drawn itself.

engine.speculative proposes them; its acceptance_rule says which are kept, its rejection_sampling has the rule for
tokens that a draft has drawn.
"""

from collections.abc import Callable

from engine.batch_sampling import TokenDraws
from engine.in_flight import InFlightBatch, LogitRow
from engine.messages import EngineFailure, Sampled, Verified
from engine.scheduler.draft_rows import DraftRows
from engine.sequence import Sequence
from engine.sequence_table import SequenceTable
from engine.speculative.acceptance_rule import AcceptanceRule
from engine.speculative.proposer import Draft
from engine.speculative.speculator import Speculator
from engine.stop_check import StopCheck


class DraftVerification:
    """Draws what comes after the right tokens of drafts, place by place.

    The row behind a drafted token is drawn from once that token has been drawn in its turn. So a sequence is at each
    draw as it would be without drafts: penalties have counted its tokens, a grammar has consumed them, the random
    number is that of the position, and nothing is to be undone behind the first wrong token. `on_accepted`: see
    engine.backend.Backend.
    """

    def __init__(
        self,
        draws: TokenDraws,
        table: SequenceTable,
        stop_check: StopCheck,
        speculator: Speculator,
        rows: DraftRows,
        rule: AcceptanceRule,
        on_accepted: Callable[[Sequence, int], None],
    ) -> None:
        self._draws, self._table, self._stop_check = draws, table, stop_check
        self._speculator, self._rows, self._rule, self._on_accepted = speculator, rows, rule, on_accepted

    def verify(self, batch: InFlightBatch) -> tuple[list[Sampled], list[Verified], list[EngineFailure]]:
        """Return the tokens behind the first of each sequence, which it has, and what became of the drafts.

        Sequences have their new tokens afterwards, and KV computed up to the newest one.
        """
        drafted = [
            (row, sequence, draft)
            for row, sequence, draft in zip(batch.first_rows, batch.sampling, batch.drafts, strict=True)
            if draft and self._table.is_present(sequence)
        ]
        sampled: list[Sampled] = []
        failed: list[EngineFailure] = []
        accepted = {sequence: 0 for _, sequence, _ in drafted}
        going_on = drafted
        for place in range(max((len(draft) for _, _, draft in drafted), default=0)):
            going_on = [each for each in going_on if self._rule.accepts(each[1], each[2], place)]
            for _, sequence, _ in going_on:
                accepted[sequence] += 1
                sequence.num_computed += 1  # the row of the drafted token has written its KV
                self._on_accepted(sequence, accepted[sequence])
            going_on = [each for each in going_on if self._stop_check.reason(each[1]) is None]
            wanted = [LogitRow(row + place + 1, sequence, draft.drawn(place + 1)) for row, sequence, draft in going_on]
            found, lost = self._draws.collect_further(batch, wanted)
            failed += lost
            for sequence, token in found:
                sequence.tokens.append(token.token_id)
                sampled.append(Sampled(sequence.request_id, token))
            going_on = [each for each in going_on if self._table.is_present(each[1])]
        return sampled, [self._told(sequence, draft, accepted[sequence]) for _, sequence, draft in drafted], failed

    def awaits(self, batch: InFlightBatch) -> bool:
        """Return whether the next batch should wait for the tokens of this one, so that drafts follow them."""
        going_on = [sequence for sequence in batch.sampling if not sequence.handoff]
        return any(batch.drafts) or self._speculator.awaits(going_on)

    def record_step(self, num_rows: int, span_s: float, is_ahead: bool, drafting_s: float) -> None:
        """Learn from a step of so many rows, all of answers, and of what its drafts took of it."""
        self._speculator.record_step(num_rows, span_s, is_ahead, drafting_s)

    def _told(self, sequence: Sequence, draft: Draft, num_accepted: int) -> Verified:
        self._speculator.record_draft(sequence, draft, num_accepted)
        if self._table.is_present(sequence):
            self._rows.give_back(sequence)
        return Verified(sequence.request_id, len(draft), num_accepted)
