"""A batch as numpy arrays: prompts and answers row by row, the rows of answers padded to a bucket."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from contracts.ids import RequestId
from engine.cuda.inputs.head_inputs import HeadBatch
from engine.model.chunked_attention import AttentionChunks, cut
from engine.model.logit_rows import tail_rows, tails
from engine.scheduler.batch import ScheduledChunk
from engine.speculative.proposer import UNKNOWN


@dataclass(frozen=True)
class Queries:
    """Consecutive rows by sequence, the newest of each.

    `tables` `[N, longest]`, `lengths` `[N]` with context, `q_starts` and `kv_starts` `[N + 1]`.
    """

    tables: np.ndarray
    lengths: np.ndarray
    q_starts: np.ndarray
    kv_starts: np.ndarray

    @classmethod
    def of(cls, tables: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> "Queries":
        """`counts` `[N]` rows of each."""
        return cls(np.ascontiguousarray(tables), lengths.astype(np.int32), _starts(counts), _starts(lengths))

    @property
    def counts(self) -> np.ndarray:
        return np.diff(self.q_starts)


@dataclass(frozen=True)
class PromptRows:
    """The rows of all chunks, one after the other.

    `token_ids`, `positions`, `slots` `[T]`: block * size + offset. `sampling`: which pieces sample, from their last
    row.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    queries: Queries
    sampling: np.ndarray

    @property
    def sample_rows(self) -> np.ndarray:
        return self.queries.q_starts[1:][self.sampling] - 1


@dataclass(frozen=True)
class StepKey:
    """The buckets of rows and of context that a decode step is padded to, and whether all of it is greedy."""

    num_rows: int
    max_len: int
    greedy: bool


@dataclass(frozen=True)
class DeviceBatch:
    """A batch as arrays, of which every process of a team launches the same.

    `words`: state.pack's. `key`: how rows of answers are padded, of which `num_decodes` are somebody's; `tables` of
    blocks if they changed. `scored`: rows of the prompts whose logits are wanted too, a few at a time. `draws`: tokens.
    `head`: what a draft head makes of it, if there is one.
    """

    words: np.ndarray
    num_decodes: int
    key: StepKey | None
    tables: np.ndarray | None
    prompts: PromptRows | None
    scored: SequenceOf[np.ndarray]
    draws: bool
    greedy: bool
    head: HeadBatch | None = None


@dataclass(frozen=True)
class SampleBatch:
    """The tokens that are to be drawn of the batch launched last: of its first `num_rows`.

    `words`: state.pack's, if the batch's own have not brought their parameters.
    """

    words: np.ndarray | None
    num_rows: int
    greedy: bool


def num_decodes(pieces: SequenceOf[ScheduledChunk]) -> int:
    """Return how many of the first pieces are an answer's newest token, as Batch orders them."""
    return sum(1 for _ in takewhile(lambda piece: piece.is_decode and piece.samples, pieces))


def prompt_rows(pieces: SequenceOf[ScheduledChunk], block_size: int) -> PromptRows:
    starts = np.array([piece.first_token for piece in pieces])
    counts = np.array([piece.num_tokens for piece in pieces])
    samples = np.array([piece.samples for piece in pieces])
    width = -(-int((starts + counts).max()) // block_size)
    tables = block_tables(pieces, len(pieces), width, 0)
    owners = np.repeat(np.arange(len(pieces)), counts)
    positions = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts - starts, counts)
    blocks = tables[owners, positions // block_size].astype(np.int64)
    return PromptRows(
        token_ids=np.concatenate([np.frombuffer(p.sequence.tokens, np.int32)[p.first_token : p.end] for p in pieces]),
        positions=positions.astype(np.int32),
        slots=blocks * block_size + positions % block_size,
        queries=Queries.of(tables, starts + counts, counts),
        sampling=samples.nonzero()[0],
    )


def in_segments(queries: Queries, segment: int, block_size: int) -> Queries:
    """The same rows for attention in segments: a sequence is one segment of a prompt."""
    counts = queries.counts
    whole = AttentionChunks(
        queries.tables, queries.lengths - counts, counts, np.zeros(len(counts), bool)
    )  # no matter whose
    by = cut(whole, segment, block_size)
    return Queries.of(by.tables, by.starts + by.counts, by.counts)


def tails_of(queries: Queries, wanted: np.ndarray) -> tuple[np.ndarray, Queries]:
    """The rows that go past the last layer's K and V for the sake of `wanted`, which are scored, in order.

    Their own queries.
    """
    counts = queries.counts
    lasts = tails(counts, wanted)
    kept = lasts > 0
    return tail_rows(counts, lasts), Queries.of(queries.tables[kept], queries.lengths[kept], lasts[kept])


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def block_tables(pieces: SequenceOf[ScheduledChunk], num_rows: int, width: int, spare: int) -> np.ndarray:
    """`[num_rows, width]` int32; `spare` where a sequence, or the batch, is shorter."""
    tables = np.full((num_rows, width), spare, np.int32)
    for row, piece in zip(tables, pieces, strict=False):
        blocks = piece.sequence.blocks[:width]
        row[: len(blocks)] = blocks
    return tables


def decode_tables(pieces: SequenceOf[ScheduledChunk], num_rows: int, width: int, spare: int) -> np.ndarray:
    """Return the blocks of each row's sequence, `[num_rows, width]` int32; `spare` for what pads."""
    tables = block_tables(pieces, len(pieces), width, spare)
    of_rows = np.repeat(tables, [piece.num_rows for piece in pieces], axis=0)
    return np.pad(of_rows, ((0, num_rows - len(of_rows)), (0, 0)), constant_values=spare)


@dataclass(frozen=True)
class DecodeRows:
    """The rows of answers: the newest token of each, and behind it those of its draft.

    `[bucket]` each, padded by rows of one token in the spare block.

    `sources`: where the token is: the row of the last batch that drew it, or beside those (from `len` of that on) row
    by row in `token_ids`, as the host knows it, or beside those again where a head drafts it in this step. `behind`:
    how many of the rows before one are of its sequence.
    """

    token_ids: np.ndarray
    sources: np.ndarray
    lengths: np.ndarray
    slots: np.ndarray
    behind: np.ndarray


def decode_rows(
    pieces: SequenceOf[ScheduledChunk],
    pending: Mapping[RequestId, int],
    num_drawn: int,
    bucket: int,
    block_size: int,
    spare: int,
) -> DecodeRows:
    """`pending`: rows of tokens that the host does not know.

    `num_drawn`: how many rows of such there can be.
    """
    lengths, behind = np.ones(bucket, np.int32), np.zeros(bucket, np.int32)
    blocks = np.full(bucket, spare, np.int32)
    sources = num_drawn + np.arange(bucket, dtype=np.int32)
    token_ids = np.zeros(bucket, np.int64)
    row = 0
    for piece in pieces:
        sequence = piece.sequence
        if sequence.num_pending:
            sources[row] = pending[sequence.request_id]
        else:
            token_ids[row] = sequence.tokens[-1]
        for place in range(piece.num_rows):
            lengths[row], behind[row] = piece.end + place, place
            blocks[row] = sequence.blocks[(piece.first_token + place) // block_size]
            if place and (token := piece.draft.token_ids[place - 1]) == UNKNOWN:
                sources[row] = 2 * num_drawn + row
            elif place:
                token_ids[row] = token
            row += 1
    return DecodeRows(token_ids, sources, lengths, blocks * block_size + (lengths - 1) % block_size, behind)
