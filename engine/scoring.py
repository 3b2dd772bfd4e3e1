"""What the model says of a prompt's own tokens: log-probability, rank, and the likeliest in their place.

A prompt is scored chunk by chunk as it is computed, and a chunk a few rows at a time: the logits of a whole prompt are
gigabytes (8192 tokens times a vocabulary of 152k, float32: 5 GB), those of `ROWS` rows 39 MB.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from contracts.events import PromptToken
from engine.batch import Piece
from engine.messages import Scored

ROWS = 64


@dataclass(frozen=True)
class Span:
    """At most `ROWS` prompt tokens (`targets`, by their place in the prompt) that rows of a piece predict.

    `first_row`: of the batch; it predicts `targets[0]`.
    """

    piece: Piece
    targets: range
    first_row: int

    @property
    def rows(self) -> torch.Tensor:
        return torch.arange(self.first_row, self.first_row + len(self.targets))


def spans(pieces: SequenceOf[Piece]) -> list[Span]:
    """What is to be scored in a batch of `pieces`: each token of a prompt once, though it may be computed again."""
    found, row = [], 0
    for piece in pieces:
        targets = _targets(piece)
        for at in range(0, len(targets), ROWS):
            part = targets[at : at + ROWS]
            found.append(Span(piece, part, row + part.start - 1 - piece.first_token))
        row += piece.num_tokens
    return found


def score(found: Iterable[Span], logits: Iterable[torch.Tensor]) -> tuple[Scored, ...]:
    """`logits`: for each span its rows, `[R, vocab]` float32."""
    return tuple(_scored(span, logits_RV) for span, logits_RV in zip(found, logits, strict=True))


def _targets(piece: Piece) -> range:
    """Row p predicts token p + 1. Empty for those who did not ask: all of their prompt counts as scored."""
    sequence = piece.sequence
    return range(max(piece.first_token + 1, sequence.num_scored), min(piece.end + 1, sequence.num_prompt))


def _scored(span: Span, logits_RV: torch.Tensor) -> Scored:
    sequence, targets = span.piece.sequence, span.targets
    logprobs_RV = logits_RV.log_softmax(-1)
    token_ids = sequence.tokens[targets.start : targets.stop].tolist()
    own_R1 = logprobs_RV.gather(1, torch.tensor(token_ids)[:, None])
    ranks = (logprobs_RV > own_R1).sum(-1) + 1
    top = logprobs_RV.topk(sequence.sampling.prompt_logprobs or 0)
    columns = (token_ids, own_R1[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist())
    tokens = [
        PromptToken(token_id, logprob, rank, list(zip(ids, values, strict=True)))
        for token_id, logprob, rank, ids, values in zip(*columns, strict=True)
    ]
    return Scored(sequence.request_id, targets.start, tokens)
