"""Runs a batch on the model: inputs in, logits out, or on a device that draws for itself, tokens."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from contracts.events import Token
from contracts.ids import RequestId
from engine.batch import Piece
from engine.decoder import Decoder
from engine.inputs import prepare
from engine.kv_cache import KVCache
from engine.scoring import Scores, score, spans
from engine.sequence import Sequence


class Drawn(Protocol):
    """Tokens that a device draws by itself, while the host does something else."""

    @property
    def is_done(self) -> bool:
        """`wait` would not wait."""
        ...

    def wait(self) -> list[Token]:
        """Until all of the batch is computed: a token for each piece that samples, in order."""
        ...


@dataclass(frozen=True)
class Computed:
    """`logits` `[number of pieces that sample, vocab]` float32, of no meaning where `drawn` is there; `scored`: of the
    prompts that asked for it, to be told once the batch is computed.
    """

    logits: torch.Tensor
    scored: tuple[Scores, ...] = ()
    drawn: Drawn | None = None


Written = Callable[[bool], None]
"""(whether all planes of a batch's prompts have been launched, or only the early ones)"""


def unheard(is_all: bool) -> None:
    """Nobody waits for the planes."""


def ignore() -> None:
    """There is nothing to do."""


class Runner(Protocol):
    """`early_planes`: so many of the cache's are filled a while before a batch ends; 0 if all come at once.
    `quick_rows`: a batch of more takes the host several times as long to launch.
    """

    early_planes: int

    @property
    def quick_rows(self) -> int:
        """Constant once a model is loaded."""
        ...

    def forward(self, pieces: SequenceOf[Piece], written: Written = unheard) -> Computed:
        """Writes K and V; running it again, as after an error, writes the same. `written` is called when the early
        planes of prompts have been launched, and may be when all have: what is behind them is not in the cache. Raises
        RuntimeError.
        """
        ...

    def forward_undrawn(self, pieces: SequenceOf[Piece]) -> Computed:
        """The same without drawing: the tokens of the batch before stay on the device."""
        ...

    def draw(
        self, sequences: SequenceOf[Sequence], logits: torch.Tensor, allowed: Mapping[RequestId, np.ndarray]
    ) -> Drawn | None:
        """Have the device draw what `forward` left undrawn, and wait for nothing; `allowed`: see Sampler.sample. None
        from a runner whose tokens the host draws.
        """
        ...

    def wait(self) -> None:
        """Until all that was launched is computed."""
        ...

    def prepare(self, piece: Piece) -> None:
        """This newest token of an answer, whose id is not known yet, may be the next batch: what else that takes is
        done now. Nothing is being computed.
        """
        ...


class CpuRunner:
    early_planes = quick_rows = 0

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self._model, self._cache = model, cache

    @torch.inference_mode()
    def forward(self, pieces: SequenceOf[Piece], written: Written = unheard) -> Computed:
        found = spans(pieces)
        logits = self._model.forward(prepare(pieces, found, self._model.heads, self._cache), self._cache)
        return Computed(logits.sampled, score(found, logits.scored))

    def forward_undrawn(self, pieces: SequenceOf[Piece]) -> Computed:
        return self.forward(pieces)

    def draw(
        self, sequences: SequenceOf[Sequence], logits: torch.Tensor, allowed: Mapping[RequestId, np.ndarray]
    ) -> None:
        """The next batch needs its tokens on the host anyway."""

    def wait(self) -> None:
        """A forward pass ends with its call."""

    def prepare(self, piece: Piece) -> None:
        """What there is to do takes microseconds of a step of milliseconds."""
