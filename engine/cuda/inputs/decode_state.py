"""What a decode step reads and writes, at addresses that a captured graph keeps."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from engine.cuda.inputs.batch_inputs import DecodeRows
from engine.cuda.inputs.sampling_columns import SamplingColumns
from engine.cuda.runtime.upload import page_locked


class Word(IntEnum):
    """First 32-bit row of each column; 64-bit ones take two.

    All but DRAWN come from the host, in one copy a step; DRAFTED is then written by a draft head, if there is one.
    """

    DRAWN = 0
    GIVEN = 2
    DRAFTED = 4
    SEEDS = 6
    SLOTS = 8
    SOURCES = 10
    LENGTHS = 11
    POSITIONS = 12
    TOP_KS = 13
    TEMPERATURES = 14
    TOP_PS = 15
    MIN_PS = 16
    DRAW_POSITIONS = 17
    BEHIND = 18


NUM_WORDS = 19


def pack(decodes: DecodeRows | None, drawn: SamplingColumns, max_rows: int) -> np.ndarray:
    """`[NUM_WORDS - 2, max_rows]` int32: everything from GIVEN on.

    Rows that draw are those of decodes, then others.
    """
    words = np.zeros((NUM_WORDS, max_rows), np.int32)

    def put(word: Word, values: np.ndarray) -> None:
        width = values.itemsize // 4
        words[word : word + width].reshape(-1)[: width * len(values)] = values.view(np.int32)

    if decodes is not None:
        put(Word.GIVEN, decodes.token_ids)
        put(Word.SLOTS, decodes.slots.astype(np.int64))
        put(Word.SOURCES, decodes.sources)
        put(Word.LENGTHS, decodes.lengths)
        put(Word.POSITIONS, decodes.lengths - 1)
        put(Word.BEHIND, decodes.behind)
    put(Word.SEEDS, drawn.seeds)
    put(Word.TOP_KS, drawn.top_ks)
    put(Word.TEMPERATURES, drawn.temperatures)
    put(Word.TOP_PS, drawn.top_ps)
    put(Word.MIN_PS, drawn.min_ps)
    put(Word.DRAW_POSITIONS, drawn.positions)
    return words[Word.GIVEN :]


def give(words: np.ndarray, token_id: int) -> None:
    """Another token in the first row of what `pack` made."""
    words[: Word.DRAFTED - Word.GIVEN].reshape(-1).view(np.int64)[0] = token_id


@dataclass(frozen=True)
class DrawInputs:
    """Columns of the sampling operation, `[R]` each."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    seeds: Tensor
    positions: Tensor


class DecodeState:
    """`logits` `[max_rows, vocab]` float32, `tables` `[max_rows, max_blocks]`."""

    def __init__(self, max_rows: int, max_blocks: int, vocab: int, device: torch.device) -> None:
        self.max_rows, self.device = max_rows, device
        self._words = torch.zeros((NUM_WORDS, max_rows), dtype=torch.int32, device=device)
        self.tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self.logits = torch.zeros((max_rows, vocab), device=device)
        self.token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.sampled = self._column(Word.DRAWN, torch.int64)
        self.drafted = self._column(Word.DRAFTED, torch.int64)
        self.logprobs = torch.zeros(max_rows, device=device)
        self.slots = self._column(Word.SLOTS, torch.int64)
        self.lengths = self._column(Word.LENGTHS, torch.int32)
        self.positions = self._column(Word.POSITIONS, torch.int32)
        self.behind = self._column(Word.BEHIND, torch.int32)

    def staged(self, words: np.ndarray) -> np.ndarray:
        """The same where `put` copies from at once."""
        return page_locked(words, self.device).numpy()

    def put(self, words: np.ndarray) -> None:
        """What `pack` made."""
        self._words[Word.GIVEN :].copy_(page_locked(words, self.device), non_blocking=True)

    def put_tables(self, tables: np.ndarray) -> None:
        """`[rows, width]` block ids."""
        rows, width = tables.shape
        self.tables[:rows, :width].copy_(page_locked(tables, self.device), non_blocking=True)

    def gather_tokens(self, count: int) -> Tensor:
        """The newest token of each row, from the device's own draws or from the host: DecodeRows.sources."""
        pool = self._words[Word.DRAWN : Word.SEEDS].view(-1).view(torch.int64)
        sources = self._column(Word.SOURCES, torch.int32)[:count]
        return torch.index_select(pool, 0, sources, out=self.token_ids[:count])

    def draw_inputs(self, count: int) -> DrawInputs:
        """Return what the first rows are drawn by."""
        return DrawInputs(
            temperatures=self._column(Word.TEMPERATURES, torch.float32)[:count],
            top_ks=self._column(Word.TOP_KS, torch.int32)[:count],
            top_ps=self._column(Word.TOP_PS, torch.float32)[:count],
            min_ps=self._column(Word.MIN_PS, torch.float32)[:count],
            seeds=self._column(Word.SEEDS, torch.int64)[:count],
            positions=self._column(Word.DRAW_POSITIONS, torch.int32)[:count],
        )

    def _column(self, word: Word, dtype: torch.dtype) -> Tensor:
        return self._words[word : word + dtype.itemsize // 4].view(-1).view(dtype)
