"""The log-probabilities and ranks of a prompt's own tokens, and the likeliest in their place.

A prompt is scored chunk by chunk as it is computed, and a chunk a few rows at a time: the logits of a whole prompt are
gigabytes (8192 tokens times a vocabulary of 152k, float32: 5 GB), those of `ROWS` rows 39 MB.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from contracts.events import PromptToken
from engine.messages import Scored
from engine.sampling.logits_processors import Put, on_host
from engine.scheduler.batch import ScheduledChunk

ROWS = 64

Fetch = Callable[[torch.Tensor], torch.Tensor]
"""A copy on the host, which is complete once what was launched before is."""


@dataclass(frozen=True)
class PromptLogprobSpan:
    """At most `ROWS` prompt tokens (`targets`, by their place in the prompt) that rows of a piece predict.

    `first_row`: of the batch; it predicts `targets[0]`.
    """

    chunk: ScheduledChunk
    targets: range
    first_row: int

    @property
    def token_ids(self) -> list[int]:
        return self.chunk.sequence.tokens[self.targets.start : self.targets.stop].tolist()

    @property
    def rows(self) -> torch.Tensor:
        return torch.arange(self.first_row, self.first_row + len(self.targets))


def spans(pieces: SequenceOf[ScheduledChunk]) -> list[PromptLogprobSpan]:
    """Return what is to be scored in a batch of `pieces`.

    Each token of a prompt once, though it may be computed again.
    """
    found, row = [], 0
    for piece in pieces:
        targets = _targets(piece)
        for at in range(0, len(targets), ROWS):
            part = targets[at : at + ROWS]
            found.append(PromptLogprobSpan(piece, part, row + part.start - 1 - piece.first_token))
        row += piece.num_rows
    return found


class Scores:
    """What the logits of a span say, worked out where they are and then on its way to the host."""

    def __init__(self, span: PromptLogprobSpan, logits_RV: torch.Tensor, put: Put, fetch: Fetch) -> None:
        self._span, sampling = span, span.chunk.sequence.sampling
        (own_ids,) = put([np.array(span.token_ids, np.int64)])
        logprobs_RV = logits_RV.log_softmax(-1)
        own_R1 = logprobs_RV.gather(1, own_ids[:, None])
        ranks_R = (logprobs_RV > own_R1).sum(-1) + 1
        top = logprobs_RV.topk(sampling.prompt_logprobs or 0)
        self._columns = [fetch(column) for column in (own_R1[:, 0], ranks_R, top.indices, top.values)]

    def told(self) -> Scored:
        """Once the batch has been computed."""
        span, (owns, ranks, top_ids, top_values) = self._span, (column.tolist() for column in self._columns)
        tokens = [
            PromptToken(token_id, logprob, rank, list(zip(ids, values, strict=True)))
            for token_id, logprob, rank, ids, values in zip(
                span.token_ids, owns, ranks, top_ids, top_values, strict=True
            )
        ]
        return Scored(span.chunk.sequence.request_id, span.targets.start, tokens)


def score(
    found: Iterable[PromptLogprobSpan],
    logits: Iterable[torch.Tensor],
    put: Put = on_host,
    fetch: Fetch = lambda column: column,
) -> tuple[Scores, ...]:
    """`logits`: for each span its rows, `[R, vocab]` float32."""
    return tuple(Scores(span, logits_RV, put, fetch) for span, logits_RV in zip(found, logits, strict=True))


def _targets(piece: ScheduledChunk) -> range:
    """Row p predicts token p + 1. Empty for those who did not ask: all of their prompt counts as scored."""
    sequence = piece.sequence
    return range(max(piece.first_token + 1, sequence.num_scored), min(piece.end + 1, sequence.num_prompt))
