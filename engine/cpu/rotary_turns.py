"""The rotations of a batch's rows, as the layers of a decoder take them."""

from dataclasses import dataclass

import torch

from engine.model.rotary_embedding import attention_temperatures, rope_frequencies, rotations
from models.config import ModelConfig


@dataclass(frozen=True)
class RowTurns:
    """The rotations of rows by the kind of a layer, as RotaryTurns makes them."""

    whole: torch.Tensor
    windowed: torch.Tensor
    still: torch.Tensor

    def of(self, is_rotated: bool, has_window: bool) -> torch.Tensor:
        if not is_rotated:
            return self.still
        return self.windowed if has_window else self.whole


class RotaryTurns:
    """The rotations of positions below `max_model_len`: H heads, K KV heads, D columns of a head."""

    def __init__(self, config: ModelConfig, max_model_len: int) -> None:
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._has_latents = config.latent is not None
        self._rope_TD = rope_frequencies(config, max_model_len)
        if self._has_latents:  # whose turned columns are apart from the others
            self._rope_TD = self._rope_TD[:, : config.rotary_width // 2].contiguous()
        self._window_rope_TD = None
        if config.window_rope is not None:
            self._window_rope_TD = rotations(config.window_rope, config.rotary_width, config.head_dim, max_model_len)
        self._has_no_rope = bool(config.no_rope_layers)
        self._attention_temperatures_T = attention_temperatures(config, max_model_len)

    def at(self, positions_M: torch.Tensor) -> RowTurns:
        rope = self._rope(self._rope_TD, positions_M)
        windowed = rope if self._window_rope_TD is None else self._rope(self._window_rope_TD, positions_M)
        return RowTurns(rope, windowed, self._no_rope(rope, positions_M) if self._has_no_rope else rope)

    def _rope(self, table_TD: torch.Tensor, positions_M: torch.Tensor) -> torch.Tensor:
        """Rotations `[M, H + 2K, D / 2]`; those of v are 1, so that one multiplication serves all of qkv.

        With latents `[M, 1, R / 2]`, of the columns of q and k that are turned.
        """
        turns = table_TD.index_select(0, positions_M)[:, None]
        if self._has_latents:
            return turns
        turns = turns.expand(-1, self._num_heads + self._num_kv_heads, -1)
        ones = turns.new_ones(len(positions_M), self._num_kv_heads, turns.shape[2])
        return torch.cat([turns, ones], 1)

    def _no_rope(self, rope: torch.Tensor, positions_M: torch.Tensor) -> torch.Tensor:
        """The same of layers without rope: q is scaled by its position, k and v are left alone."""
        still = torch.ones_like(rope)
        if self._attention_temperatures_T is not None:
            still[:, : self._num_heads] *= self._attention_temperatures_T[positions_M][:, None, None]
        return still
