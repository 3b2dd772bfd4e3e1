"""Rotary position embedding as complex rotations (Su et al. 2021).

With the scalings of its frequencies; and what layers without it do to q.
"""

import math
from typing import Protocol

import torch

from models.config import (
    FrequencyScaling,
    LinearScaling,
    LongRopeScaling,
    ModelConfig,
    Rope,
    RopeScaling,
    YarnScaling,
)


class RotaryConfig(Protocol):
    """What rope takes of a configuration: a model's, or a draft head's."""

    @property
    def head_dim(self) -> int: ...

    @property
    def rotary_width(self) -> int: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def rope_scaling(self) -> FrequencyScaling | None: ...


def rope_frequencies(config: RotaryConfig, num_positions: int) -> torch.Tensor:
    """Return the rotations of a model's heads, `[num_positions, head_dim / 2]` complex64."""
    rope = Rope(config.rope_theta, config.rope_scaling)
    return rotations(rope, config.rotary_width, config.head_dim, num_positions)


def rotations(rope: Rope, width: int, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return the rotation of each pair at each position, `[num_positions, head_dim / 2]` complex64.

    It is computed in float64; with YaRN and LongRoPE it stretches too, by the attention factor. Only the first `width`
    columns of a head are turned.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    inverse, length = _scaled(rope.theta**-exponents, rope, width)
    # float32 from here on, as the models were trained: at position 8000 the rounding of the angle is visible.
    angles = torch.arange(num_positions).float()[:, None] * inverse.float()
    turned = torch.polar(torch.full_like(angles, length), angles)
    if width == head_dim:
        return turned
    return torch.cat([turned, turned.new_ones(num_positions, (head_dim - width) // 2)], 1)


def _scaled(inverse: torch.Tensor, rope: Rope, width: int) -> tuple[torch.Tensor, float]:
    """Return the frequencies as the scaling has them, and what it multiplies q and k by."""
    match rope.scaling:
        case None:
            return inverse, 1.0
        case YarnScaling() as yarn:
            return _scale_yarn(inverse, yarn, rope.theta, width), yarn.attention_factor
        case RopeScaling() as llama3:
            return llama3.scaled(inverse), 1.0
        case LinearScaling(factor):
            return inverse / factor, 1.0
        case LongRopeScaling() as longrope:
            assert longrope.short_factors == longrope.long_factors, "the model was not asked for a context"
            return inverse / torch.tensor(longrope.long_factors, dtype=torch.float64), longrope.attention_factor


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


def _scale_yarn(inverse: torch.Tensor, scaling: YarnScaling, theta: float, width: int) -> torch.Tensor:
    """Keep dimensions up to `low`, divide from `high` on, interpolate between (Peng et al. 2023, 3.2)."""

    def dimension(turns: float) -> float:
        """The one that turns so often over the original context."""
        ratio = math.log(scaling.original_max_position / (turns * 2 * math.pi))
        return width * ratio / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    between = high - low or 0.001
    divided = ((torch.arange(len(inverse), dtype=inverse.dtype) - low) / between).clamp(0, 1)
    return inverse / scaling.factor * divided + inverse * (1 - divided)
