"""From a batch of pieces to index tensors, in numpy, once a step."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from engine.cpu.attention import AttentionPlan, TiledChunks, plan_tiles
from engine.cpu.decode_attention import computes_rows_alike, plan_decode
from engine.cpu.head_shape import HeadShape
from engine.cpu.kv_cache import KVCache
from engine.model.chunked_attention import AttentionChunks, cut
from engine.model.logit_rows import tail_rows, tails
from engine.sampling.prompt_logprobs import PromptLogprobSpan
from engine.scheduler.batch import ScheduledChunk


@dataclass(frozen=True)
class AttentionPlans:
    """Attention of some rows. `windowed`: in the layers that have a window, or segments."""

    whole: AttentionPlan
    windowed: AttentionPlan | None

    def of(self, has_window: bool) -> AttentionPlan:
        return self.windowed if has_window and self.windowed else self.whole


@dataclass(frozen=True)
class LogitRows:
    """The rows of the batch that go past the last layer's K and V, and their attention there."""

    rows: torch.Tensor
    attention: AttentionPlans


@dataclass(frozen=True)
class Inputs:
    """`write_index` `[M * 2 * kv_heads]` rows of KVCache.rows.

    `tails`: None if all rows go to the end. Of those that do, `sample_rows` are the ones whose logits are wanted at
    once, `score_rows` those whose logits are wanted part by part.

    The first `num_answer_rows` rows belong to answers, as do the first `num_answer_samples` of `sample_rows`.
    """

    token_ids_M: torch.Tensor
    positions_M: torch.Tensor
    write_index: torch.Tensor
    sample_rows: torch.Tensor
    score_rows: tuple[torch.Tensor, ...]
    num_answer_rows: int
    num_answer_samples: int
    attention: AttentionPlans
    logit_rows: LogitRows | None


def prepare(
    pieces: SequenceOf[ScheduledChunk], scored: SequenceOf[PromptLogprobSpan], heads: HeadShape, cache: KVCache
) -> Inputs:
    """`pieces` in the order of Batch. Rows of the batch are their tokens in order.

    Those of a draft come behind each. A drafted token is computed as the newest token of its sequence would be: by the
    kernel that decode takes, over a context of its own. So what is accepted is to the bit what it would be without.
    """
    places = _places(pieces)
    rows = AttentionChunks(
        tables=_tables(pieces)[places.owners],
        starts=places.starts,
        counts=places.counts,
        answers=np.array([piece.is_answer for piece in pieces])[places.owners],
    )
    counts, answers = rows.counts, rows.answers
    samples = np.array([piece.samples for piece in pieces])[places.owners]
    decodes = np.array([piece.num_rows for piece in pieces if piece.is_decode], np.int64)
    owners = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - rows.starts, counts)
    token_ids = np.concatenate([np.frombuffer(piece.token_ids, np.int32) for piece in pieces])
    wanted = [(np.cumsum(counts) - 1)[samples], *(span.rows.numpy() for span in scored)]
    lasts = tails(counts, np.concatenate(wanted))
    left = tail_rows(counts, lasts)
    sample_rows, *score_rows = (torch.from_numpy(np.searchsorted(left, part)) for part in wanted)
    return Inputs(
        token_ids_M=torch.from_numpy(token_ids),
        positions_M=torch.from_numpy(positions),
        write_index=kv_write_index(rows.tables[owners, positions // cache.layout.block_size], positions, cache),
        sample_rows=sample_rows,
        score_rows=tuple(score_rows),
        num_answer_rows=int(counts[answers].sum()),
        num_answer_samples=int((samples & answers).sum()),
        attention=_plans(rows, decodes, heads, cache),
        logit_rows=None if len(left) == len(owners) else _tails(rows, lasts, left, decodes, heads, cache),
    )


@dataclass(frozen=True)
class _Places:
    """The places of a batch that attend by themselves: a piece each, and a token each of its draft.

    `owners`: the pieces, by index; `starts` and `counts`: tokens of these sequences.
    """

    owners: np.ndarray
    starts: np.ndarray
    counts: np.ndarray


def _places(pieces: SequenceOf[ScheduledChunk]) -> _Places:
    firsts = np.array([piece.first_token for piece in pieces])
    counts = np.array([piece.num_tokens for piece in pieces])
    if not any(piece.draft for piece in pieces):
        return _Places(np.arange(len(pieces)), firsts, counts)
    parts = np.array([1 + len(piece.draft) for piece in pieces])
    owners = np.repeat(np.arange(len(pieces)), parts)
    indices = np.arange(len(owners)) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = firsts[owners] + np.where(indices > 0, counts[owners] - 1 + indices, 0)
    return _Places(owners, starts, np.where(indices > 0, 1, counts[owners]))


def _tails(
    rows: AttentionChunks, lasts: np.ndarray, left: np.ndarray, decodes: np.ndarray, heads: HeadShape, cache: KVCache
) -> LogitRows:
    """Return what goes past the last layer's K and V.

    Attention is by the kernel that takes the whole piece: a decode's stays a decode's, and no other becomes one.
    """
    starts, kept = rows.starts + rows.counts - lasts, lasts > 0
    sampling = decodes[kept[np.cumsum(decodes) - decodes]]  # a token that is computed again may be no last one
    ends = AttentionChunks(rows.tables[kept], starts[kept], lasts[kept], rows.answers[kept])
    return LogitRows(torch.from_numpy(left), _plans(ends, sampling, heads, cache))


def _plans(rows: AttentionChunks, decodes: np.ndarray, heads: HeadShape, cache: KVCache) -> AttentionPlans:
    """Return the plans of all layers. No rows have no parts.

    `decodes`: rows of each decode, which come first.
    """
    whole = _plan(rows, decodes, heads, cache, 0)
    if heads.segment:  # the tokens of a draft may be in several
        by_segment = cut(rows, heads.segment, cache.layout.block_size)
        return AttentionPlans(whole, _plan(by_segment, np.ones(decodes.sum(), np.int64), heads, cache, 0))
    return AttentionPlans(whole, _plan(rows, decodes, heads, cache, heads.window) if heads.window else None)


def _plan(rows: AttentionChunks, decodes: np.ndarray, heads: HeadShape, cache: KVCache, window: int) -> AttentionPlan:
    tables, starts, counts, num_answers = rows.tables, rows.starts, rows.counts, int(rows.answers.sum())
    num_decodes = int(decodes.sum())
    if num_decodes > len(decodes) and not computes_rows_alike(cache.dtype, heads.head_dim):
        decodes = np.ones(num_decodes, np.int64)  # each token of a draft by itself
    firsts = np.cumsum(decodes) - decodes
    num_plain = int((np.cumsum(decodes != 1) == 0).sum())
    chunks = [
        TiledChunks(tables[low:high], starts[low:high], counts[low:high], int(counts[:low].sum()), high <= num_answers)
        for low, high in ((num_decodes, num_answers), (num_answers, len(starts)))
        if high > low
    ]
    return AttentionPlan(
        tuple(
            plan_decode(tables[each], starts[each] + 1, each_counts, heads.group, cache, window)
            for each, each_counts in (
                (firsts[:num_plain], decodes[:num_plain]),
                (firsts[num_plain:], decodes[num_plain:]),
            )
            if len(each)
        ),
        tuple(plan_tiles(group, heads, cache, window) for group in chunks),
    )


def _tables(pieces: SequenceOf[ScheduledChunk]) -> np.ndarray:
    """Block tables `[N, longest]`, padded with block 0, whose content is masked where it pads."""
    tables = np.zeros((len(pieces), max(len(piece.sequence.blocks) for piece in pieces)), np.int64)
    for row, piece in zip(tables, pieces, strict=True):
        row[: len(piece.sequence.blocks)] = piece.sequence.blocks
    return tables


def kv_write_index(blocks: np.ndarray, positions: np.ndarray, cache: KVCache) -> torch.Tensor:
    """Row of each (token, K or V, head) in KVCache.rows."""
    group = cache.group
    planes = blocks[:, None] + np.array([0, cache.num_blocks])
    heads = planes[:, :, None] * group.num_kv_heads + np.arange(group.num_kv_heads)
    rows = heads * group.block_size + (positions % group.block_size)[:, None, None]
    return torch.from_numpy(rows.reshape(-1))
