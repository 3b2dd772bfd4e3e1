"""Rotary position embedding as complex rotations (Su et al. 2021), with Llama 3's frequency scaling."""

import math

import torch

from checkpoint.config import ModelConfig, RopeScaling


def rope_frequencies(config: ModelConfig, num_positions: int) -> torch.Tensor:
    """`[num_positions, head_dim / 2]` complex64: the rotation of each pair at each position, computed in float64."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    inverse = config.rope_theta**-exponents
    if config.rope_scaling:
        inverse = _scale_llama3(inverse, config.rope_scaling)
    # float32 from here on, as the models were trained: at position 8000 the rounding of the angle is visible.
    angles = torch.arange(num_positions).float()[:, None] * inverse.float()
    return torch.polar(torch.ones_like(angles), angles)


def _scale_llama3(inverse: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1 model
    card).
    """
    wavelength = 2 * math.pi / inverse
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_max_position / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / scaling.factor + smooth * inverse
