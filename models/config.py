"""What a decoder-only transformer is made of, in one vocabulary for every file format."""

import math
from dataclasses import dataclass
from typing import Any, TypeVar

Array = TypeVar("Array", bound=Any)
"""An array of numpy or of torch."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (Hugging Face rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def scaled(self, frequencies: Array) -> Array:
        """Stretch long wavelengths by `factor`, keep short ones, interpolate between (Llama 3.1 model card)."""
        wavelengths: Any = 2 * math.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        smooth = ((self.original_max_position / wavelengths - low) / (high - low)).clip(0, 1)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


@dataclass(frozen=True)
class YarnScaling:
    """The scaling of YaRN (Peng et al. 2023).

    Frequencies that turn fewer than `beta_slow` times over the original context are divided by `factor`, those above
    `beta_fast` kept; q and k are both multiplied by `attention_factor`. `truncate`: the bounds between are whole
    dimensions.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True)
class Experts:
    """A mixture in place of the MLP, but for `dense_layers`.

    Each token goes through `top_k` of `count` experts of `intermediate_size`. `renormalize`: what they are weighed by
    adds up to 1.

    `as_gpt_oss`: its biases, its clamped SwiGLU, and all experts of a layer in one tensor; `is_mxfp4`: these are so.
    `as_llama4`: a sigmoid of its score multiplies what goes into a token's one expert, and each token goes through a
    shared expert of that size too.
    """

    count: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    dense_layers: tuple[int, ...] = ()
    as_gpt_oss: bool = False
    is_mxfp4: bool = False
    as_llama4: bool = False


@dataclass(frozen=True)
class AttentionTemperature:
    """The growth of attention's temperature over long texts (Nakanishi 2025, as Llama 4 has it).

    Q at `position` is multiplied by 1 + `scale` * log(1 + floor((position + 1) / `floor`)).
    """

    floor: float
    scale: float


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one model.

    `family` names a file in models/; `max_model_len` is in tokens; `intermediate_size` is that of layers without
    experts. Tokens of `windowed_layers` see the newest `window` tokens, themselves included, or, where `segment` is
    there, those that came since its last multiple. `sinks`: each head has a logit that no token owns.

    Rope leaves `unturned_layers` alone, whose q are scaled by `tuning`. `plain_qk_norm`: q and k of the others are
    normalised without gains.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_model_len: int
    tied_embeddings: bool
    rope_scaling: RopeScaling | YarnScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    output_bias: bool = False
    sinks: bool = False
    window: int = 0
    windowed_layers: tuple[int, ...] = ()
    segment: int = 0
    no_rope_layers: tuple[int, ...] = ()
    attention_temperature: AttentionTemperature | None = None
    plain_qk_norm: bool = False

    def spreads_kv_heads(self, num_gpus: int) -> bool:
        """Whether so many GPUs can have equal parts of the KV heads: some each, or several of them one."""
        return self.num_kv_heads % num_gpus == 0 or num_gpus % self.num_kv_heads == 0

    def experts_of(self, layer: int) -> Experts | None:
        """None where the layer has one MLP for all tokens."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts
