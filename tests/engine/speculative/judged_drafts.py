"""Drafts of heads, noted as an engine makes them, and compared with what the formulas say."""

from collections.abc import Sequence as SequenceOf

from engine.engine import Engine
from engine.sequence import Sequence
from engine.speculative.proposer import Draft, Proposer
from tests.engine.speculative.drafting import KnowingProposer
from tests.engine.speculative.tiny_heads import ReferenceDrafts
from tests.engine.speculative.tiny_mtp import TinyMtp


class Judged(Proposer):
    """A head's drafter, whose every draft is noted.

    What `verified` drafts may be computed in their place, which is right more often.
    """

    def __init__(self, drafter: Proposer, verified: Proposer | None = None) -> None:
        self._drafter, self._verified = drafter, verified
        self.drafts: dict[tuple[int, ...], tuple[int, ...]] = {}

    def propose(self, sequences: SequenceOf[Sequence], num_tokens: SequenceOf[int]) -> list[Draft]:
        drafts = self._drafter.propose(sequences, num_tokens)
        for sequence, draft in zip(sequences, drafts, strict=True):
            self.drafts[tuple(sequence.tokens)] = draft.token_ids
        return drafts if self._verified is None else self._verified.propose(sequences, num_tokens)

    def end_sequence(self, sequence: Sequence) -> None:
        self._drafter.end_sequence(sequence)


def judge(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> Judged:
    """Have an engine verify known drafts, one in four of whose tokens is wrong, and note those of its head."""
    KnowingProposer.answers = dict(zip(map(tuple, prompts), expected, strict=True))
    return note(engine, KnowingProposer())


def note(engine: Engine, verified: Proposer | None = None) -> Judged:
    """Note the drafts of an engine's head; `verified` are computed in their place, if given."""
    speculator = engine.speculator
    assert speculator is not None
    judged = Judged(speculator._proposer, verified)  # pyright: ignore[reportPrivateUsage]
    speculator._proposer = judged  # pyright: ignore[reportPrivateUsage]
    return judged


def require_formulas(judged: Judged, reference: ReferenceDrafts | TinyMtp) -> None:
    """Compare each draft that was noted with the reference's, token by token."""
    assert judged.drafts
    for tokens, draft in judged.drafts.items():
        assert list(draft) == reference.after(tokens, len(draft)), f"after {len(tokens)} tokens"
