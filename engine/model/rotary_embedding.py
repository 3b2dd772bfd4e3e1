"""Rotary position embedding as complex rotations (Su et al. 2021).

With Llama 3's frequency scaling, or YaRN's; and what layers without it do to q.
"""

import math
from typing import Protocol

import torch

from models.config import ModelConfig, RopeScaling, YarnScaling


class RotaryConfig(Protocol):
    """What rope takes of a configuration: a model's, or a draft head's."""

    @property
    def head_dim(self) -> int: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def rope_scaling(self) -> RopeScaling | YarnScaling | None: ...


def rope_frequencies(config: RotaryConfig, num_positions: int) -> torch.Tensor:
    """Return the rotation of each pair at each position.

    `[num_positions, head_dim / 2]` complex64: the rotation of each pair at each position, computed in float64; with
    YaRN it stretches too, by the attention factor.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    inverse = config.rope_theta**-exponents
    length = 1.0
    if isinstance(config.rope_scaling, YarnScaling):
        inverse, length = _scale_yarn(inverse, config), config.rope_scaling.attention_factor
    elif config.rope_scaling:
        inverse = config.rope_scaling.scaled(inverse)
    # float32 from here on, as the models were trained: at position 8000 the rounding of the angle is visible.
    angles = torch.arange(num_positions).float()[:, None] * inverse.float()
    return torch.polar(torch.full_like(angles, length), angles)


def attention_temperatures(config: ModelConfig, num_positions: int) -> torch.Tensor | None:
    """`[num_positions]` float32: what q is multiplied by in unturned layers.

    None where that is 1 everywhere.
    """
    if config.attention_temperature is None:
        return None
    positions = torch.arange(num_positions).float()
    return (
        torch.log1p(torch.floor((positions + 1) / config.attention_temperature.floor))
        * config.attention_temperature.scale
        + 1
    )


def _scale_yarn(inverse: torch.Tensor, config: RotaryConfig) -> torch.Tensor:
    """Keep dimensions up to `low`, divide from `high` on, interpolate between (Peng et al. 2023, 3.2)."""
    scaling = config.rope_scaling
    assert isinstance(scaling, YarnScaling)

    def dimension(turns: float) -> float:
        """The one that turns so often over the original context."""
        ratio = math.log(scaling.original_max_position / (turns * 2 * math.pi))
        return config.head_dim * ratio / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    width = high - low or 0.001
    divided = ((torch.arange(len(inverse), dtype=inverse.dtype) - low) / width).clamp(0, 1)
    return inverse / scaling.factor * divided + inverse * (1 - divided)
