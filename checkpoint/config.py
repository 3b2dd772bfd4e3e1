"""What a decoder-only transformer is made of, in one vocabulary for every file format."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (Hugging Face rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one model. `family` names a file in checkpoint/families; `max_model_len` is in tokens."""

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
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
