"""The decoder-only transformer that all families share.

RMSNorm, rotary attention with grouped KV heads, an MLP.

Rows of q and k are interleaved (real and imaginary part of a rotary pair side by side), so that rope is one complex
multiplication. Norm gains and sqrt(hidden) are folded into the weights that follow.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.cpu.attention import attend
from engine.cpu.batch_inputs import Inputs, LogitRows
from engine.cpu.decoder_layer import CpuLayerWeights, Residual
from engine.cpu.grouped_cache import AnyKVCache
from engine.cpu.head_projection import HeadProjection, Projection
from engine.cpu.head_shape import head_shape
from engine.cpu.linear import Linear
from engine.cpu.lora import LayerLora, LoraRows
from engine.cpu.recurrent_layer import RecurrentMixer
from engine.cpu.rotary_turns import RotaryTurns, RowTurns
from models.config import ModelConfig

Ends = Callable[[torch.Tensor, int], torch.Tensor]
"""(rows, how many of them, the first, are answers') -> what leaves the last layer there, `[len(rows), hidden]`."""


@dataclass(frozen=True)
class DecoderWeights:
    """The weights of a whole model.

    `final_gain` is the final norm's, times what logits are multiplied by; `state_gain` is the norm's alone.
    """

    embedding: torch.Tensor
    layers: tuple[CpuLayerWeights, ...]
    final_gain: torch.Tensor | None
    head: Linear
    state_gain: torch.Tensor


@dataclass(frozen=True)
class Logits:
    """`sampled` `[len(sample_rows), vocab]` float32.

    `scored` computes the parts of `score_rows` as it is read. `aux`: `[M, hidden]` float32 of each of the aux layers,
    what goes into it. `hidden` `[len(sample_rows), hidden]` float32: the rows behind the final norm, if wanted; of a
    classifier its logits.
    """

    sampled: torch.Tensor
    scored: Iterator[torch.Tensor]
    aux: tuple[torch.Tensor, ...] = ()
    hidden: torch.Tensor | None = None


class Decoder:
    """Computes logits and writes K and V into the paged cache.

    `aux_layers`: the layers whose inputs a draft head reads; the number of layers stands for what comes out of the
    last, behind the final norm.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, max_model_len: int, aux_layers: tuple[int, ...] = ()
    ) -> None:
        self.heads = head_shape(config)
        self._weights, self._aux_layers = weights, aux_layers
        self._residual, self._turns = Residual(config), RotaryTurns(config, max_model_len)
        self._embedding_scale, self._is_classifier = config.multipliers.embedding, config.num_labels > 0

    @torch.inference_mode()
    def forward(
        self, inputs: Inputs, cache: AnyKVCache, wants_hidden: bool = False, lora: LoraRows | None = None
    ) -> Logits:
        """Writes K and V of all rows. `lora`: which of them adapters change, if any."""
        x = self._weights.embedding[inputs.token_ids_M]
        if self._embedding_scale != 1:
            x = x * self._embedding_scale
        turns = self._turns.at(inputs.positions_M)
        *layers, last = self._weights.layers
        aux: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(layers):
            if index in self._aux_layers:
                aux[index] = x
            own = None if lora is None else LayerLora(lora, index)
            mixed = self._mix(layer, x, turns, inputs, cache, index, own)
            x = self._residual.behind(layer, x, mixed, inputs.num_answer_rows, own)
        if len(layers) in self._aux_layers:
            aux[len(layers)] = x
        own = None if lora is None else LayerLora(lora, len(layers))
        # Only rows whose logits are wanted go past the last K and V: 3 % of a prompt's work, and all of the head's.
        is_whole = len(layers) + 1 in self._aux_layers
        left = None if is_whole else inputs.logit_rows
        mixed = self._mix(last, x, turns, inputs, cache, len(layers), own, left)
        if is_whole:
            ends, aux[len(layers) + 1] = self._all_ends(x, mixed, inputs, own)
        else:
            ends = self._wanted_ends(x, mixed, left, own)
        sampled = ends(inputs.sample_rows, inputs.num_answer_samples)
        logits = self._logits(sampled)
        return Logits(
            logits,
            (self._logits(ends(rows, 0)) for rows in inputs.score_rows),
            tuple(aux[index] for index in self._aux_layers),
            self._pooled(sampled, logits) if wants_hidden else None,
        )

    def _pooled(self, ends: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return what is told of whole texts: rows behind the final norm, or a classifier's logits."""
        return logits if self._is_classifier else self._state(ends)

    def _wanted_ends(
        self, x: torch.Tensor, mixed: torch.Tensor, left: LogitRows | None, lora: LayerLora | None
    ) -> Ends:
        """Return what computes the last layer's end, of the rows that are `left`."""
        last = self._weights.layers[-1]
        if left is not None:
            x, lora = x.index_select(0, left.rows), None if lora is None else lora.at(left.rows)

        @torch.inference_mode()
        def ends(rows: torch.Tensor, num_answer_rows: int) -> torch.Tensor:
            wanted, of_them = x.index_select(0, rows), mixed.index_select(0, rows)
            own = None if lora is None else lora.at(rows)
            return self._residual.behind(last, wanted, of_them, num_answer_rows, own)

        return ends

    def _all_ends(
        self, x: torch.Tensor, mixed: torch.Tensor, inputs: Inputs, lora: LayerLora | None
    ) -> tuple[Ends, torch.Tensor]:
        """Return what picks rows of the last layer's end, and all of them behind the final norm.

        The latter are `[M, hidden]`.
        """
        last = self._weights.layers[-1]
        whole = self._residual.behind(last, x, mixed, inputs.num_answer_rows, lora)
        wanted = whole if inputs.logit_rows is None else whole.index_select(0, inputs.logit_rows.rows)
        return lambda rows, _: wanted.index_select(0, rows), self._state(whole)

    def _state(self, ends: torch.Tensor) -> torch.Tensor:
        """Return rows behind the final norm, float32."""
        return self._residual.norm(ends, self._weights.state_gain).float()

    @torch.inference_mode()
    def _logits(self, ends: torch.Tensor) -> torch.Tensor:
        """`[len(ends), vocab]` float32."""
        return self._weights.head(self._residual.norm(ends, self._weights.final_gain)).float()

    def _mix(
        self,
        layer: CpuLayerWeights,
        x: torch.Tensor,
        turns: RowTurns,
        inputs: Inputs,
        cache: AnyKVCache,
        index: int,
        lora: LayerLora | None,
        left: LogitRows | None = None,
    ) -> torch.Tensor:
        """`[rows, H * D]` before the output projection; K and V, or states, of all rows are written.

        `left`: the rows that are wanted, if not all.
        """
        normed = self._residual.before(x, layer.attention_gain)
        if isinstance(layer.projection, RecurrentMixer):
            assert inputs.states is not None, "the cache has no states"
            mixed = layer.projection(normed, inputs.num_answer_rows, inputs.states, index).to(cache.dtype)
            return mixed if left is None else mixed.index_select(0, left.rows)
        q = self._queries(layer, layer.projection, normed, turns, inputs, cache, index, lora)
        gate = None if layer.output_gate is None else layer.output_gate(normed, inputs.num_answer_rows).float()
        attention = inputs.attention
        if left is not None:
            q, attention = q.index_select(0, left.rows), left.attention
            gate = None if gate is None else gate.index_select(0, left.rows)
        mixed = attend(q, cache.pages(index), attention.of(layer.has_window), self.heads, layer.sinks_KG)
        # Not torch.sigmoid, whose last few elements of a thread's share take another exponential than the others.
        return mixed if gate is None else (mixed / (1 + torch.exp(-gate))).to(cache.dtype)

    def _queries(
        self,
        layer: CpuLayerWeights,
        projection: Projection,
        normed: torch.Tensor,
        turns: RowTurns,
        inputs: Inputs,
        cache: AnyKVCache,
        index: int,
        lora: LayerLora | None,
    ) -> torch.Tensor:
        """Return the rows' queries, `[M, H, D]`, and write their K and V."""
        own = turns.of(layer.is_rotated, layer.has_window)
        if lora is None:
            q, kv = projection(normed, own, inputs.num_answer_rows, cache.dtype)
        else:
            assert isinstance(projection, HeadProjection), "an adapter of latent attention was loaded"
            q, kv = projection(normed, own, inputs.num_answer_rows, cache.dtype, lora)
        # In words of 8 bytes, since index_copy_ goes element by element: a third of the time in bfloat16. In
        # words of 4 where those of 8 don't make up a head.
        word = torch.int64 if self.heads.head_dim % 4 == 0 else torch.int32
        words = kv.reshape(-1, self.heads.head_dim).view(word)
        rows = cache.rows(index).view(word)
        rows.index_copy_(0, inputs.write_index.of(layer.has_window), words)
        if inputs.blank_index is not None:
            rows.index_fill_(0, inputs.blank_index.of(layer.has_window), 0)
        return q
