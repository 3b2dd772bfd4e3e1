"""The decoder-only transformer that all families share.

RMSNorm, rotary attention with grouped KV heads, an MLP.

Rows of q and k are interleaved (real and imaginary part of a rotary pair side by side), so that rope is one complex
multiplication. Norm gains and sqrt(hidden) are folded into the weights that follow.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.cpu.attention import attend
from engine.cpu.batch_inputs import AttentionPlans, Inputs
from engine.cpu.grouped_cache import AnyKVCache
from engine.cpu.head_projection import Projection
from engine.cpu.head_shape import HeadShape
from engine.cpu.latent_attention import LatentOutput
from engine.cpu.linear import Linear, PhasedLinear
from engine.cpu.mlp import CpuMlp
from engine.cpu.norms import RmsNorm
from engine.model.rotary_embedding import attention_temperatures, rope_frequencies, rotations
from models.config import ModelConfig, NormPlacement


@dataclass(frozen=True)
class CpuLayerWeights:
    """Gains are times sqrt(width), or None where folded into the next linear.

    `is_rotated`: by rope. The `out` gains are of norms over what attention and MLP give, where a family has such.
    """

    attention_gain: torch.Tensor | None
    projection: Projection
    output: PhasedLinear | LatentOutput
    mlp_gain: torch.Tensor | None
    mlp: CpuMlp
    sinks_KG: torch.Tensor | None = None
    has_window: bool = False
    is_rotated: bool = True
    attention_out_gain: torch.Tensor | None = None
    mlp_out_gain: torch.Tensor | None = None

    @property
    def is_uniform(self) -> bool:
        """After attention: one format for the rows of prompts and of answers."""
        return self.output.is_uniform and self.mlp.is_uniform


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
    what goes into it. `hidden` `[len(sample_rows), hidden]` float32: the rows behind the final norm, if wanted.
    """

    sampled: torch.Tensor
    scored: Iterator[torch.Tensor]
    aux: tuple[torch.Tensor, ...] = ()
    hidden: torch.Tensor | None = None


class Decoder:
    """Computes logits and writes K and V into the paged cache.

    `aux_layers`: the layers whose inputs a draft head reads.
    """

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, max_model_len: int, aux_layers: tuple[int, ...] = ()
    ) -> None:
        self.heads = HeadShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim if config.latent is None else config.latent.width,
            scale=config.attention_scale,
            window=config.window,
            segment=config.segment,
            is_biased=config.qkv_bias,
        )
        self._weights, self._aux_layers = weights, aux_layers
        self._hidden_norm = RmsNorm(config.hidden_size, config.norm_eps)
        self._is_normed_before = config.norms is not NormPlacement.AFTER
        self._embedding_scale = config.multipliers.embedding
        self._has_latents = config.latent is not None
        self._rope_TD = rope_frequencies(config, max_model_len)
        if self._has_latents:  # whose turned columns are apart from the others
            self._rope_TD = self._rope_TD[:, : config.rotary_width // 2].contiguous()
        self._window_rope_TD = None
        if config.window_rope is not None:
            self._window_rope_TD = rotations(config.window_rope, config.rotary_width, config.head_dim, max_model_len)
        self._has_no_rope = bool(config.no_rope_layers)
        self._attention_temperatures_T = attention_temperatures(config, max_model_len)

    @torch.inference_mode()
    def forward(self, inputs: Inputs, cache: AnyKVCache, wants_hidden: bool = False) -> Logits:
        """Writes K and V of all rows."""
        x = self._weights.embedding[inputs.token_ids_M]
        if self._embedding_scale != 1:
            x = x * self._embedding_scale
        turns = self._turns(inputs.positions_M)
        *layers, last = self._weights.layers
        aux: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(layers):
            if index in self._aux_layers:
                aux[index] = x
            q = self._queries(layer, x, turns.of(layer), inputs, cache, index)
            mixed = self._attend(layer, q, cache, index, inputs.attention)
            x = self._mlp(layer, x, mixed, inputs.num_answer_rows)
        if len(layers) in self._aux_layers:
            aux[len(layers)] = x
        q = self._queries(last, x, turns.of(last), inputs, cache, len(layers))
        # Only rows whose logits are wanted go past the last K and V: 3 % of a prompt's work, and all of the head's.
        attention = inputs.attention
        if inputs.logit_rows is not None:
            x, q = x.index_select(0, inputs.logit_rows.rows), q.index_select(0, inputs.logit_rows.rows)
            attention = inputs.logit_rows.attention
        mixed = self._attend(last, q, cache, len(layers), attention)
        ends = self._ends(x, mixed, inputs.sample_rows, inputs.num_answer_samples)
        return Logits(
            self._logits(ends),
            (self._logits(self._ends(x, mixed, rows, 0)) for rows in inputs.score_rows),
            tuple(aux[index] for index in self._aux_layers),
            self._hidden_norm(ends, self._weights.state_gain).float() if wants_hidden else None,
        )

    @torch.inference_mode()
    def _ends(self, x: torch.Tensor, mixed: torch.Tensor, rows: torch.Tensor, num_answer_rows: int) -> torch.Tensor:
        """What comes after the last attention, for some of its rows: `[len(rows), hidden]`."""
        last = self._weights.layers[-1]
        return self._mlp(last, x.index_select(0, rows), mixed.index_select(0, rows), num_answer_rows)

    @torch.inference_mode()
    def _logits(self, ends: torch.Tensor) -> torch.Tensor:
        """`[len(ends), vocab]` float32."""
        return self._weights.head(self._hidden_norm(ends, self._weights.final_gain)).float()

    def _queries(
        self,
        layer: CpuLayerWeights,
        x: torch.Tensor,
        rope: torch.Tensor,
        inputs: Inputs,
        cache: AnyKVCache,
        index: int,
    ) -> torch.Tensor:
        """Return the rows' queries, `[M, H, D]`, and write their K and V."""
        normed = self._before(x, layer.attention_gain)
        q, kv = layer.projection(normed, rope, inputs.num_answer_rows, cache.dtype)
        # In words of 8 bytes, since index_copy_ goes element by element: a third of the time in bfloat16. In
        # words of 4 where those of 8 don't make up a head.
        word = torch.int64 if self.heads.head_dim % 4 == 0 else torch.int32
        words = kv.reshape(-1, self.heads.head_dim).view(word)
        rows = cache.rows(index).view(word)
        rows.index_copy_(0, inputs.write_index.of(layer.has_window), words)
        if inputs.blank_index is not None:
            rows.index_fill_(0, inputs.blank_index.of(layer.has_window), 0)
        return q

    def _attend(
        self, layer: CpuLayerWeights, q: torch.Tensor, cache: AnyKVCache, index: int, attention: AttentionPlans
    ) -> torch.Tensor:
        """`[rows, H * D]` before the output projection."""
        return attend(q, cache.pages(index), attention.of(layer.has_window), self.heads, layer.sinks_KG)

    def _mlp(self, layer: CpuLayerWeights, x: torch.Tensor, mixed: torch.Tensor, num_answer_rows: int) -> torch.Tensor:
        """The rest of a layer after attention.

        Where formats differ, so does rounding between them: each phase by itself.
        """
        if 0 < num_answer_rows < len(x) and not layer.is_uniform:
            answer = self._mlp(layer, x[:num_answer_rows], mixed[:num_answer_rows], num_answer_rows)
            return torch.cat([answer, self._mlp(layer, x[num_answer_rows:], mixed[num_answer_rows:], 0)])
        x = x + self._after(layer.output(mixed, num_answer_rows), layer.attention_out_gain)
        added = layer.mlp(self._before(x, layer.mlp_gain), num_answer_rows)
        return x + self._after(added, layer.mlp_out_gain)

    def _before(self, x: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        """What attention or MLP get of the residual."""
        return self._hidden_norm(x, gain) if self._is_normed_before else x

    def _after(self, y: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        """What the residual gets of what they give."""
        return y if gain is None else self._hidden_norm(y.float(), gain)

    def _turns(self, positions_M: torch.Tensor) -> "_Turns":
        rope = self._rope(self._rope_TD, positions_M)
        windowed = rope if self._window_rope_TD is None else self._rope(self._window_rope_TD, positions_M)
        return _Turns(rope, windowed, self._no_rope(rope, positions_M) if self._has_no_rope else rope)

    def _rope(self, table_TD: torch.Tensor, positions_M: torch.Tensor) -> torch.Tensor:
        """Rotations `[M, H + 2K, D / 2]`; those of v are 1, so that one multiplication serves all of qkv.

        With latents `[M, 1, R / 2]`, of the columns of q and k that are turned.
        """
        turns = table_TD.index_select(0, positions_M)[:, None]
        if self._has_latents:
            return turns
        turns = turns.expand(-1, self.heads.num_heads + self.heads.num_kv_heads, -1)
        ones = turns.new_ones(len(positions_M), self.heads.num_kv_heads, turns.shape[2])
        return torch.cat([turns, ones], 1)

    def _no_rope(self, rope: torch.Tensor, positions_M: torch.Tensor) -> torch.Tensor:
        """The same of layers without rope: q is scaled by its position, k and v are left alone."""
        still = torch.ones_like(rope)
        if self._attention_temperatures_T is not None:
            still[:, : self.heads.num_heads] *= self._attention_temperatures_T[positions_M][:, None, None]
        return still


@dataclass(frozen=True)
class _Turns:
    """The rotations of a batch's rows by the kind of a layer, as Decoder._rope makes them."""

    whole: torch.Tensor
    windowed: torch.Tensor
    still: torch.Tensor

    def of(self, layer: CpuLayerWeights) -> torch.Tensor:
        if not layer.is_rotated:
            return self.still
        return self.windowed if layer.has_window else self.whole
