"""An EAGLE3 head in torch, beside the decoder of the same path.

Rows of q and k are interleaved, as the decoder's. H hidden size, K KV heads, D head size, R rows of a sequence.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.cpu.eagle3.draft_cache import DraftCache
from engine.cpu.eagle3.head_attention import HeadAttention, lasts
from engine.cpu.eagle3.head_rows import HeadOutput, HeadRows
from engine.cpu.head_shape import HeadShape
from engine.cpu.linear import Linear, NumberFormat
from engine.model.rotary_embedding import rope_frequencies
from engine.model_loader.eagle3_tensors import Eagle3Tensors
from models.eagle3 import Eagle3Config


@dataclass(frozen=True)
class HeadLayer:
    """`feature_gain` is the first layer's alone, whose `qkv` takes embedding and feature side by side."""

    input_gain: torch.Tensor
    feature_gain: torch.Tensor | None
    qkv: Linear
    q_gain: torch.Tensor | None
    k_gain: torch.Tensor | None
    output: Linear
    mlp_gain: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class HeadWeights:
    """`aux_gains`: of all aux rows as one, or of each; `fc` fuses them."""

    aux_gains: tuple[torch.Tensor, ...]
    fc: Linear
    embedding: torch.Tensor
    layers: tuple[HeadLayer, ...]
    final_gain: torch.Tensor
    output: Linear


class TorchEagle3Head:
    """See engine.cpu.eagle3.head_rows.DraftingHead."""

    def __init__(
        self, config: Eagle3Config, weights: HeadWeights, targets: np.ndarray, cache: DraftCache, max_model_len: int
    ) -> None:
        self.config, self.targets = config, targets
        self._weights, self._attention = weights, HeadAttention(_shape(config), cache.kv)
        self._rope_TD = rope_frequencies(config, max_model_len)

    @torch.inference_mode()
    def fuse(self, aux_MA: torch.Tensor) -> torch.Tensor:
        gains = self._weights.aux_gains
        if gains:
            parts = aux_MA.chunk(len(gains), 1)
            aux_MA = torch.cat([self._norm(part, gain) for part, gain in zip(parts, gains, strict=True)], 1)
        return self._weights.fc(aux_MA).float()

    @torch.inference_mode()
    def write(self, rows: HeadRows) -> None:
        x = rows.features_MH
        for index in range(self.config.num_layers - 1):
            x = self._layer(index, x, rows)
        self._queries(self.config.num_layers - 1, x, rows)

    @torch.inference_mode()
    def forward(self, rows: HeadRows) -> HeadOutput:
        x, last = rows.features_MH, self.config.num_layers - 1
        for index in range(last):
            x = self._layer(index, x, rows)
        residual, q_MHD = self._queries(last, x, rows)
        ends = torch.from_numpy(rows.lasts_S)
        x = self._finished(last, residual[ends], q_MHD[ends], lasts(rows))
        normed = self._norm(x, self._weights.final_gain)
        return HeadOutput(self._weights.output(normed).float(), normed if self.config.norm_output else x)

    def _layer(self, index: int, x: torch.Tensor, rows: HeadRows) -> torch.Tensor:
        return self._finished(index, *self._queries(index, x, rows), rows)

    def _finished(self, index: int, residual: torch.Tensor, q_MHD: torch.Tensor, rows: HeadRows) -> torch.Tensor:
        """Return what leaves the layer of rows whose K and V are written, as those of all rows before them."""
        layer = self._weights.layers[index]
        x = residual + layer.output(self._attention.attend(q_MHD, index, rows))
        gate, up = layer.gate_up(self._norm(x, layer.mlp_gain)).float().chunk(2, 1)
        return x + layer.down(F.silu(gate) * up)

    def _queries(self, index: int, x: torch.Tensor, rows: HeadRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the layer adds to and the rows' queries `[M, heads, D]`; write their K and V."""
        layer, config = self._weights.layers[index], self.config
        residual, normed = x, self._norm(x, layer.input_gain if layer.feature_gain is None else layer.feature_gain)
        if layer.feature_gain is not None:
            residual = normed if config.norm_before_residual else x
            embedded = self._weights.embedding[torch.from_numpy(rows.tokens_M)].float()
            normed = torch.cat([self._norm(embedded, layer.input_gain), normed], 1)
        qkv_MHD = layer.qkv(normed).float().view(len(x), -1, config.head_dim)
        q, k, v = qkv_MHD.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
        if layer.q_gain is not None and layer.k_gain is not None:
            q, k = self._norm(q, layer.q_gain), self._norm(k, layer.k_gain)
        positions = torch.from_numpy(rows.slots_M) - 1  # a row's position is that of its feature
        turns = self._rope_TD[positions][:, None]
        self._attention.write(index, torch.cat([_turned(k, turns), v], 1), rows)
        return residual, _turned(q, turns)

    def _norm(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (len(gain),), gain, self.config.norm_eps)


def _shape(config: Eagle3Config) -> HeadShape:
    return HeadShape(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)


def _turned(x_MHD: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x_MHD.reshape(*x_MHD.shape[:2], -1, 2).contiguous())
    return torch.view_as_real(pairs * turns).flatten(2)


def load_torch_head(
    tensors: Eagle3Tensors, number_format: NumberFormat, cache: DraftCache, embedding: torch.Tensor, max_model_len: int
) -> TorchEagle3Head:
    """Return the head, its matrices as the format has the model's output head. `embedding`: the target's."""
    config, pack = tensors.config, number_format.head
    aux_gains: tuple[torch.Tensor, ...] = ()
    if config.norm_before_fc:
        aux_gains = (tensors.gain("input_norm"),)
    if config.fc_norm:
        aux_gains = tuple(tensors.gain(f"fc_norm.{index}") for index in range(len(config.aux_layers)))
    own = tensors.own_embedding()
    weights = HeadWeights(
        aux_gains=aux_gains,
        fc=pack(tensors.tensor("fc.weight"), None),
        embedding=embedding if own is None else own,
        layers=tuple(_load_layer(tensors, index, number_format) for index in range(config.num_layers)),
        final_gain=tensors.gain("norm"),
        output=pack(tensors.output(), None),
    )
    return TorchEagle3Head(config, weights, tensors.targets(), cache, max_model_len)


def _load_layer(tensors: Eagle3Tensors, index: int, number_format: NumberFormat) -> HeadLayer:
    pack, prefix = number_format.head, f"layers.{index}."
    parts = [tensors.projection(index, name) for name in "qkv"]
    biases = [bias for _, bias in parts if bias is not None]
    gate, up = (tensors.tensor(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up"))
    return HeadLayer(
        input_gain=tensors.gain(prefix + "input_layernorm"),
        feature_gain=tensors.gain(prefix + "hidden_norm") if index == 0 else None,
        qkv=pack(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None),
        q_gain=tensors.head_gain(index, "q"),
        k_gain=tensors.head_gain(index, "k"),
        output=pack(*tensors.projection(index, "o")),
        mlp_gain=tensors.gain(prefix + "post_attention_layernorm"),
        gate_up=pack(torch.cat([gate, up]), None),
        down=pack(tensors.tensor(prefix + "mlp.down_proj.weight"), None),
    )
