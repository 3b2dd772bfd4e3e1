"""Runs a batch on the device: its decodes as one step of a bucket, its prompts in one pass beside it."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from contracts.ids import RequestId
from engine.batch import Piece
from engine.cuda.attention import DeviceAttention
from engine.cuda.cache import DeviceCache
from engine.cuda.chunks import Chunks
from engine.cuda.drawing import DeviceDrawn, DeviceSampler, Drawer, Likeliest
from engine.cuda.inputs import DecodeRows, block_tables, decode_rows, num_decodes, prompt_rows
from engine.cuda.sampling import columns, is_greedy
from engine.cuda.state import DecodeState, pack
from engine.cuda.steps import DecodeSteps, StepKey
from engine.cuda.transformer import Rows, Transformer
from engine.cuda.upload import upload
from engine.messages import Scored
from engine.runner import Computed, ignore
from engine.scoring import score, spans
from engine.sequence import Sequence


class DeviceRunner:
    """Draws the tokens too, unless a sequence has its logits adjusted by the host first."""

    def __init__(
        self,
        model: Transformer,
        attention: DeviceAttention,
        cache: DeviceCache,
        state: DecodeState,
        steps: DecodeSteps,
        chunks: Chunks,
        drawer: Drawer,
        sampler: DeviceSampler,
    ) -> None:
        self._model, self._attention, self._cache = model, attention, cache
        self._state, self._drawer, self._sampler = state, drawer, sampler
        self.steps, self.chunks = steps, chunks
        self.early_planes = model.early_layers * cache.layout.num_planes // cache.layout.num_layers
        self._drawn: dict[RequestId, int] = {}
        self._tables: list[tuple[RequestId, int]] = []

    def capture(self) -> None:
        """Of decode steps and of chunks, before the first request."""
        self.steps.capture()
        self.chunks.capture()

    def forward(self, pieces: SequenceOf[Piece], early: Callable[[], None] = ignore) -> Computed:
        sampling = [piece.sequence for piece in pieces if piece.samples]
        return self._run(pieces, sampling, not any(self._sampler.adjusts(sequence) for sequence in sampling), early)

    def forward_undrawn(self, pieces: SequenceOf[Piece]) -> Computed:
        return self._run(pieces, [piece.sequence for piece in pieces if piece.samples], False, ignore)

    @torch.inference_mode()
    def _run(
        self, pieces: SequenceOf[Piece], sampling: SequenceOf[Sequence], draws: bool, early: Callable[[], None]
    ) -> Computed:
        count, greedy = num_decodes(pieces), is_greedy(sampling)
        decodes, prompts = pieces[:count], pieces[count:]
        key = self.steps.key(count, max(piece.end for piece in decodes), greedy) if decodes else None
        self._state.put(pack(self._decode_rows(decodes, key), columns(sampling), self._state.max_rows))
        if key is not None:
            self._step(decodes, key, draws)
        logits, scored = [self._state.logits[:count]], ()
        if prompts:
            sampled, scored = self._prompts(prompts, early)
            logits.append(sampled)
            if draws:
                self._draw_prompts(sampled, count, greedy)
        if not draws:
            return Computed(torch.cat(logits).float(), scored)
        tokens = self._state.drawn[: len(sampling)]
        asks = any(sequence.sampling.logprobs is not None for sequence in sampling)
        likeliest = Likeliest.of(sampling, torch.cat(logits), tokens) if asks else None
        self._drawn = {sequence.request_id: row for row, sequence in enumerate(sampling)}
        return Computed(logits[0], scored, DeviceDrawn(sampling, tokens, likeliest))

    def _decode_rows(self, decodes: SequenceOf[Piece], key: StepKey | None) -> DecodeRows | None:
        if key is None:
            return None
        size, spare = self._cache.layout.block_size, self._cache.num_blocks
        return decode_rows(decodes, self._drawn, self._state.max_rows, key.num_rows, size, spare)

    def _step(self, decodes: SequenceOf[Piece], key: StepKey, draws: bool) -> None:
        held = [(piece.sequence.request_id, len(piece.sequence.blocks)) for piece in decodes]
        held.append((RequestId(""), key.num_rows))
        if held != self._tables:  # most steps start no block
            width = max(num_blocks for _, num_blocks in held[:-1])
            self._state.put_tables(block_tables(decodes, key.num_rows, width, self._cache.num_blocks))
            self._tables = held
        if draws:
            self.steps.draw(key)
        else:
            self.steps.compute(key)

    def _prompts(self, prompts: SequenceOf[Piece], early: Callable[[], None]) -> tuple[Tensor, tuple[Scored, ...]]:
        """Logits of those that sample, and the prompts' own tokens scored."""
        device, found = self._state.device, spans(prompts)
        plan = prompt_rows(prompts, self._cache.layout.block_size)
        index = [upload(plan.sample_rows, device), *(span.rows.to(device) for span in found)]
        token_ids, positions, slots = (
            upload(column, device) for column in (plan.token_ids, plan.positions, plan.slots)
        )
        rows = Rows(token_ids, positions, slots, torch.cat(index))
        x = self._model(rows, self._cache, self._attention.of_prompts(plan), early, self.chunks.advance(rows))
        sampled, *scored = x.split([len(part) for part in index])
        return self._model.head(sampled), score(found, (self._model.head(part).float().cpu() for part in scored))

    def _draw_prompts(self, logits: Tensor, first: int, greedy: bool) -> None:
        state, last = self._state, first + len(logits)
        if last > first:
            self._drawer(
                logits, state.draw_inputs(first, last), state.drawn[first:last], state.logprobs[first:last], greedy
            )
