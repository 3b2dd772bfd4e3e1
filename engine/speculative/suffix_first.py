"""Drafts from texts where these know how it goes on, else from a head."""

from collections.abc import Sequence as SequenceOf

from engine.sequence import Sequence
from engine.speculative.proposer import NO_DRAFT, Draft, Proposer
from engine.speculative.suffix import SuffixProposer

MIN_MATCH = 6
"""So many of the newest tokens must have occurred before for what followed there to be preferred."""


class SuffixFirstProposer:
    """Asks the head for the answers alone of which a text has no long match.

    A copied passage is guessed best by what it copies, and costs no pass of a head.
    """

    def __init__(self, head: Proposer) -> None:
        self._suffix, self._head = SuffixProposer(), head

    def propose(self, sequences: SequenceOf[Sequence], num_tokens: SequenceOf[int]) -> list[Draft]:
        drafts = self._suffix.propose(sequences, num_tokens)
        unmatched = [place for place, draft in enumerate(drafts) if draft.strength < MIN_MATCH]
        if not unmatched:
            return drafts
        asked, counts = [sequences[place] for place in unmatched], [num_tokens[place] for place in unmatched]
        for place, draft in zip(unmatched, self._head.propose(asked, counts), strict=True):
            if draft is not NO_DRAFT:  # a head may have read nothing of an answer
                drafts[place] = draft
        return drafts

    def end_sequence(self, sequence: Sequence) -> None:
        self._suffix.end_sequence(sequence)
        self._head.end_sequence(sequence)
