"""Drafts of a smaller model of the same vocabulary (Leviathan et al. 2023)."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from engine.backend import Runner
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from engine.settings import MAX_DRAFT_TOKENS
from engine.speculative.proposer import NO_DRAFT, Draft, spare_blocks

MAX_UNREAD = 256
"""The tokens of a sequence that a step reads at most beside those that the model computes of it.

A prompt that came without the draft model's KV is read in several steps, and nothing is drafted until then.
"""
_MOST_ANSWER_ROWS = MAX_DRAFT_TOKENS + 1
"""Up to so many rows of a sequence go through the kernel that answers take."""


class ModelDrafter:
    """See engine.backend.Drafter.

    `runner` computes the draft model over a cache that has the target's block ids.

    `read_N` `[num_blocks]` int32 says how many tokens of each block are in that cache, and goes where its pages go. A
    token that is not there is read by its id when a draft needs it, so nothing is missing for good. The cache has
    `spare_blocks` for each of the most sequences behind the target's blocks, for drafts that run beyond a sequence's.
    Of the vocabulary the first `num_tokens` are drafted, which both models have; a text's others are read as token 0.
    """

    def __init__(self, runner: Runner, read_N: np.ndarray, block_size: int, num_tokens: int, max_len: int) -> None:
        self._runner, self._read, self._size = runner, read_N, block_size
        self._num_tokens, self._max_len = num_tokens, max_len

    def forget_blocks(self, blocks: SequenceOf[int]) -> None:
        self._read[np.asarray(blocks, np.int64)] = 0

    def settle(self, sequence: Sequence) -> None:
        self._write(self._unread(sequence, len(sequence.tokens) - 1, MAX_UNREAD))

    def end_sequence(self, sequence: Sequence) -> None:
        """What is kept of it is in its blocks."""

    def read(self, pieces: SequenceOf[ScheduledChunk]) -> None:
        """Read the prompts of a batch that was computed; an answer is read when a draft goes on behind it."""
        prompts = [piece for piece in pieces if not piece.is_decode and piece.sequence.sampling.speculate]
        self._write(
            part for piece in prompts for part in self._unread(piece.sequence, piece.end, piece.num_tokens + MAX_UNREAD)
        )

    def propose(self, sequences: SequenceOf[Sequence], num_tokens: SequenceOf[int]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(sequences)
        behind: list[_UnreadTokens] = []
        texts: dict[int, _DraftedText] = {}
        for place, (sequence, most) in enumerate(zip(sequences, num_tokens, strict=True)):
            end = len(sequence.tokens)
            count = min(most, MAX_DRAFT_TOKENS, self._max_len - end)
            for part in self._unread(sequence, end, end) if count > 0 else ():
                if part.end - part.first > MAX_UNREAD:
                    behind.append(_UnreadTokens(sequence, part.first, part.first + MAX_UNREAD))
                else:
                    texts[place] = self._text(part, len(texts), count)
        self._write(behind)
        self._draft(list(texts.values()))
        for place, text in texts.items():
            self._note(_UnreadTokens(sequences[place], text.first_unread, len(sequences[place].tokens)))
            drafts[place] = Draft(tuple(text.drafted), 1, tuple(text.likelihoods))
        return drafts

    def _unread(self, sequence: Sequence, end: int, most: int) -> "list[_UnreadTokens]":
        """Return the tokens before `end` that are to be read, at most so many, as a list of one part or none.

        The newest one is always among them: what was said of it is gone.
        """
        blocks = np.array(sequence.blocks[: -(-end // self._size)], np.int64)
        if not 0 < end <= min(len(blocks) * self._size, self._max_len):
            return []
        read = self._read[blocks].clip(0, self._size)  # within bounds whatever a peer wrote
        gaps = np.flatnonzero(read < self._size)
        first = int(gaps[0]) * self._size + int(read[gaps[0]]) if len(gaps) else end
        first = min(first, end - 1)
        return [_UnreadTokens(sequence, first, min(end, first + most))]

    def _write(self, parts: "Iterable[_UnreadTokens]") -> None:
        """Compute the KV of parts; nothing is asked of their last tokens."""
        parts = list(parts)
        pieces = []
        for part in parts:
            text = self._text(part, 0, 0)
            text.shadow.tokens.append(0)  # one that is not computed: behind the others nothing samples
            pieces.append(ScheduledChunk(text.shadow, part.first, part.end - part.first))
        if pieces:
            self._runner.forward(sorted(pieces, key=_order))
        for part in parts:
            self._note(part)

    def _note(self, part: "_UnreadTokens") -> None:
        """Note that a part is read, and with it all before it."""
        whole, rest = divmod(part.end, self._size)
        blocks = part.sequence.blocks
        self._read[np.array(blocks[part.first // self._size : whole], np.int64)] = self._size
        if rest:
            self._read[blocks[whole]] = max(rest, self._read[blocks[whole]])

    def _text(self, part: "_UnreadTokens", index: int, count: int) -> "_DraftedText":
        """Return the part's sequence as the draft model is to compute it, with spare blocks behind its own."""
        sequence, num_spare = part.sequence, spare_blocks(self._size)
        tokens = np.array(sequence.tokens[: part.end], np.int32)
        shadow = Sequence(sequence.request_id, (tokens * (tokens < self._num_tokens)).tolist(), sequence.sampling)
        shadow.blocks.extend(sequence.blocks[: -(-part.end // self._size)])
        shadow.blocks.extend(range(len(self._read) + index * num_spare, len(self._read) + (index + 1) * num_spare))
        if part.end - part.first <= _MOST_ANSWER_ROWS:
            shadow.num_prefilled = part.first
        return _DraftedText(shadow, part.first, count)

    def _draft(self, texts: "list[_DraftedText]") -> None:
        """Draft greedily for all texts, a place at a time."""
        while texts:
            texts.sort(key=lambda text: _order(text.piece))
            logits = self._runner.forward([text.piece for text in texts]).logits
            assert isinstance(logits, torch.Tensor), "the draft model's runner leaves the drawing to the host"
            logits = logits[:, : self._num_tokens]
            tops, tokens = logits.max(1)
            chances = (tops - logits.logsumexp(1)).exp_()
            for text, token, chance in zip(texts, tokens.tolist(), chances.tolist(), strict=True):
                text.go_on(token, chance)
            texts = [text for text in texts if len(text.drafted) < text.count]


@dataclass(frozen=True)
class _UnreadTokens:
    """Tokens `[first, end)` of a sequence."""

    sequence: Sequence
    first: int
    end: int


class _DraftedText:
    """A text of the draft model: what it has read, and what it says comes next, `count` tokens."""

    def __init__(self, shadow: Sequence, first: int, count: int) -> None:
        self.shadow, self.first_unread, self.count = shadow, first, count
        self.drafted: list[int] = []
        self.likelihoods: list[float] = []
        self._first = first

    @property
    def piece(self) -> ScheduledChunk:
        """Return what is to be computed next: all that is unread, then the newest drafted token."""
        return ScheduledChunk(self.shadow, self._first, len(self.shadow.tokens) - self._first)

    def go_on(self, token: int, likelihood: float) -> None:
        self._first = len(self.shadow.tokens)
        self.shadow.num_prefilled = self._first  # drafted tokens take the kernel of answers
        self.shadow.tokens.append(token)
        self.drafted.append(token)
        self.likelihoods.append(likelihood)


def _order(piece: ScheduledChunk) -> int:
    """Return where a piece stands in a batch, see engine.scheduler.batch.Batch."""
    return 0 if piece.is_decode else 1 if piece.is_answer else 2
