"""A layer for multi-token prediction that drafts (DeepSeek-V3, DeepSeek-AI 2024, 2.2).

It is a layer of the model behind the others. What goes into it of a token is its embedding beside the row of the token
before, as it leaves the model or, behind a guess, this layer; each with a norm, and a product makes one row of both.
Embedding and output head are the model's.
"""

from dataclasses import dataclass

import numpy as np
import torch

from engine.cpu.decoder_layer import CpuLayerWeights, Residual
from engine.cpu.eagle3.head_attention import HeadAttention, lasts
from engine.cpu.eagle3.head_rows import HeadOutput, HeadRows
from engine.cpu.head_shape import head_shape
from engine.cpu.kv_cache import KVCache
from engine.cpu.linear import Linear
from engine.cpu.recurrent_layer import RecurrentMixer
from engine.cpu.rotary_turns import RotaryTurns
from models.config import ModelConfig


@dataclass(frozen=True)
class MtpWeights:
    """Gains are times sqrt(hidden). `join` takes embedding and row side by side, `[M, 2 * hidden]`."""

    embedding: torch.Tensor
    embedding_gain: torch.Tensor
    row_gain: torch.Tensor
    join: Linear
    layer: CpuLayerWeights
    final_gain: torch.Tensor
    head: Linear


class MtpHead:
    """See engine.cpu.eagle3.head_rows.DraftingHead. All rows are computed in the formats of answers."""

    def __init__(self, config: ModelConfig, weights: MtpWeights, cache: KVCache, max_model_len: int) -> None:
        self.targets = np.arange(config.vocab_size)
        self._weights, self._attention = weights, HeadAttention(head_shape(config), cache)
        self._residual, self._turns = Residual(config), RotaryTurns(config, max_model_len)

    def fuse(self, aux_MA: torch.Tensor) -> torch.Tensor:
        """Return the rows as they are: they come behind the model's final norm."""
        return aux_MA

    @torch.inference_mode()
    def write(self, rows: HeadRows) -> None:
        self._queries(rows)

    @torch.inference_mode()
    def forward(self, rows: HeadRows) -> HeadOutput:
        x, q_MHD = self._queries(rows)
        ends, layer = torch.from_numpy(rows.lasts_S), self._weights.layer
        mixed = self._attention.attend(q_MHD[ends], 0, lasts(rows))
        x = self._residual.behind(layer, x[ends], mixed, len(ends))
        normed = self._residual.norm(x, self._weights.final_gain)
        return HeadOutput(self._weights.head(normed).float(), normed.float())

    def _queries(self, rows: HeadRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what goes into the layer and the rows' queries, `[M, H, D]`; write what is kept of them."""
        weights, norm = self._weights, self._residual.norm
        embedded = norm(weights.embedding[torch.from_numpy(rows.tokens_M)].float(), weights.embedding_gain)
        before = norm(rows.features_MH, weights.row_gain)
        x = weights.join(torch.cat([embedded, before], 1)).float()
        turns = self._turns.at(torch.from_numpy(rows.slots_M) - 1).whole  # a row's position is that of its feature
        normed = self._residual.before(x, weights.layer.attention_gain)
        assert not isinstance(weights.layer.projection, RecurrentMixer), "the layer attends"
        q_MHD, kept = weights.layer.projection(normed, turns, len(x), self._attention.dtype)
        self._attention.write(0, kept, rows)
        return x, q_MHD
