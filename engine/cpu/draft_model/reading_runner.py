"""A target's runner whose batches a draft model reads, too."""

from collections.abc import Sequence as SequenceOf

import torch

from engine.backend import Computed, PendingTokens, Runner, Written, ignore_progress
from engine.cpu.draft_model.drafter import ModelDrafter
from engine.sampling.token_masks import TokenMasks
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence


class ReadingRunner:
    """See engine.backend.Runner. What the target has computed, the draft model reads in the same step."""

    def __init__(self, target: Runner, drafter: ModelDrafter) -> None:
        self._target, self._drafter = target, drafter
        self.early_planes, self.max_graph_rows = target.early_planes, target.max_graph_rows
        self.gives_hidden = target.gives_hidden
        self.max_draft_rows, self.graph_rows = target.max_draft_rows, target.graph_rows

    def forward(self, pieces: SequenceOf[ScheduledChunk], written: Written = ignore_progress) -> Computed:
        computed = self._target.forward(pieces, written)
        self._drafter.read(pieces)
        return computed

    def forward_without_sampling(self, pieces: SequenceOf[ScheduledChunk]) -> Computed:
        return self.forward(pieces)

    def sample(self, sequences: SequenceOf[Sequence], logits: torch.Tensor, masks: TokenMasks) -> PendingTokens | None:
        return self._target.sample(sequences, logits, masks)

    def wait(self) -> None:
        self._target.wait()

    def prepare(self, piece: ScheduledChunk) -> None:
        self._target.prepare(piece)
