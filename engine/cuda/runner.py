"""The runner of batches on a GPU.

Decodes run as a step of their bucket, or as rows of the pass of the prompts beside them.
"""

from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from contracts.ids import RequestId
from engine.backend import Computed, Written, ignore_progress
from engine.cuda.device_sampler import DevicePendingTokens, DeviceSampler, TopLogprobs, to_host
from engine.cuda.eagle3_drafter import DeviceEagle3Drafter
from engine.cuda.inputs.batch_inputs import (
    DecodeRows,
    DeviceBatch,
    SampleBatch,
    StepKey,
    decode_rows,
    decode_tables,
    num_decodes,
    prompt_rows,
)
from engine.cuda.inputs.decode_state import give, pack
from engine.cuda.inputs.sampling_columns import DrawnRow, columns, is_greedy
from engine.cuda.launcher import Launcher, unscored
from engine.sampling.prompt_logprobs import ROWS, score, spans
from engine.sampling.token_masks import TokenMasks
from engine.scheduler.batch import ScheduledChunk
from engine.sequence import Sequence
from engine.speculative.proposer import Draft


@dataclass(frozen=True)
class Prepared:
    """A batch of one sequence's newest token.

    `words`: state.pack's, in page-locked memory, with another token.
    """

    sequence: Sequence
    blocks: "array[int]"
    end: int
    words: np.ndarray

    def is_of(self, decodes: SequenceOf[ScheduledChunk]) -> bool:
        ours = self.sequence, self.blocks, self.end
        return [ours] == [(piece.sequence, piece.sequence.blocks, piece.end) for piece in decodes]


class DraftsOnTheirWay:
    """See engine.backend.PendingDrafts: the tokens of the rows of a step, on their way to the host."""

    def __init__(self, token_ids: torch.Tensor) -> None:
        self._token_ids = to_host(token_ids)
        self._done = torch.cuda.Event() if token_ids.is_cuda else None
        if self._done is not None:
            self._done.record()

    def known(self, drafts: SequenceOf[Draft]) -> list[Draft]:
        if self._done is not None:
            self._done.synchronize()
        tokens, row, found = self._token_ids.tolist(), 0, []
        for draft in drafts:
            end = row + 1 + len(draft)
            found.append(replace(draft, token_ids=tuple(tokens[row + 1 : end])) if draft.is_unknown else draft)
            row = end
        return found


Tell = Callable[[DeviceBatch | SampleBatch], AbstractContextManager[object]]
"""Within, a batch is launched that those who compute with this process were told of: engine.cuda.tensor_parallel."""


class DeviceRunner:
    """The runner that draws the tokens too.

    As part of a batch, or by `draw` where a sequence has its logits adjusted first, which may take tokens that are
    still being drawn.
    """

    def __init__(
        self, launcher: Launcher, sampler: DeviceSampler, tell: Tell = nullcontext, max_draft_rows: int = 0,
        drafter: DeviceEagle3Drafter | None = None,
    ) -> None:  # fmt: skip
        self._drafter = drafter
        layout, group = launcher.cache.layout, launcher.cache.layout.only_group
        self.launcher, self._sampler, self._tell, self._max_draft_rows = launcher, sampler, tell, max_draft_rows
        self._block_size, self._spare = layout.block_size, launcher.cache.num_blocks
        self.gives_hidden = False
        self.early_planes = launcher.model.early_layers * len(group.planes)
        self._told_of: list[DrawnRow] = []
        self._pending_tokens: dict[RequestId, int] = {}
        self._last: DevicePendingTokens | None = None
        self._tables: tuple[int, list[tuple[array[int], int, int]]] = (0, [])
        self._prepared: Prepared | None = None

    @property
    def max_graph_rows(self) -> int:
        return self.launcher.chunks.most_rows

    @property
    def max_draft_rows(self) -> int:
        return self._max_draft_rows

    @property
    def graph_rows(self) -> tuple[int, ...]:
        return tuple(self.launcher.chunks.sizes[::-1])

    def forward(self, pieces: SequenceOf[ScheduledChunk], written: Written = ignore_progress) -> Computed:
        adjusts = any(self._sampler.adjusts(piece.sequence) for piece in pieces if piece.samples)
        return self._run(pieces, not adjusts, written)

    def forward_without_sampling(self, pieces: SequenceOf[ScheduledChunk]) -> Computed:
        return self._run(pieces, False, ignore_progress)

    @torch.inference_mode()
    def forward_whole(self, prompts: SequenceOf[ScheduledChunk]) -> None:
        """All rows to their logits, as if each token of them were scored. Nothing is kept."""
        num_rows = sum(piece.num_tokens for piece in prompts)
        scored = np.array_split(np.arange(num_rows), range(ROWS, num_rows, ROWS))
        batch = self._batch((), prompts, (), scored, draws=False)
        with self._told(batch):
            self.launcher.launch(batch, unscored)

    @torch.inference_mode()
    def sample(self, sequences: SequenceOf[Sequence], logits: torch.Tensor, masks: TokenMasks) -> DevicePendingTokens:
        adjusted = self._sampler.adjusted(sequences, logits, masks)
        rows = [DrawnRow(sequence) for sequence in sequences]
        words = None if rows == self._told_of else pack(None, columns(rows), self.launcher.state.max_rows)
        draw = SampleBatch(words, len(sequences), is_greedy(sequences))
        with self._tell(draw):
            self.launcher.sample(draw, adjusted)
        return self._on_their_way(rows, logits)

    def wait(self) -> None:
        if self.launcher.state.device.type == "cuda":
            torch.cuda.current_stream(self.launcher.state.device).synchronize()

    def prepare(self, piece: ScheduledChunk) -> None:
        """The device is told the tables now, and the words are there but for the token.

        They are kept until the next call, when nothing is being computed. Said again of the same piece, its copy may
        still read the words when the step's token is written there; the step's own copy follows it.
        """
        sequence = piece.sequence
        batch = self._batch([piece], (), [DrawnRow(sequence)], (), draws=True)
        told = replace(batch, num_decodes=0, key=None)
        with self._told(told):
            self.launcher.launch(told, partial(score, ()))
        words = self.launcher.state.staged(batch.words)
        self._prepared = Prepared(sequence, sequence.blocks, piece.end, words)

    @torch.inference_mode()
    def _run(self, pieces: SequenceOf[ScheduledChunk], draws: bool, written: Written) -> Computed:
        sampling = [
            DrawnRow(piece.sequence, place)
            for piece in pieces
            if piece.samples
            for place in range(1 + len(piece.draft))
        ]
        count = num_decodes(pieces)
        found = spans(pieces[count:])
        batch = self._batch(pieces[:count], pieces[count:], sampling, [span.rows.numpy() for span in found], draws)
        if self._drafter is not None:
            batch = replace(batch, head=self._drafter.batch(pieces))
        with self._told(batch):
            scoring = partial(score, found, put=self._sampler.put, fetch=to_host)
            launched = self.launcher.launch(batch, scoring, written)
            self._told_of = sampling
            logits = launched.logits if draws else launched.logits.clone()
            drawn = self._on_their_way(sampling, logits) if draws else None
            drafts = self._drafts_on_their_way(batch)
            self.launcher.read(batch)  # behind what the host waits for
        return Computed(logits, launched.scored, drawn, drafts)

    def _drafts_on_their_way(self, batch: DeviceBatch) -> DraftsOnTheirWay | None:
        if batch.head is None or batch.head.drafts is None:
            return None
        return DraftsOnTheirWay(self.launcher.state.token_ids[: batch.num_decodes])

    def _on_their_way(self, rows: SequenceOf[DrawnRow], logits: torch.Tensor) -> DevicePendingTokens:
        """The tokens that are drawn for these, and what they ask for of their logits."""
        tokens, sequences = self.launcher.state.sampled[: len(rows)], [row.sequence for row in rows]
        asks = any(sequence.sampling.logprobs is not None for sequence in sequences)
        likeliest = TopLogprobs.of(sequences, logits, tokens) if asks else None
        self._last = DevicePendingTokens(rows, tokens, likeliest)
        self._pending_tokens = {each.sequence.request_id: row for row, each in enumerate(rows) if not each.place}
        return self._last

    @contextmanager
    def _told(self, batch: DeviceBatch) -> Iterator[None]:
        """Within, it is launched."""
        try:
            with self._tell(batch):
                yield
        except RuntimeError:
            self._tables = (0, [])  # nobody knows whether the device has those of this batch
            self._told_of = []  # nor whose parameters it has
            if self._drafter is not None:
                self._drafter.forget_batch()
            if self._last is not None:  # nor whether it has drawn over the tokens that this batch goes on from
                self._last.put_back(self.launcher.state.sampled)
            raise

    def _batch(
        self,
        decodes: SequenceOf[ScheduledChunk],
        prompts: SequenceOf[ScheduledChunk],
        sampling: SequenceOf[DrawnRow],
        scored: SequenceOf[np.ndarray],
        draws: bool,
    ) -> DeviceBatch:
        greedy, num_rows = (
            is_greedy([row.sequence for row in sampling if not row.place]),
            sum(piece.num_rows for piece in decodes),
        )
        longest = max((piece.end + len(piece.draft) for piece in decodes), default=0)
        key = self.launcher.steps.key(num_rows, longest, greedy) if decodes else None
        return DeviceBatch(
            words=self._words(decodes, sampling, key),
            num_decodes=num_rows,
            key=key,
            tables=self._changed_tables(decodes, key),
            prompts=prompt_rows(prompts, self._block_size) if prompts else None,
            scored=scored,
            draws=draws,
            greedy=greedy,
        )

    def _words(
        self, decodes: SequenceOf[ScheduledChunk], sampling: SequenceOf[DrawnRow], key: StepKey | None
    ) -> np.ndarray:
        if self._prepared is not None and len(sampling) == 1 and self._prepared.is_of(decodes):
            give(self._prepared.words, sampling[0].sequence.tokens[-1])
            return self._prepared.words
        return pack(self._decode_rows(decodes, key), columns(sampling), self.launcher.state.max_rows)

    def _decode_rows(self, decodes: SequenceOf[ScheduledChunk], key: StepKey | None) -> DecodeRows | None:
        if key is None:
            return None
        max_rows = self.launcher.state.max_rows
        return decode_rows(decodes, self._pending_tokens, max_rows, key.num_rows, self._block_size, self._spare)

    def _changed_tables(self, decodes: SequenceOf[ScheduledChunk], key: StepKey | None) -> np.ndarray | None:
        """`[rows, width]`; None if the device has them: most steps start no block."""
        if key is None:
            return None
        # A sequence's blocks grow in place. Others are another array, be it that the request id is the same.
        held = [(piece.sequence.blocks, len(piece.sequence.blocks), piece.num_rows) for piece in decodes]
        if (key.num_rows, held) == self._tables:
            return None
        self._tables = key.num_rows, held
        return decode_tables(decodes, key.num_rows, max(num_blocks for _, num_blocks, _ in held), self._spare)
