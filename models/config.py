"""What a decoder-only transformer is made of, in one vocabulary for every file format."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
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
class LinearScaling:
    """The scaling that divides all frequencies by `factor`."""

    factor: float


@dataclass(frozen=True)
class LongRopeScaling:
    """The scaling of LongRoPE (Ding et al. 2024): each frequency is divided by a factor of its own.

    Those in `short_factors` are for contexts of up to `original_max_position` tokens, those in `long_factors` for
    longer ones. q and k are both multiplied by `attention_factor`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float

    def for_context(self, num_tokens: int) -> "LongRopeScaling":
        """Return the same with the factors of such contexts alone.

        Cached keys are of one kind, so that a worker that may reach the longer contexts takes their factors for all.
        """
        factors = self.long_factors if num_tokens > self.original_max_position else self.short_factors
        return replace(self, short_factors=factors, long_factors=factors)


FrequencyScaling = RopeScaling | YarnScaling | LinearScaling | LongRopeScaling


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a kind of layer: its base, and what scales its frequencies."""

    theta: float
    scaling: FrequencyScaling | None = None


class Activation(StrEnum):
    """What an MLP does to its gate."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


class ExpertScoring(StrEnum):
    """What makes scores of a router's products."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class NormPlacement(StrEnum):
    """The places of a layer's norms: before attention and MLP, after them, or on both sides."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"


@dataclass(frozen=True)
class Multipliers:
    """The factors of a model beside its matrices.

    `embedding` multiplies what goes into the first layer, `residual` what attention and MLP add, `logits` what comes
    out of the head, `attention` the scores; None: one over the root of a head's width.
    """

    embedding: float = 1.0
    residual: float = 1.0
    attention: float | None = None
    logits: float = 1.0


class AttentionKind(StrEnum):
    """What a token sees in a layer: all before it, the newest, those of its segment, or a state."""

    FULL = "full"
    WINDOW = "window"
    CHUNKED = "chunked"
    RECURRENT = "recurrent"


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model.

    `rope` is None where positions turn nothing.
    """

    attention: AttentionKind
    rope: Rope | None


@dataclass(frozen=True)
class Experts:
    """A mixture in place of the MLP, but for `dense_layers`.

    Each token goes through `top_k` of `count` experts of `intermediate_size`. `renormalize`: what they are weighed by
    adds up to 1.

    `as_gpt_oss`: its biases, its clamped SwiGLU, and all experts of a layer in one tensor; `is_mxfp4`: these are so.
    `as_llama4`: a sigmoid of its score multiplies what goes into a token's one expert, and each token goes through a
    shared expert of that size too. `shared_size`: the width of an expert that each token goes through besides, 0 where
    there is none; `gates_shared`: times a sigmoid of its own score.

    `scoring`: by a sigmoid, each expert has a bias that counts where experts are chosen (DeepSeek-V3). They are chosen
    in the `top_groups` best of `num_groups` equal groups, and their weights are multiplied by `scale`.
    """

    count: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    dense_layers: tuple[int, ...] = ()
    as_gpt_oss: bool = False
    is_mxfp4: bool = False
    as_llama4: bool = False
    shared_size: int = 0
    gates_shared: bool = True
    scoring: ExpertScoring = ExpertScoring.SOFTMAX
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, DeepSeek-AI 2024).

    What is kept of a token is one row for all heads: a latent of `kv_rank` numbers, of which each head's key and value
    of `value_dim` are made, and a key of `rope_dim` that is turned. A head's q and k are `nope_dim` columns that are
    not turned and `rope_dim` that are. `q_rank`: the width of the latent that q is made of, 0 where there is none.
    `is_interleaved`: rows of q and k have the two parts of a rotary pair side by side.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    is_interleaved: bool = True

    @property
    def width(self) -> int:
        """The numbers of the row that is kept of a token."""
        return self.kv_rank + self.rope_dim


@dataclass(frozen=True)
class AttentionTemperature:
    """The growth of attention's temperature over long texts (Nakanishi 2025, as Llama 4 has it).

    Q at `position` is multiplied by 1 + `scale` * log(1 + floor((position + 1) / `floor`)).
    """

    floor: float
    scale: float


@dataclass(frozen=True)
class Recurrence:
    """The gated delta rule of recurrent layers (Yang et al. 2024, Gated DeltaNet).

    Each of `num_value_heads` has a matrix of `key_dim` times `value_dim`; `num_key_heads` share them out evenly.
    Queries, keys and values go through a causal convolution over `conv_width` tokens before. `as_qwen3_next`: what
    gives them is stored by key heads, and with their gates.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    as_qwen3_next: bool = False

    @property
    def group(self) -> int:
        """The value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def mixed_width(self) -> int:
        """The columns of query, key and values of one key head, which the convolution takes."""
        return 2 * self.key_dim + self.group * self.value_dim

    @property
    def state_width(self) -> int:
        """The numbers of a state that are a key head's: last inputs of the convolution, and matrices."""
        return self.mixed_width * (self.conv_width - 1) + self.group * self.key_dim * self.value_dim


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one model.

    `family` names a file in models/; `max_model_len` is in tokens; `intermediate_size` is that of layers without
    experts. Tokens of `windowed_layers` see the newest `window` tokens, themselves included, or, where `segment` is
    there, those that came since its last multiple. `sinks`: each head has a logit that no token owns.

    Rope leaves `unturned_layers` alone, whose q are scaled by `tuning`. `plain_qk_norm`: q and k of the others are
    normalised without gains. `joint_qk_norm`: q and k are normalised over all heads together.

    `num_labels`: the rows of a head that classifies texts, in place of one for tokens; 0 for none.

    `rotary_dim`: so many columns of a head are turned, 0 for all. `window_rope`: that of windowed layers, where it is
    another. `latent`: all heads share a row of it, the one KV head; `head_dim` is the width of their q. Behind the
    layers there may be weights of `num_mtp_layers` for multi-token prediction.

    `recurrent_layers` have a `recurrence` in place of attention. `output_gate`: what attention gives is multiplied by
    the sigmoid of a gate, which is projected with q.
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
    rope_scaling: FrequencyScaling | None = None
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
    joint_qk_norm: bool = False
    rotary_dim: int = 0
    window_rope: Rope | None = None
    norms: NormPlacement = NormPlacement.BEFORE
    activation: Activation = Activation.SILU
    multipliers: Multipliers = Multipliers()
    latent: LatentAttention | None = None
    num_mtp_layers: int = 0
    recurrence: Recurrence | None = None
    recurrent_layers: tuple[int, ...] = ()
    output_gate: bool = False
    num_labels: int = 0

    @property
    def kv_width(self) -> int:
        """The numbers that a layer keeps of a token: K and V of each KV head, or a latent."""
        return 2 * self.num_kv_heads * self.head_dim if self.latent is None else self.latent.width

    @property
    def num_kv_layers(self) -> int:
        """The layers that keep something of each token."""
        return self.num_layers - len(self.recurrent_layers)

    @property
    def rotary_width(self) -> int:
        """The columns of a head that are turned."""
        return self.rotary_dim or self.head_dim

    @property
    def attention_scale(self) -> float:
        """The factor of attention's scores."""
        stated = self.multipliers.attention
        return self.head_dim**-0.5 if stated is None else stated

    def layer(self, index: int) -> LayerSpec:
        """Return what one layer is made of."""
        if index in self.recurrent_layers:
            return LayerSpec(AttentionKind.RECURRENT, None)
        is_windowed, rope = index in self.windowed_layers, Rope(self.rope_theta, self.rope_scaling)
        narrow = AttentionKind.CHUNKED if self.segment else AttentionKind.WINDOW
        if is_windowed and self.window_rope is not None:
            rope = self.window_rope
        return LayerSpec(
            attention=narrow if is_windowed else AttentionKind.FULL,
            rope=None if index in self.no_rope_layers else rope,
        )

    def for_context(self, num_tokens: int) -> "ModelConfig":
        """Return the model that serves contexts of so many tokens: LongRoPE has factors by their length."""
        scaling = self.rope_scaling
        if not isinstance(scaling, LongRopeScaling):
            return self
        return replace(self, rope_scaling=scaling.for_context(num_tokens))

    def spreads_kv_heads(self, num_gpus: int) -> bool:
        """Whether so many GPUs can have equal parts of the KV heads: some each, or several of them one."""
        return self.num_kv_heads % num_gpus == 0 or num_gpus % self.num_kv_heads == 0

    def experts_of(self, layer: int) -> Experts | None:
        """None where the layer has one MLP for all tokens."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts
