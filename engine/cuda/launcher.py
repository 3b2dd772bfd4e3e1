"""What a batch is for a device: arrays that the host has worked out, and their launches. In a team every member
launches the same; the first one's host works it out for all.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from engine.cuda.attention import DeviceAttention
from engine.cuda.cache import DeviceCache
from engine.cuda.chunks import Chunks
from engine.cuda.drawing import Drawer
from engine.cuda.inputs import PromptRows, Queries, tails_of
from engine.cuda.state import DecodeState
from engine.cuda.steps import DecodeSteps, StepKey
from engine.cuda.transformer import Attend, Rows, Tails, Transformer
from engine.cuda.upload import upload_all
from engine.runner import Written, unheard
from engine.scoring import Scores

Score = Callable[[Iterable[Tensor]], tuple[Scores, ...]]
"""Takes the logits of DeviceBatch.scored, all of them, one after the other."""


def unscored(logits: Iterable[Tensor]) -> tuple[Scores, ...]:
    """A Score that says nothing of them."""
    deque(logits, maxlen=0)
    return ()


@dataclass(frozen=True)
class DeviceBatch:
    """`words`: state.pack's. `key`: the decode step, of which `num_decodes` rows are somebody's; `tables` of blocks if
    they changed. `scored`: rows of the prompts whose logits are wanted too, a few at a time. `draws`: tokens.
    """

    words: np.ndarray
    num_decodes: int
    key: StepKey | None
    tables: np.ndarray | None
    prompts: PromptRows | None
    scored: SequenceOf[np.ndarray]
    draws: bool
    greedy: bool


@dataclass(frozen=True)
class Draw:
    """Of the batch that was launched last, without drawing: its first `num_rows`. `words`: state.pack's, if the batch's
    own have not brought their parameters.
    """

    words: np.ndarray | None
    num_rows: int
    greedy: bool


@dataclass(frozen=True)
class Launched:
    """`logits` of those that sample, decodes first: as the activations are."""

    logits: SequenceOf[Tensor]
    scored: tuple[Scores, ...]


class Launcher:
    """`steps` and `chunks` are captured by `capture`, before the first batch."""

    def __init__(
        self,
        model: Transformer,
        attention: DeviceAttention,
        cache: DeviceCache,
        state: DecodeState,
        steps: DecodeSteps,
        chunks: Chunks,
        drawer: Drawer,
    ) -> None:
        self.model, self.cache, self.state, self.steps, self.chunks = model, cache, state, steps, chunks
        self._attention, self._drawer = attention, drawer

    def capture(self) -> None:
        """Of decode steps and of chunks, before the first request."""
        self.steps.capture()
        self.chunks.capture()

    def release(self) -> None:
        """What was captured: NCCL does not let a team go while a graph has its calls."""
        self.steps.release()
        self.chunks.release()

    @torch.inference_mode()
    def launch(self, batch: DeviceBatch, score: Score, written: Written = unheard) -> Launched:
        """`written`: see engine.runner.Runner."""
        count, state = batch.num_decodes, self.state
        state.put(batch.words)
        if batch.tables is not None:
            state.put_tables(batch.tables)
        if batch.key is not None:
            (self.steps.draw if batch.draws else self.steps.compute)(batch.key)
        if batch.prompts is None:
            return Launched([state.logits[:count]], score(()))
        sampled, scored = self._prompts(batch.prompts, batch.scored, written)
        launched = Launched([state.logits[:count], sampled], score(scored))
        if batch.draws and len(sampled):
            self._drawer.into(state, sampled, count, batch.greedy)
        return launched

    @torch.inference_mode()
    def draw(self, draw: Draw, logits: Tensor) -> None:
        """From these logits, in place of the batch's own."""
        if draw.words is not None:
            self.state.put(draw.words)
        self._drawer.into(self.state, logits, 0, draw.greedy)

    def follow(self, draw: Draw) -> None:
        """What `draw` of the team's first member gives."""
        self._drawer.follow(self.state, draw.num_rows)

    def _prompts(
        self, plan: PromptRows, scored: SequenceOf[np.ndarray], written: Written
    ) -> tuple[Tensor, Iterator[Tensor]]:
        """Logits of those that sample, and of the prompts' own rows."""
        wanted = [plan.sample_rows, *scored]
        left, queries = tails_of(plan.queries, np.concatenate(wanted))
        columns = plan.token_ids, plan.positions, plan.slots, left, *(np.searchsorted(left, part) for part in wanted)
        token_ids, positions, slots, tail_rows, sampled, *others = upload_all(columns, self.state.device)

        rows = Rows(token_ids, positions, slots, Tails(tail_rows, self._attend(queries)))

        def noted(is_all: bool) -> None:
            if is_all:
                self.cache.written()
            written(is_all)

        x = self.model(rows, self.cache, self._attend(plan.queries), noted, self.chunks.advance(rows))
        logits = (self.model.head(x.index_select(0, index)).float() for index in others)
        return self.model.head(x.index_select(0, sampled)), logits

    def _attend(self, queries: Queries) -> Attend:
        """Attention of prompts, planned when it is first asked for: the device computes what is before it meanwhile."""
        planned = cache(partial(self._attention.of_prompts, queries))
        return lambda *args: planned()(*args)
