"""Runs a batch on the model: inputs in, logits out."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from engine.batch import Piece
from engine.decoder import Decoder
from engine.inputs import prepare
from engine.kv_cache import KVCache
from engine.messages import Scored
from engine.scoring import score, spans


@dataclass(frozen=True)
class Computed:
    """`logits` `[number of pieces that sample, vocab]` float32; `scored`: of the prompts that asked for it."""

    logits: torch.Tensor
    scored: tuple[Scored, ...] = ()


class Runner:
    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self._model, self._cache = model, cache

    @torch.inference_mode()
    def forward(self, pieces: SequenceOf[Piece]) -> Computed:
        """Writes K and V; running it again writes the same."""
        found = spans(pieces)
        logits = self._model.forward(prepare(pieces, found, self._model.heads, self._cache), self._cache)
        return Computed(logits.sampled, score(found, logits.scored))
