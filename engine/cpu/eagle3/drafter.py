"""What an EAGLE3 head reads of each batch, and its drafts (Li et al. 2025)."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np
import torch

from engine.cpu.eagle3.draft_cache import DraftCache
from engine.cpu.eagle3.head_rows import Eagle3Head, HeadRows
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from engine.speculative.draft_presence import DraftPresence
from engine.speculative.proposer import NO_DRAFT, Draft

MAX_TOKENS = 16
"""The longest draft."""


def spare_blocks(block_size: int) -> int:
    """Return how many blocks the longest draft may need behind that of its sequence's newest token."""
    return -(-(MAX_TOKENS - 1) // block_size)


@dataclass(frozen=True)
class _Verified:
    """The features of tokens that a batch verified, from token `first` on, of which some were wrong."""

    first: int
    features_MH: torch.Tensor


class Eagle3Drafter:
    """See engine.backend.Drafter.

    The slots of a batch's tokens are written with the batch, as the target's KV is: those of drafted tokens as well,
    which the next step overwrites where they were wrong. So what the cache holds of a block is right wherever the
    target's is, and prefix hits, preemption and replays find it.
    """

    is_free = False

    def __init__(self, head: Eagle3Head, cache: DraftCache) -> None:
        self._head, self._cache = head, cache
        self._size = cache.kv.layout.block_size
        self._presence = DraftPresence(cache.presence_N, self._size)
        self._verified: WeakKeyDictionary[Sequence, _Verified] = WeakKeyDictionary()

    def emptied(self, blocks: SequenceOf[int]) -> None:
        self._presence.forget(blocks)

    def settle(self, sequence: Sequence) -> None:
        newest = len(sequence.tokens) - 2
        if (feature := self._feature(sequence, newest)) is not None:
            self._cache.features_NH[sequence.blocks[newest // self._size]] = feature[0]

    def ended(self, sequence: Sequence) -> None:
        self._verified.pop(sequence, None)

    def read(self, pieces: SequenceOf[ScheduledChunk], aux_MA: torch.Tensor) -> None:
        """Take in a batch that was computed: `aux_MA` `[M, fc_width]` are the target's rows, in its order."""
        # Rounded as the cache keeps them: a draft is the same wherever its first feature comes from.
        fused = self._head.fuse(aux_MA).to(self._cache.features_NH.dtype)
        parts: list[_Slots] = []
        for piece, end in zip(pieces, accumulate(piece.num_rows for piece in pieces), strict=True):
            own = fused[end - piece.num_rows : end]
            parts += self._slots(piece, own)
            self._keep(piece, own)
        if parts:
            self._head.write(_rows(parts))

    def propose(self, sequences: SequenceOf[Sequence], num_tokens: SequenceOf[int]) -> list[Draft]:
        starts = [self._start(sequence) for sequence in sequences]
        begun = {place: start for place, start in enumerate(starts) if start is not None and num_tokens[place] > 0}
        if not begun:
            return [NO_DRAFT] * len(sequences)
        limits = np.minimum([num_tokens[place] for place in begun], MAX_TOKENS)
        found = dict(zip(begun, self._draft(list(begun.values()), limits), strict=True))
        return [found.get(place, NO_DRAFT) for place in range(len(sequences))]

    def _slots(self, piece: ScheduledChunk, fused: torch.Tensor) -> list["_Slots"]:
        """Return the slots of a piece's tokens that can be written, none or one run of them."""
        sequence, first, count = piece.sequence, piece.first_token, piece.num_rows
        before = self._feature(sequence, first - 1)
        start = self._presence.run_start(sequence.blocks, first)
        self._presence.add(sequence.blocks, first, first + count)
        tokens = np.array(piece.token_ids, np.int32)
        if before is None:  # the first token's slot can't be, and no later one sees further back
            return [_Slots(fused[:-1], tokens[1:], first + 1, sequence.blocks, first + 1)] if count > 1 else []
        features = torch.cat([before, fused[:-1]])
        return [_Slots(features, tokens, first, sequence.blocks, start + 1)]

    def _keep(self, piece: ScheduledChunk, fused: torch.Tensor) -> None:
        """Keep of each block the feature of its newest token.

        Those of a draft are all kept, since which are right is known later.
        """
        sequence, first, size = piece.sequence, piece.first_token, self._size
        if piece.draft:
            self._verified[sequence] = _Verified(piece.end - 1, fused[piece.num_tokens - 1 :])
        else:
            self._verified.pop(sequence, None)
        ends = sorted({piece.end, *range((first // size + 1) * size, first + piece.num_rows + 1, size)})
        last_in = {sequence.blocks[(end - 1) // size]: end - 1 - first for end in ends}
        self._cache.features_NH[list(last_in)] = fused[list(last_in.values())]

    def _feature(self, sequence: Sequence, token: int) -> torch.Tensor | None:
        """Return that of a token of the sequence, `[1, H]`; None where it is not here."""
        if token < 0 or self._presence.run_start(sequence.blocks, token + 1) > token:
            return None
        verified = self._verified.get(sequence)
        if verified is not None and 0 <= token - verified.first < len(verified.features_MH):
            return verified.features_MH[token - verified.first][None]
        return self._cache.features_NH[sequence.blocks[token // self._size]][None]

    def _start(self, sequence: Sequence) -> "_Slots | None":
        """Return the slot of the newest token, behind which drafts go on.

        None where the feature that it takes is not here.
        """
        newest = len(sequence.tokens) - 1
        feature = self._feature(sequence, newest - 1)
        if feature is None:
            return None
        seen_from = self._presence.run_start(sequence.blocks, newest) + 1
        tokens = np.array(sequence.tokens[-1:], np.int32)
        return _Slots(feature, tokens, newest, sequence.blocks[: newest // self._size + 1], seen_from)

    def _draft(self, starts: list["_Slots"], num_tokens: np.ndarray) -> list[Draft]:
        """Draft greedily, for all sequences at once, a place at a time; each row goes on from its own."""
        rows = _rows(starts, self._cache.num_blocks, spare_blocks(self._size))
        ids: list[list[int]] = [[] for _ in starts]
        likelihoods: list[list[float]] = [[] for _ in starts]
        going_on = np.arange(len(starts))
        for place in range(int(num_tokens.max())):
            output = self._head.forward(rows)
            tops, places = output.logits.max(1)
            chances = (output.logits - tops[:, None]).exp_().sum(1).reciprocal_()
            tokens = self._head.targets[places.numpy()]
            for owner, token, chance in zip(going_on.tolist(), tokens.tolist(), chances.tolist(), strict=True):
                ids[owner].append(token)
                likelihoods[owner].append(chance)
            stays = num_tokens[going_on] > place + 1
            going_on = going_on[stays]
            rows = _next_rows(rows, output.features_MH, tokens, stays)
        return [Draft(tuple(each), 1, tuple(chances)) for each, chances in zip(ids, likelihoods, strict=True)]


@dataclass(frozen=True)
class _Slots:
    """Slots of one sequence from `first` on.

    `features` `[n, H]`, `tokens` `[n]`; `seen_from`: the first slot that they see.
    """

    features: torch.Tensor
    tokens: np.ndarray
    first: int
    blocks: SequenceOf[int]
    seen_from: int


def _rows(parts: SequenceOf[_Slots], first_spare: int = 0, num_spare: int = 0) -> HeadRows:
    """Return the rows of all parts, each with `num_spare` blocks of its own behind those that it has."""
    counts = np.array([len(part.tokens) for part in parts])
    tables = np.zeros((len(parts), max(len(part.blocks) for part in parts) + num_spare), np.int32)
    for index, (row, part) in enumerate(zip(tables, parts, strict=True)):
        row[: len(part.blocks)] = part.blocks
        spare = first_spare + index * num_spare
        row[len(part.blocks) : len(part.blocks) + num_spare] = range(spare, spare + num_spare)
    firsts = np.array([part.first for part in parts])
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return HeadRows(
        features_MH=torch.cat([part.features for part in parts]).float(),
        tokens_M=np.concatenate([part.tokens for part in parts]),
        slots_M=(within + np.repeat(firsts, counts)).astype(np.int32),
        owners_M=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        tables_SN=tables,
        seen_from_S=np.array([part.seen_from for part in parts], np.int32),
    )


def _next_rows(rows: HeadRows, features: torch.Tensor, tokens: np.ndarray, stays: np.ndarray) -> HeadRows:
    """Return the rows behind these, one a sequence, of the sequences that stay."""
    count = int(stays.sum())
    return HeadRows(
        features_MH=features[torch.from_numpy(stays)],
        tokens_M=tokens[stays].astype(np.int32),
        slots_M=rows.slots_M[stays] + 1,
        owners_M=np.arange(count, dtype=np.int32),
        tables_SN=rows.tables_SN[stays],
        seen_from_S=rows.seen_from_S[stays],
    )
