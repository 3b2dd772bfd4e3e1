"""The rest of a step, as chunks are chosen for it."""

from engine.scheduler.batch import ScheduledChunk


class StepBudget:
    """What a step may still compute beside its decodes."""

    def __init__(self, alone: int, beside_answers: int, has_answers: bool) -> None:
        self._alone, self._beside_answers, self._has_answers = alone, beside_answers, has_answers

    @property
    def num_tokens(self) -> int:
        return min(self._alone, self._beside_answers) if self._has_answers else self._alone

    def take(self, piece: ScheduledChunk) -> bool:
        """Take a chunk, or return False if it has to wait.

        That is an answer that is computed again, beside more of prompts than answers allow.
        """
        if piece.is_answer and not self._has_answers:
            if self._beside_answers <= 0:
                return False
            self._has_answers = True
        self._alone -= piece.num_tokens
        self._beside_answers -= piece.num_tokens
        return True
