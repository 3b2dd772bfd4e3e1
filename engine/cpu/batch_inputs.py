"""From a batch of pieces to index tensors, in numpy, once a step."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.cpu.attention import AttentionPlan, TiledChunks, plan_tiles
from engine.cpu.decode_attention import computes_rows_alike, most_tokens, plan_decode
from engine.cpu.grouped_cache import AnyKVCache
from engine.cpu.head_shape import HeadShape
from engine.cpu.kv_cache import CachePart, KVCache
from engine.cpu.state_cache import StateUpdate, plan_states
from engine.model.chunked_attention import AttentionChunks, cut
from engine.model.logit_rows import tail_rows, tails
from engine.sampling.prompt_logprobs import PromptLogprobSpan
from engine.scheduler.batch import ScheduledChunk

_SIZES = (2, 18)
"""Newest tokens, drafts, and answers that are computed again are attended apart: fewer tokens than each of these."""


@dataclass(frozen=True)
class AttentionPlans:
    """Attention of some rows. `windowed`: in the layers that have a window, or segments."""

    whole: AttentionPlan
    windowed: AttentionPlan | None

    def of(self, has_window: bool) -> AttentionPlan:
        return self.windowed if has_window and self.windowed else self.whole


@dataclass(frozen=True)
class WriteIndex:
    """Rows of KVCache.rows, `planes * kv_heads` for each token. See AttentionPlans."""

    whole: torch.Tensor
    windowed: torch.Tensor

    def of(self, has_window: bool) -> torch.Tensor:
        return self.windowed if has_window else self.whole


@dataclass(frozen=True)
class LogitRows:
    """The rows of the batch that go past the last layer's K and V, and their attention there."""

    rows: torch.Tensor
    attention: AttentionPlans


@dataclass(frozen=True)
class Inputs:
    """What all layers take of a batch.

    `tails`: None if all rows go to the end. Of those that do, `sample_rows` are the ones whose logits are wanted at
    once, `score_rows` those whose logits are wanted part by part.

    The first `num_answer_rows` rows belong to answers, as do the first `num_answer_samples` of `sample_rows`. `states`:
    of recurrent layers, if there are any.

    `write_index`: where K and V of the batch go. `blank_index`: what is left of the blocks that its sequences enter, if
    anything is. Attention reads whole blocks: what it masks weighs nothing, but a NaN would, which a former owner left.
    """

    token_ids_M: torch.Tensor
    positions_M: torch.Tensor
    write_index: WriteIndex
    blank_index: WriteIndex | None
    sample_rows: torch.Tensor
    score_rows: tuple[torch.Tensor, ...]
    num_answer_rows: int
    num_answer_samples: int
    attention: AttentionPlans
    logit_rows: LogitRows | None
    states: StateUpdate | None


def prepare(
    pieces: SequenceOf[ScheduledChunk], scored: SequenceOf[PromptLogprobSpan], heads: HeadShape, cache: AnyKVCache
) -> Inputs:
    """`pieces` in the order of Batch. Rows of the batch are their tokens in order.

    Those of a draft come behind each. A drafted token is computed as the newest token of its sequence would be: by the
    kernel that decode takes, over a context of its own. So what is accepted is to the bit what it would be without.
    The same goes for an answer's tokens that are computed again, where that kernel `computes_rows_alike`.
    """
    num_together = most_tokens(heads.group) if computes_rows_alike(cache.dtype, heads.head_dim) else 0
    places, tables = _places(pieces, num_together), _tables(pieces)
    rows = AttentionChunks(
        tables=tables[places.owners],
        starts=places.starts,
        counts=places.counts,
        answers=np.array([piece.is_answer for piece in pieces])[places.owners],
    )
    counts, answers = rows.counts, rows.answers
    samples, decodes = places.samples, places.decodes
    owners = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - rows.starts, counts)
    token_ids = np.concatenate([np.frombuffer(piece.token_ids, np.int32) for piece in pieces])
    wanted = [(np.cumsum(counts) - 1)[samples], *(span.rows.numpy() for span in scored)]
    runs = np.concatenate([decodes, counts[decodes.sum() :]])
    lasts = tails(runs, np.concatenate(wanted))
    left = tail_rows(runs, lasts)
    sample_rows, *score_rows = (torch.from_numpy(np.searchsorted(left, part)) for part in wanted)
    return Inputs(
        token_ids_M=torch.from_numpy(token_ids),
        positions_M=torch.from_numpy(positions),
        write_index=_write_index(rows.tables[owners, positions // cache.layout.block_size], positions, cache),
        blank_index=_blank_index(pieces, tables, cache),
        sample_rows=sample_rows,
        score_rows=tuple(score_rows),
        num_answer_rows=int(counts[answers].sum()),
        num_answer_samples=int((samples & answers).sum()),
        attention=_plans(rows, decodes, heads, cache),
        logit_rows=None if len(left) == len(owners) else _tails(rows, lasts, left, decodes, heads, cache),
        states=None if cache.state is None else plan_states(pieces, cache.state),
    )


@dataclass(frozen=True)
class _Places:
    """The places of a batch that attend by themselves: tokens of decode's kernel, or whole pieces.

    `owners`: the pieces, by index; `starts` and `counts`: tokens of these sequences. `decodes`: how many of the places,
    of which they are the first, decode's kernel takes together. `samples`: those whose last row says what comes next.
    """

    owners: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    samples: np.ndarray
    decodes: np.ndarray


def _places(pieces: SequenceOf[ScheduledChunk], num_together: int) -> _Places:
    """Return the places of the pieces, which are in the order of Batch.

    `num_together`: of how many tokens of a recomputed answer decode's kernel gives what it gives one; 0: of none.
    """
    is_decode = np.array([piece.is_answer if num_together else piece.is_decode for piece in pieces])
    firsts = np.array([piece.first_token for piece in pieces])
    counts = np.array([piece.num_tokens for piece in pieces])
    rows = np.array([piece.num_rows for piece in pieces])
    parts = np.where(is_decode, rows, 1)
    owners = np.repeat(np.arange(len(pieces)), parts)
    indices = np.arange(len(owners)) - np.repeat(np.cumsum(parts) - parts, parts)
    firsts_that_sample = np.where(is_decode, counts - 1, 0)  # the newest token's, and those of its draft
    samples = np.array([piece.samples for piece in pieces])[owners] & (indices >= firsts_that_sample[owners])
    decodes = np.array([size for piece in pieces for size in _runs(piece, num_together)], np.int64)
    return _Places(owners, firsts[owners] + indices, np.where(is_decode, 1, counts)[owners], samples, decodes)


def _runs(piece: ScheduledChunk, num_together: int) -> SequenceOf[int]:
    """Return how many rows of a piece decode's kernel takes at a time; none if it takes none."""
    if piece.is_decode:
        return [piece.num_rows]  # a newest token, and its draft
    if not piece.is_answer or not num_together:
        return []
    return [min(num_together, piece.num_tokens - first) for first in range(0, piece.num_tokens, num_together)]


def _tails(
    rows: AttentionChunks, lasts: np.ndarray, left: np.ndarray, decodes: np.ndarray, heads: HeadShape, cache: AnyKVCache
) -> LogitRows:
    """Return what goes past the last layer's K and V: of each run of rows the `lasts`.

    Attention is by the kernel that takes the whole piece: a decode's stays a decode's, and no other becomes one.
    """
    sampling, indices = lasts[: len(decodes)], np.arange(decodes.sum())
    is_last = indices >= np.repeat(np.cumsum(decodes) - sampling, decodes)
    each = np.concatenate([is_last, lasts[len(decodes) :]])
    starts, kept = rows.starts + rows.counts - each, each > 0
    sampling = sampling[sampling > 0]  # tokens that are computed again may have no last one
    ends = AttentionChunks(rows.tables[kept], starts[kept], each[kept], rows.answers[kept])
    return LogitRows(torch.from_numpy(left), _plans(ends, sampling, heads, cache))


def _plans(rows: AttentionChunks, decodes: np.ndarray, heads: HeadShape, cache: AnyKVCache) -> AttentionPlans:
    """Return the plans of all layers. No rows have no parts.

    `decodes`: rows of each decode, which come first.
    """
    short, long, windowed = cache.part(True), cache.part(False), None
    if heads.segment:  # the tokens of a draft may be in several
        by_segment = cut(_in_part(rows, short, cache), heads.segment, cache.layout.block_size)
        windowed = _plan(by_segment, np.ones(decodes.sum(), np.int64), heads, short.cache, 0)
    elif heads.window:
        windowed = _plan(_in_part(rows, short, cache), decodes, heads, short.cache, heads.window)
    if windowed is not None and long.table is not None:  # all layers have a window
        return AttentionPlans(windowed, windowed)
    return AttentionPlans(_plan(_in_part(rows, long, cache), decodes, heads, long.cache, 0), windowed)


def _in_part(rows: AttentionChunks, part: CachePart, cache: AnyKVCache) -> AttentionChunks:
    """Return the rows with the pages that their blocks have in a part of the cache."""
    return replace(rows, tables=part.read_pages(rows.tables, rows.starts // cache.layout.block_size))


def _write_index(blocks: np.ndarray, positions: np.ndarray, cache: AnyKVCache) -> WriteIndex:
    whole, windowed = cache.part(False), cache.part(True)
    index = kv_write_index(whole.written_pages(blocks), positions, whole.cache)
    if windowed.cache is whole.cache:
        return WriteIndex(index, index)
    return WriteIndex(index, kv_write_index(windowed.written_pages(blocks), positions, windowed.cache))


def _blank_index(pieces: SequenceOf[ScheduledChunk], tables: np.ndarray, cache: AnyKVCache) -> WriteIndex | None:
    size = cache.layout.block_size
    firsts = np.array([piece.first_token for piece in pieces])
    ends = firsts + np.array([piece.num_rows for piece in pieces])
    last_blocks = (ends - 1) // size
    entered = np.flatnonzero((firsts <= last_blocks * size) & (ends % size != 0))
    if not len(entered):
        return None
    counts = (-ends % size)[entered]
    owners = np.repeat(entered, counts)
    positions = ends[owners] + np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return _write_index(tables[owners, last_blocks[owners]], positions, cache)


def _plan(rows: AttentionChunks, decodes: np.ndarray, heads: HeadShape, cache: KVCache, window: int) -> AttentionPlan:
    tables, starts, counts, num_answers = rows.tables, rows.starts, rows.counts, int(rows.answers.sum())
    num_decodes = int(decodes.sum())
    if num_decodes > len(decodes) and not computes_rows_alike(cache.dtype, heads.head_dim):
        decodes = np.ones(num_decodes, np.int64)  # each token of a draft by itself
    firsts = np.cumsum(decodes) - decodes
    chunks = [
        TiledChunks(tables[low:high], starts[low:high], counts[low:high], int(counts[:low].sum()), high <= num_answers)
        for low, high in ((num_decodes, num_answers), (num_answers, len(starts)))
        if high > low
    ]
    return AttentionPlan(
        tuple(
            plan_decode(tables[each], starts[each] + 1, counts_of_each, heads.group, cache, window)
            for each, counts_of_each in zip(*(_by_size(decodes, array) for array in (firsts, decodes)), strict=True)
        ),
        tuple(plan_tiles(group, heads, cache, window) for group in chunks),
    )


def _by_size(decodes: np.ndarray, array: np.ndarray) -> list[np.ndarray]:
    """Split where a plan ends: its queries are padded to the most tokens of any of them."""
    sizes = np.digitize(decodes, _SIZES)
    return [part for part in np.split(array, np.flatnonzero(np.diff(sizes)) + 1) if len(part)]


def _tables(pieces: SequenceOf[ScheduledChunk]) -> np.ndarray:
    """Block tables `[N, longest]`, padded with each one's first block, masked where it pads."""
    tables = np.empty((len(pieces), max(len(piece.sequence.blocks) for piece in pieces)), np.int64)
    for row, piece in zip(tables, pieces, strict=True):
        row[:] = piece.sequence.blocks[0]
        row[: len(piece.sequence.blocks)] = piece.sequence.blocks
    return tables


def kv_write_index(pages: np.ndarray, positions: np.ndarray, cache: KVCache) -> torch.Tensor:
    """Row of each (token, plane, head) in KVCache.rows."""
    group = cache.group
    planes = pages[:, None] + np.arange(len(group.planes)) * cache.num_blocks
    heads = planes[:, :, None] * group.num_kv_heads + np.arange(group.num_kv_heads)
    rows = heads * group.block_size + (positions % group.block_size)[:, None, None]
    return torch.from_numpy(rows.reshape(-1))
