"""Proposers for tests, whose drafts are right and wrong by plan."""

from collections.abc import Sequence as SequenceOf
from typing import ClassVar

import numpy as np

from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.sequence import Sequence
from engine.speculative.proposer import NO_DRAFT, Draft


def sequence_of(tokens: SequenceOf[int], num_prompt: int | None = None, **options) -> Sequence:
    """Return a sequence, all of whose tokens but the first `num_prompt` are its answer's."""
    sampling = SamplingParams(max_tokens=1000, seed=1, **options.pop("sampling", {}))
    start = len(tokens) if num_prompt is None else num_prompt
    made = Sequence(RequestId("r"), list(tokens[:start]), sampling, **options)
    made.tokens.extend(tokens[start:])
    return made


class KnowingProposer:
    """Drafts what the answers are known to be, with a wrong token in some places.

    `answers`: prompt -> its answer. `wrong`: the share of tokens that are another than the right one; `vocab`: how many
    there are.
    """

    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    wrong = 0.25
    vocab = 320

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def propose(self, sequences: SequenceOf[Sequence], num_tokens: SequenceOf[int]) -> list[Draft]:
        return [self._draft(sequence, count) for sequence, count in zip(sequences, num_tokens, strict=True)]

    def end_sequence(self, sequence: Sequence) -> None:
        """Everything was known before."""

    def _draft(self, sequence: Sequence, num_tokens: int) -> Draft:
        known = self.answers.get(tuple(sequence.tokens[: sequence.answer_start]))
        if known is None:
            return NO_DRAFT
        right = known[sequence.num_generated : sequence.num_generated + num_tokens]
        shifts = self._random.integers(1, self.vocab, len(right)) * (self._random.random(len(right)) < self.wrong)
        return Draft(tuple((token + int(shift)) % self.vocab for token, shift in zip(right, shifts, strict=True)))
