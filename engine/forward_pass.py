"""The forward pass of a batch, and what is known once it is launched."""

import logging
from collections.abc import Sequence as SequenceOf

import torch

from contracts.ids import BlockId
from engine.backend import Computed, PagedCache, Runner
from engine.cache.kv_groups import KVGroups
from engine.cache.prefix_insertion import PrefixInserter
from engine.messages import ChunkDone, ChunkScheduled, EngineFailure, StepObserver
from engine.request_release import RequestRelease
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence

_log = logging.getLogger(__name__)

Ran = tuple[list[ScheduledChunk], Computed, tuple[EngineFailure, ...]]
"""The chunks that ran, what they gave, and the requests that could not be computed."""


class ForwardPass:
    """The launch of a batch on the device. A request that can't be computed fails alone."""

    def __init__(
        self,
        runner: Runner,
        cache: PagedCache,
        prefix_cache: PrefixInserter,
        requests: RequestRelease,
        groups: KVGroups,
    ) -> None:
        self._runner, self._cache, self._prefix_cache, self._requests = runner, cache, prefix_cache, requests
        self._groups = groups

    def run(self, chunks: SequenceOf[ScheduledChunk], observer: StepObserver) -> Ran:
        """Launch a batch.

        Chunks that will be handed over are announced before, so that pages can be asked for.
        """
        for chunk in chunks:
            if chunk.sequence.handoff:
                first = chunk.sequence.num_announced
                blocks = self._blocks_between(chunk.sequence, first, chunk.end)
                observer.chunk_scheduled(
                    ChunkScheduled(
                        chunk.sequence.request_id, first, chunk.end - first, blocks, self._runner.early_planes
                    )
                )
        try:
            return self._run(chunks, observer)
        finally:
            observer.chunks_launched(is_all=True)

    def advance(self, chunk: ScheduledChunk) -> list[ChunkDone]:
        """Note that KV up to the chunk's end exists. Returns the chunk if it is to be handed over."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.end
        sequence.num_scored = max(sequence.num_scored, min(chunk.end + 1, sequence.num_prompt))
        if chunk.is_decode:
            self._prefix_cache.insert_some(sequence)
        else:
            self._prefix_cache.insert_all(sequence)
        if sequence.lease is not None:
            self._groups.settle(sequence.lease, sequence.num_computed)
        if not sequence.handoff:
            return []
        first, sequence.num_announced = sequence.num_announced, chunk.end
        blocks = self._blocks_between(sequence, first, chunk.end)
        checksums = self._cache.checksums(blocks)
        loss = sequence.loss_before(chunk.end)
        return [ChunkDone(sequence.request_id, first, chunk.end - first, blocks, checksums, loss)]

    def _run(self, chunks: SequenceOf[ScheduledChunk], observer: StepObserver) -> Ran:
        """Run all chunks at once; if the batch as a whole fails, each alone."""
        try:
            return list(chunks), self._runner.forward(chunks, observer.chunks_launched), ()
        except RuntimeError:
            _log.exception("a batch of %d chunks failed", len(chunks))
        runs = [self._run_alone(chunk) for chunk in chunks]
        logits = [computed.logits for done, computed, _ in runs if done]
        scored = tuple(scored for _, computed, _ in runs for scored in computed.scored)
        failed = tuple(failure for _, _, failures in runs for failure in failures)
        hidden = _joined_hidden([computed for done, computed, _ in runs if done])
        whole = Computed(torch.cat(logits or [torch.empty(0)]), scored, hidden=hidden)
        return [chunk for done, _, _ in runs for chunk in done], whole, failed

    def _run_alone(self, chunk: ScheduledChunk) -> Ran:
        try:
            return [chunk], self._runner.forward_without_sampling([chunk]), ()
        except RuntimeError as error:
            _log.exception("a chunk of %d tokens failed", chunk.num_tokens)
            failure = self._requests.fail(chunk.sequence, f"this request could not be computed: {error}")
            return [], Computed(torch.empty(0)), (failure,)

    def _blocks_between(self, sequence: Sequence, first_token: int, end: int) -> list[BlockId]:
        layout = self._cache.layout
        return [BlockId(block) for block in sequence.blocks[first_token // layout.block_size : layout.num_blocks(end)]]


def _joined_hidden(runs: SequenceOf[Computed]) -> torch.Tensor | None:
    """Return the hidden rows of chunks that ran alone, zeros for those that did not want theirs."""
    width = next((computed.hidden.shape[1] for computed in runs if computed.hidden is not None), None)
    if width is None:
        return None
    return torch.cat([torch.zeros(len(each.logits), width) if each.hidden is None else each.hidden for each in runs])
