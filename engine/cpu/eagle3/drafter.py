"""What an EAGLE3 head reads of each batch, and its drafts (Li et al. 2025)."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np
import torch

from engine.cpu.eagle3.draft_cache import DraftCache
from engine.cpu.eagle3.head_rows import DraftingHead, HeadRows
from engine.cpu.eagle3.unread_rows import BlockState, UnreadRows, newest_of_blocks
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from engine.settings import MAX_DRAFT_TOKENS
from engine.speculative.draft_presence import DraftPresence
from engine.speculative.proposer import NO_DRAFT, Draft, spare_blocks


class Eagle3Drafter:
    """See engine.backend.Drafter.

    The slots of a prompt's tokens are written with the batch that computes them, as the target's KV is. Rows of an
    answer wait until one of them, right or guessed, ends a block, or a draft goes on behind them, or the sequence
    leaves: one pass then writes the slots of all. So what the cache holds of a full block is right wherever the
    target's is, and prefix hits, preemption and replays find it.
    """

    def __init__(self, head: DraftingHead, cache: DraftCache) -> None:
        self._head, self._cache = head, cache
        self._size = cache.kv.layout.block_size
        self._presence = DraftPresence(cache.presence_N, self._size)
        self._generations = np.zeros(cache.num_blocks, np.int64)
        self._unread: WeakKeyDictionary[Sequence, UnreadRows] = WeakKeyDictionary()

    def forget_blocks(self, blocks: SequenceOf[int]) -> None:
        self._presence.forget(blocks)
        self._generations[np.asarray(blocks, np.int64)] += 1

    def settle(self, sequence: Sequence) -> None:
        end, unread = len(sequence.tokens) - 1, self._unread.get(sequence)
        if unread is not None and unread.slot <= end:
            unread.cut(end)
            self._write([_Text(sequence, end)])

    def end_sequence(self, sequence: Sequence) -> None:
        self._unread.pop(sequence, None)

    def read(self, pieces: SequenceOf[ScheduledChunk], aux_MA: torch.Tensor) -> None:
        """Take in a batch that was computed: `aux_MA` `[M, fc_width]` are the target's rows, in its order."""
        due: list[_Text] = []
        for piece, end in zip(pieces, accumulate(piece.num_rows for piece in pieces), strict=True):
            sequence, first, count = piece.sequence, piece.first_token, piece.num_rows
            unread, rows = self._rows_up_to(sequence, first), aux_MA[end - count : end]
            self._presence.add(sequence.blocks, first, first + count)
            if piece.is_decode and first // self._size == (first + count) // self._size:
                unread.aux.append(rows.clone())  # not a part of a batch that may be large
            else:
                unread.aux.append(rows)
                due.append(_Text(sequence, piece.end, piece.draft.token_ids))
        if due:
            self._write(due)

    def propose(self, sequences: SequenceOf[Sequence], num_tokens: SequenceOf[int]) -> list[Draft]:
        texts = {
            place: _Text(sequence, len(sequence.tokens))
            for place, sequence in enumerate(sequences)
            if num_tokens[place] > 0 and self._can_go_on(sequence)
        }
        if not texts:
            return [NO_DRAFT] * len(sequences)
        self._fuse(texts.values())
        starts = [self._slots(text) for text in texts.values()]
        drafts = self._draft(starts, np.minimum([num_tokens[place] for place in texts], MAX_DRAFT_TOKENS))
        for text in texts.values():
            self._advance(text)
        found = dict(zip(texts, drafts, strict=True))
        return [found.get(place, NO_DRAFT) for place in range(len(sequences))]

    def _can_go_on(self, sequence: Sequence) -> bool:
        """Return whether the slot of the newest token can be written, behind which drafts go on."""
        newest = len(sequence.tokens) - 1
        return self._rows_up_to(sequence, newest).slot <= newest

    def _rows_up_to(self, sequence: Sequence, end: int) -> UnreadRows:
        """Return the rows that wait, up to that of token `end`.

        They begin anew, with what the cache has of the token before, where those that are known do not lead there.
        """
        unread = self._unread.get(sequence)
        leads_there = unread is not None and unread.slot - 1 <= end <= unread.end
        if unread is not None and leads_there and unread.before == self._block_before(sequence, unread.slot):
            unread.cut(end)
            return unread
        features = self._cache.features_NH[:0]  # slot `end` can't be written, and no later one sees further back
        if end > 0 and self._presence.run_start(sequence.blocks, end) < end:
            features = self._cache.features_NH[sequence.blocks[(end - 1) // self._size]][None]
        slot = end + 1 - len(features)
        unread = self._unread[sequence] = UnreadRows(slot, self._block_before(sequence, slot), features.clone())
        return unread

    def _block_before(self, sequence: Sequence, slot: int) -> BlockState:
        block = sequence.blocks[(slot - 1) // self._size]
        return BlockState(block, int(self._generations[block]))

    def _write(self, texts: SequenceOf["_Text"]) -> None:
        """Write the slots of texts, and of each block the feature of its newest token.

        Those of guesses are among them, and are written again when it is known what is right.
        """
        self._fuse(texts)
        parts = [part for part in map(self._slots, texts) if len(part.tokens)]
        if parts:
            self._head.write(_rows(parts))
        for text in texts:
            unread = self._unread[text.sequence]
            newest = newest_of_blocks(unread.slot - 1, unread.end, self._size)
            blocks = [text.sequence.blocks[token] for token in newest // self._size]
            self._cache.features_NH[blocks] = unread.features[torch.from_numpy(newest - (unread.slot - 1))]
            self._advance(text)

    def _fuse(self, texts: Iterable["_Text"]) -> None:
        """Make features of all rows that wait."""
        waiting = [self._unread[text.sequence] for text in texts]
        aux = [part for each in waiting for part in each.aux]
        if not aux:
            return
        # Rounded as the cache keeps them: a draft is the same wherever its first feature comes from.
        fused = self._head.fuse(torch.cat(aux)).to(self._cache.features_NH.dtype)
        for each, part in zip(waiting, fused.split([sum(map(len, each.aux)) for each in waiting]), strict=True):
            each.features, each.aux = torch.cat([each.features, part]), []

    def _slots(self, text: "_Text") -> "_Slots":
        """Return the slots that are to be written, of tokens and the features of those before them."""
        unread, blocks = self._unread[text.sequence], text.sequence.blocks
        tokens = np.array((*text.sequence.tokens[unread.slot : text.end], *text.guesses), np.int32)
        last = unread.slot + len(tokens) - 1
        seen_from = self._presence.run_start(blocks, last) + 1
        return _Slots(unread.features[: len(tokens)], tokens, unread.slot, blocks[: last // self._size + 1], seen_from)

    def _advance(self, text: "_Text") -> None:
        """Note that the slots of a text are written, but for guesses."""
        self._unread[text.sequence].advance(text.end, self._block_before(text.sequence, text.end))

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
            rows = _next_rows(rows, output.features_SH, tokens, stays)
        return [Draft(tuple(each), 1, tuple(chances)) for each, chances in zip(ids, likelihoods, strict=True)]


@dataclass(frozen=True)
class _Text:
    """The tokens of a sequence up to `end`, and what was guessed behind them."""

    sequence: Sequence
    end: int
    guesses: tuple[int, ...] = ()


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
        slots_M=rows.slots_M[rows.lasts_S[stays]] + 1,
        owners_M=np.arange(count, dtype=np.int32),
        tables_SN=rows.tables_SN[stays],
        seen_from_S=rows.seen_from_S[stays],
    )
