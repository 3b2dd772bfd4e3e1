"""The launches of a batch, whose arrays the host has worked out.

In a team every member launches the same; the first one's host works it out for all.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from engine.backend import Written, ignore_progress
from engine.cuda.device_sampler import SamplingKernel
from engine.cuda.graphs.decode_graphs import DecodeGraphs
from engine.cuda.graphs.head_pass import HeadPass
from engine.cuda.graphs.last_layer_graphs import LastLayerGraphs
from engine.cuda.graphs.mixed_batch_attention import MixedBatchAttention
from engine.cuda.graphs.prefill_graphs import PrefillGraphs
from engine.cuda.graphs.prefill_rows import PrefillRows
from engine.cuda.inputs.batch_inputs import DeviceBatch, PromptRows, Queries, SampleBatch, StepKey, tails_of
from engine.cuda.inputs.decode_state import DecodeState
from engine.cuda.kv.kv_cache import DeviceCache, LayerCache
from engine.cuda.model.attention import DeviceAttention, in_two
from engine.cuda.model.forward_inputs import Attend, QueryRows
from engine.cuda.model.transformer import Transformer
from engine.cuda.model.weights import AttentionWindow
from engine.cuda.runtime.graph_capture import GraphSet, Launch, capturing, expected_nbytes, free_nbytes
from engine.cuda.runtime.upload import upload_all
from engine.sampling.prompt_logprobs import Scores

Score = Callable[[Iterable[Tensor]], tuple[Scores, ...]]
"""Takes the logits of DeviceBatch.scored, all of them, one after the other."""


def unscored(logits: Iterable[Tensor]) -> tuple[Scores, ...]:
    """A Score that says nothing of them."""
    deque(logits, maxlen=0)
    return ()


@dataclass(frozen=True)
class Launched:
    """`logits` of those that sample, decodes first, in float32. The next step may overwrite them."""

    logits: Tensor
    scored: tuple[Scores, ...]


def _run(launch: Launch) -> Launch:
    """A Record."""
    launch()
    return launch


class Launcher:
    """The launches of all batches.

    `steps`, `chunks`, `beside`, `endings` and `head` hold graphs once `capture` is called, before the first batch.
    """

    def __init__(
        self,
        model: Transformer,
        attention: DeviceAttention,
        cache: DeviceCache,
        state: DecodeState,
        rows: PrefillRows,
        steps: DecodeGraphs,
        chunks: PrefillGraphs,
        beside: MixedBatchAttention,
        endings: LastLayerGraphs,
        drawer: SamplingKernel,
        head: HeadPass | None = None,
    ) -> None:
        self.head = head
        self.model, self.cache, self.state, self.steps, self.chunks = model, cache, state, steps, chunks
        self.mixed_batch, self.endings, self._rows, self._attention, self._sampling_kernel = (
            beside,
            endings,
            rows,
            attention,
            drawer,
        )
        self._graph_sets: tuple[GraphSet, ...] = (steps, chunks, beside, endings, *(head.graph_sets if head else ()))

    def run_all(self) -> None:
        """All that `capture` records, once."""
        for holder in self._graph_sets:
            holder.capture(_run, holder.sizes)
            holder.release()

    def expected_nbytes(self) -> int:
        """What `capture` will take of the GPU's memory."""
        return expected_nbytes(self._graph_sets, capturing, free_nbytes)

    def capture(self) -> None:
        """What is launched, or its like in a model of fewer layers, has run before: nothing is loaded within."""
        for holder in self._graph_sets:
            with capturing() as record:
                holder.capture(record, holder.sizes)

    def release(self) -> None:
        """What was captured: NCCL does not let a team go while a graph has its calls."""
        for holder in self._graph_sets:
            holder.release()

    @torch.inference_mode()
    def launch(self, batch: DeviceBatch, score: Score, written: Written = ignore_progress) -> Launched:
        """Decodes as a step.

        Beside prompts they are rows of the same pass: all weights are read once for both. `written`: see
        engine.cpu.runner.Runner.
        """
        if batch.prompts is not None:
            return self._with_prompts(batch, batch.prompts, score, written)
        self._put(batch)
        self._begin(batch)
        if batch.key is not None:
            (self.steps.sample if batch.draws else self.steps.compute)(batch.key)
        return Launched(self.state.logits[: batch.num_decodes], score(()))

    def read(self, batch: DeviceBatch) -> None:
        """Have the draft head read what was computed of a batch, if there is one."""
        if self.head is None or batch.head is None:
            return
        if batch.prompts is not None:
            count = batch.num_decodes + len(batch.prompts.token_ids)
            self.head.read(batch.head, self._rows.first(count).token_ids)
        elif batch.key is not None:
            self.head.read_step(batch.key.num_rows)

    @torch.inference_mode()
    def sample(self, draw: SampleBatch, logits: Tensor) -> None:
        """From these logits, in place of the batch's own."""
        if draw.words is not None:
            self.state.put(draw.words)
        self._sampling_kernel.into(self.state, logits, draw.greedy)

    def follow(self, draw: SampleBatch) -> None:
        """What `draw` of the team's first member gives."""
        self._sampling_kernel.follow(self.state, draw.num_rows)

    def _begin(self, batch: DeviceBatch) -> None:
        """Draft what the batch verifies."""
        if self.head is not None and batch.head is not None:
            self.head.begin(batch.head, batch.prompts is None)

    def _put(self, batch: DeviceBatch) -> None:
        self.state.put(batch.words)
        if batch.tables is not None:
            self.state.put_tables(batch.tables)

    def _with_prompts(self, batch: DeviceBatch, prompts: PromptRows, score: Score, written: Written) -> Launched:
        """The first rows are of decodes.

        What is not asked before the end is told once all before it is launched: the device has work by then.
        """
        count = batch.num_decodes
        if count:
            self._put(batch)
        self._begin(batch)
        rows = self._rows.put(prompts, self.state, count)

        def noted(is_all: bool) -> None:
            if is_all:
                self.cache.written()
            written(is_all)

        attend = self._attend(batch.key, count, prompts.queries)
        self.model.fill(rows, self.cache, attend, noted, self.chunks.advance(len(rows.token_ids)))
        return self._finished(batch, prompts, score)

    def _finished(self, batch: DeviceBatch, prompts: PromptRows, score: Score) -> Launched:
        count = batch.num_decodes
        num_sampling = count + len(prompts.sampling)
        if not num_sampling and not batch.scored:
            self.model.meet()  # behind the last layer's K and V, as others do in its products
        if not count and num_sampling:
            self._put(batch)
        logits = self.endings.compute(prompts, count) if num_sampling else self.state.logits[:0]
        scores = score(self._scored(count, prompts.queries, batch.scored) if batch.scored else ())
        if batch.draws and num_sampling:
            self.steps.draw_from(num_sampling, batch.greedy)
        return Launched(logits, scores)

    def _scored(self, num_decodes: int, queries: Queries, scored: SequenceOf[np.ndarray]) -> Iterator[Tensor]:
        """Logits of these rows of the prompts."""
        left, queries = tails_of(queries, np.concatenate(scored))
        places = (np.searchsorted(left, rows) for rows in scored)
        tails, *places = upload_all((num_decodes + left, *places), self.state.device)
        x = self.model.finish(tails, self.cache, self._attention.of_prompts(queries), as_prompts=True)
        yield from (self.model.head(x.index_select(0, index)).float() for index in places)

    def _attend(self, key: StepKey | None, count: int, queries: Queries) -> Attend:
        """Return the attention of a pass.

        That of prompts is planned when it is first asked for: the device computes what is before it meanwhile.
        """
        planned = cache(partial(self._attention.of_prompts, queries))

        def prompts(asked: QueryRows, layer: LayerCache, out: Tensor, sight: AttentionWindow) -> None:
            planned()(asked, layer, out, sight)

        if key is None:
            return prompts
        return in_two(self.mixed_batch.attend(key), count, prompts)
