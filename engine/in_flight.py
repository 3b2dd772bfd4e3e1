"""A batch between its launch and the moment its tokens are told."""

from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass

from engine.backend import Computed
from engine.messages import ChunkDone, EngineFailure, Started
from engine.sampling.token_masks import NO_MASKS, TokenMasks
from engine.scheduler.batch import ScheduledChunk
from engine.scheduler.launch_pacer import Kind
from engine.sequence import Sequence


@dataclass(frozen=True)
class InFlightBatch:
    """`pieces` were launched, `failed` could not be.

    `sampling`: whose next token this batch says. `masks`: None as long as they can't be worked out, since tokens before
    are being drawn. `began_s`: when the host began on it.
    """

    started: tuple[Started, ...]
    chunks: SequenceOf[ScheduledChunk]
    done_chunks: tuple[ChunkDone, ...]
    computed: Computed
    failed: tuple[EngineFailure, ...]
    masks: Future[TokenMasks] | None
    sampling: SequenceOf[Sequence]
    kind: Kind
    began_s: float

    @property
    def is_done(self) -> bool:
        """The device has computed and drawn all of it."""
        return self.computed.pending_tokens is not None and self.computed.pending_tokens.is_done

    def known_masks(self) -> TokenMasks:
        """Wait for them."""
        return NO_MASKS if self.masks is None else self.masks.result()
