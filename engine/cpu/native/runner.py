"""The runner of the native path: a batch's tokens in, logits out, one call for all layers."""

import sys
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from engine.backend import AuxReader, Computed, Written, ignore_progress, wants_hidden
from engine.cpu.native.weights import NativeModel
from engine.sampling.prompt_logprobs import score, spans
from engine.sampling.token_masks import TokenMasks
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from kernels.cpu.native import BatchStruct, NativeKernels, NativeMatrix


class NativeRunner:
    """What CpuRunner is to torch's path. `reader`, if there is one, takes in the rows of `aux_layers`."""

    early_planes = max_graph_rows = 0
    gives_hidden = True
    max_draft_rows = sys.maxsize
    graph_rows: tuple[int, ...] = ()

    def __init__(
        self,
        kernels: NativeKernels,
        model: NativeModel,
        reader: AuxReader | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        self._kernels, self._model = kernels, model
        self._reader, self._aux_layers = reader, np.array(aux_layers, np.int32)
        self._head = NativeMatrix(model.struct.head, ())

    @torch.inference_mode()
    def forward(self, pieces: SequenceOf[ScheduledChunk], written: Written = ignore_progress) -> Computed:
        found = spans(pieces)
        counts = np.array([piece.num_rows for piece in pieces])
        sampled = _sampled(pieces, counts)
        if not found:  # rows that sample are in order, each once
            hidden = self._hidden(pieces, counts, sampled)
            return Computed(self._logits(hidden), hidden=torch.from_numpy(hidden) if wants_hidden(pieces) else None)
        scored = [span.rows.numpy() for span in found]
        wanted = np.unique(np.concatenate([sampled, *scored]))
        hidden = self._hidden(pieces, counts, wanted)
        ends = hidden[np.searchsorted(wanted, sampled)]
        scores = score(found, self._each(hidden, wanted, scored))
        return Computed(self._logits(ends), scores, hidden=torch.from_numpy(ends) if wants_hidden(pieces) else None)

    def forward_without_sampling(self, pieces: SequenceOf[ScheduledChunk]) -> Computed:
        return self.forward(pieces)

    def sample(self, sequences: SequenceOf[Sequence], logits: torch.Tensor, masks: TokenMasks) -> None:
        """The next batch needs its tokens on the host anyway."""

    def wait(self) -> None:
        """A forward pass ends with its call."""

    def prepare(self, piece: ScheduledChunk) -> None:
        """What there is to do takes microseconds of a step of milliseconds."""

    def _each(self, hidden: np.ndarray, wanted: np.ndarray, parts: SequenceOf[np.ndarray]) -> Iterator[torch.Tensor]:
        return (self._logits(hidden[np.searchsorted(wanted, part)]) for part in parts)

    def _logits(self, hidden: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(self._kernels.linear(self._head, np.ascontiguousarray(hidden)))

    def _hidden(self, pieces: SequenceOf[ScheduledChunk], counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Compute the batch; return what the head takes of the rows `wanted`, `[len(wanted), hidden_size]`."""
        # engine.intake and adopt have seen to it that no token is outside of the vocabulary.
        tokens = np.concatenate([np.frombuffer(piece.token_ids, np.int32) for piece in pieces])
        owners = np.repeat(np.arange(len(pieces), dtype=np.int32), counts)
        starts = np.array([piece.first_token for piece in pieces])
        positions = (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - starts, counts)).astype(np.int32)
        tables = np.zeros((len(pieces), max(len(piece.sequence.blocks) for piece in pieces)), np.int32)
        for row, piece in zip(tables, pieces, strict=True):
            row[: len(piece.sequence.blocks)] = piece.sequence.blocks
        rows = wanted.astype(np.int32)
        width = self._model.struct.hidden_size
        hidden = np.empty((len(rows), width), np.float32)
        aux = np.empty((len(tokens), len(self._aux_layers) * width), np.float32)
        batch = BatchStruct(
            num_rows=len(tokens),
            num_wanted=len(rows),
            table_stride=tables.shape[1],
            num_aux=len(self._aux_layers),
            tokens=tokens.ctypes.data,
            positions=positions.ctypes.data,
            sequences=owners.ctypes.data,
            tables=tables.ctypes.data,
            wanted=rows.ctypes.data,
            hidden=hidden.ctypes.data,
            aux_layers=self._aux_layers.ctypes.data,
            aux=aux.ctypes.data,
        )
        self._kernels.forward(self._model.struct, batch)
        if self._reader is not None:
            self._reader.read(pieces, torch.from_numpy(aux))
        return hidden


def _sampled(pieces: SequenceOf[ScheduledChunk], counts: np.ndarray) -> np.ndarray:
    """Return the rows of the batch that say what comes next.

    They are those of each newest token, and of its draft's tokens.
    """
    ends = np.cumsum(counts)
    parts = (range(end - 1 - len(p.draft), end) for p, end in zip(pieces, ends.tolist(), strict=True) if p.samples)
    return np.array([row for part in parts for row in part], np.int64)
