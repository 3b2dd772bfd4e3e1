"""The runner of a batch on the CPU: inputs in, logits out."""

import sys
from collections.abc import Sequence as SequenceOf

import torch

from engine.backend import AuxReader, Computed, Written, ignore_progress, wants_hidden
from engine.cpu.batch_inputs import prepare
from engine.cpu.decoder import Decoder
from engine.cpu.grouped_cache import AnyKVCache
from engine.cpu.lora import lora_rows
from engine.sampling.prompt_logprobs import score, spans
from engine.sampling.token_masks import TokenMasks
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence


class CpuRunner:
    """The decoder over its cache. `reader`: what takes in the rows of aux layers, if anything does."""

    early_planes = max_graph_rows = 0
    gives_hidden = True
    max_draft_rows = sys.maxsize
    graph_rows: tuple[int, ...] = ()

    def __init__(self, model: Decoder, cache: AnyKVCache, reader: AuxReader | None = None) -> None:
        self._model, self._cache, self._reader = model, cache, reader

    @torch.inference_mode()
    def forward(self, pieces: SequenceOf[ScheduledChunk], written: Written = ignore_progress) -> Computed:
        found = spans(pieces)
        inputs = prepare(pieces, found, self._model.heads, self._cache)
        logits = self._model.forward(inputs, self._cache, wants_hidden(pieces), lora_rows(pieces))
        if self._reader is not None:
            self._reader.read(pieces, torch.cat(logits.aux, 1))
        computed = Computed(logits.sampled, score(found, logits.scored), hidden=logits.hidden)
        if inputs.states is not None:
            inputs.states.commit()
        return computed

    def forward_without_sampling(self, pieces: SequenceOf[ScheduledChunk]) -> Computed:
        return self.forward(pieces)

    def sample(self, sequences: SequenceOf[Sequence], logits: torch.Tensor, masks: TokenMasks) -> None:
        """The next batch needs its tokens on the host anyway."""

    def wait(self) -> None:
        """A forward pass ends with its call."""

    def prepare(self, piece: ScheduledChunk) -> None:
        """What there is to do takes microseconds of a step of milliseconds."""
