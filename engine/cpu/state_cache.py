"""The states of recurrent layers on the CPU, in pages, and what a batch reads and writes of them."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from contracts.layout import KVGroup
from engine.cache.group_page_table import ABSENT, GroupPageTable
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence

Advance = Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]]
"""(a layer's state, number of a drafted token) -> the parts of the state behind that token, see StateUpdate.leave."""


class StateCache:
    """The pages of the states of all recurrent layers.

    They are float32 `[layers, num_pages, key heads, state width]`. `table`: which page a block has; that of a block
    that is being filled is its sequence's live state.
    """

    def __init__(self, group: KVGroup, table: GroupPageTable) -> None:
        self.group, self.table = group, table
        # Written once now, as KVCache does.
        self._data = torch.zeros(group.num_layers, table.num_pages, group.num_kv_heads, group.head_dim)
        self._drafted: dict[Sequence, DraftedRows] = {}

    @property
    def pool_bytes(self) -> np.ndarray:
        """`[num_planes, num_pages, page_nbytes]` uint8, the same memory."""
        return self._data.flatten(2).view(torch.uint8).numpy()

    def state(self, layer: int, page: int) -> torch.Tensor:
        """Return the state of one of the model's layers in a page, `[key heads, state width]`."""
        return self._data[self.group.layers.index(layer), page]

    def page_behind(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the page of the state behind so many tokens, which has one."""
        page = int(self.table.page_of[sequence.blocks[(num_tokens - 1) // self.group.block_size]])
        assert page != ABSENT, "the state behind a token has no page"
        return page

    def keep_drafted(self, drafted: "dict[Sequence, DraftedRows]") -> None:
        """Keep what the drafts of the newest batch take, until the next one."""
        self._drafted = drafted

    @torch.inference_mode()
    def on_accepted(self, sequence: Sequence, num_accepted: int) -> None:
        """Take the next right token of a draft into the state; see engine.backend.Backend."""
        rows = self._drafted[sequence]
        num_tokens = rows.num_tokens + num_accepted
        source, page = (self.page_behind(sequence, count) for count in (num_tokens - 1, num_tokens))
        for layer, advance in rows.advance_of.items():
            write_state(self.state(layer, page), advance(self.state(layer, source), num_accepted))


@dataclass(frozen=True)
class DraftedRows:
    """The rows of a draft, which came behind `num_tokens`, and how each recurrent layer takes them in."""

    num_tokens: int
    advance_of: dict[int, Advance] = field(default_factory=dict[int, Advance])


@dataclass(frozen=True)
class StatePiece:
    """A piece of a batch as recurrent layers see it.

    `rows`: of the batch, those of a draft last. `source`: the page of the state before its first token, ABSENT at a
    sequence's begin. `stops`: behind so many of its rows the state is kept in a page; the last is behind all but a
    draft's. `is_answer`: it is computed token by token, as what was decoded was. `drafted`: None without a draft.
    """

    rows: slice
    source: int
    stops: tuple[tuple[int, int], ...]
    is_answer: bool
    drafted: DraftedRows | None


@dataclass(frozen=True)
class StateUpdate:
    """The states that a batch reads, and those that it leaves.

    Nothing is written before `commit`: a batch that fails half way runs again, and a live state in its page would have
    taken in the tokens twice. Drafted tokens are taken in as they turn out to be right (StateCache.on_accepted).
    """

    cache: StateCache
    pieces: tuple[StatePiece, ...]
    _drafted: dict[Sequence, DraftedRows]
    _left: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = field(
        default_factory=list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
    )

    def before(self, layer: int, piece: StatePiece) -> torch.Tensor:
        """Return a layer's state before a piece, `[key heads, state width]`; zeros where a sequence begins."""
        if piece.source == ABSENT:
            return torch.zeros(self.cache.group.num_kv_heads, self.cache.group.head_dim)
        return self.cache.state(layer, piece.source)

    def leave(self, layer: int, page: int, parts: tuple[torch.Tensor, ...]) -> None:
        """Keep a state for a page: its parts `[key heads, ..]`, side by side."""
        self._left.append((self.cache.state(layer, page), parts))

    def commit(self) -> None:
        """Write what was left."""
        for page, parts in self._left:
            write_state(page, parts)
        self._left.clear()
        self.cache.keep_drafted(self._drafted)


def write_state(page: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> None:
    """Write the parts of a state to its page, `[key heads, state width]`."""
    for columns, part in zip(page.split([part[0].numel() for part in parts], 1), parts, strict=True):
        columns.copy_(part.flatten(1))


def plan_states(pieces: SequenceOf[ScheduledChunk], cache: StateCache) -> StateUpdate:
    """Return what recurrent layers do with the pieces of a batch, whose rows are their tokens in order."""
    planned: list[StatePiece] = []
    drafted: dict[Sequence, DraftedRows] = {}
    first_row = 0
    for piece in pieces:
        if piece.draft:
            drafted[piece.sequence] = DraftedRows(piece.end)
        rows = slice(first_row, first_row + piece.num_rows)
        planned.append(_planned(piece, rows, cache, drafted.get(piece.sequence)))
        first_row += piece.num_rows
    return StateUpdate(cache, tuple(planned), drafted)


def _planned(piece: ScheduledChunk, rows: slice, cache: StateCache, drafted: DraftedRows | None) -> StatePiece:
    size, blocks, first = cache.group.block_size, piece.sequence.blocks, piece.first_token
    places = range(first // size, -(-piece.end // size))
    ends = [(min((place + 1) * size, piece.end), int(cache.table.page_of[blocks[place]])) for place in places]
    stops = tuple((end - first, page) for end, page in ends if page != ABSENT)
    assert stops and stops[-1][0] == piece.num_tokens, "a chunk ends in a block without a page for its state"
    source = cache.page_behind(piece.sequence, first) if first else ABSENT
    assert piece.is_answer or first % size == 0, "a chunk of a prompt begins inside a block"
    return StatePiece(rows, source, stops, piece.is_answer, drafted)
