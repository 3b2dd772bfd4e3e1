"""What a draft head does beside the batches of its model."""

import torch
from torch import Tensor

from engine.cuda.graphs.head_graphs import DraftGraphs, ReadGraphs, ReadRows
from engine.cuda.inputs.decode_state import DecodeState
from engine.cuda.inputs.head_inputs import HeadBatch, HeadState
from engine.cuda.model.eagle3_head import DeviceEagle3Head
from engine.cuda.runtime.graph_capture import GraphSet
from engine.cuda.runtime.upload import upload_all


class HeadPass:
    """The head drafts for a batch before that is computed, and reads it afterwards.

    `aux` `[max_rows, fc_width]`: the rows of the model that it reads.
    """

    def __init__(self, head: DeviceEagle3Head, state: DecodeState, reads: HeadState, aux: Tensor) -> None:
        self._head, self.state, self._aux = head, reads, aux
        self.drafts, self._steps = DraftGraphs(head, state, reads), ReadGraphs(head, state, reads, aux)

    @property
    def graph_sets(self) -> tuple[GraphSet, ...]:
        return self.drafts, self._steps

    @torch.inference_mode()
    def begin(self, batch: HeadBatch, is_step: bool) -> None:
        """Draft for a batch whose answers' tokens and tables the device has by now.

        `is_step`: it has no prompts.
        """
        if is_step or batch.drafts is not None:
            self.state.put(batch)
        if len(batch.loaded[0]):
            blocks, places = upload_all(batch.loaded, self._aux.device)
            self.state.pool.index_copy_(0, places, self.state.ends.index_select(0, blocks))
        if batch.drafts is not None:
            self.drafts.draft(len(batch.drafts.rows), batch.drafts.num_places)

    @torch.inference_mode()
    def read_step(self, num_rows: int) -> None:
        """Read the rows of a decode step."""
        self._steps.read(num_rows)

    @torch.inference_mode()
    def read(self, batch: HeadBatch, token_ids: Tensor) -> None:
        """Read the rows of a batch with prompts."""
        reads = batch.reads
        arrays = (*batch.kept, reads.before, reads.positions, reads.slots, reads.blocks)
        kept_from, kept_in, before, positions, slots, blocks = upload_all(arrays, self._aux.device)
        rows = ReadRows(kept_from, kept_in, before, token_ids, positions, slots, blocks)
        rows.read(self._head, self.state, self._aux[: len(token_ids)])
