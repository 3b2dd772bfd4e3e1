"""A batch between its launch and the moment its tokens are told."""

from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate

from engine.backend import Computed
from engine.messages import ChunkDone, EngineFailure, Started
from engine.sampling.token_masks import NO_MASKS, TokenMasks
from engine.scheduler.batch import ScheduledChunk
from engine.scheduler.launch_pacer import Kind
from engine.sequence import Sequence
from engine.speculative.proposer import Draft, DrawnGuess


@dataclass(frozen=True)
class LogitRow:
    """A row of logits to draw from.

    `guess`: what its draft has there, if that was drawn from a distribution.
    """

    row: int
    sequence: Sequence
    guess: DrawnGuess | None = None


@dataclass(frozen=True)
class InFlightBatch:
    """`pieces` were launched, `failed` could not be.

    `sampling`: whose next token this batch says, and `drafts`: what is verified of each of them, empty where there is
    nothing. `masks`: None as long as they can't be worked out, since tokens before are being drawn. `began_s`: when the
    host began on it; `scheduling_s`: what it took to choose the chunks, drafts among them.
    """

    started: tuple[Started, ...]
    chunks: SequenceOf[ScheduledChunk]
    done_chunks: tuple[ChunkDone, ...]
    computed: Computed
    failed: tuple[EngineFailure, ...]
    masks: Future[TokenMasks] | None
    sampling: SequenceOf[Sequence]
    drafts: SequenceOf[Draft]
    kind: Kind
    began_s: float
    scheduling_s: float = 0.0

    @property
    def is_done(self) -> bool:
        """The device has computed and drawn all of it."""
        return self.computed.pending_tokens is not None and self.computed.pending_tokens.is_done

    @property
    def first_rows(self) -> list[int]:
        """Return for each sequence that samples the row of logits behind its newest token.

        Those behind the tokens of its draft follow.
        """
        ends = accumulate(1 + len(draft) for draft in self.drafts)
        return [end - 1 - len(draft) for end, draft in zip(ends, self.drafts, strict=True)]

    def known_drafts(self) -> "InFlightBatch":
        """Return the batch with the tokens of its drafts, once these are computed."""
        pending = self.computed.pending_drafts
        return self if pending is None else replace(self, drafts=pending.known(self.drafts))

    def known_masks(self) -> TokenMasks:
        """Wait for them."""
        return NO_MASKS if self.masks is None else self.masks.result()
