"""What sets one family of decoder-only transformers apart from the others."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """`architecture` as in config.json; `gguf_architecture` as in a GGUF file.

    `qkv_bias`: q, k and v have one. `qk_norm`: q and k of each head are normalised before rope. `experts`: layers have
    mixtures of them. `as_gpt_oss`: and its attention: sinks, windows, biases. `as_llama4`: what
    models.llama4 reads. `rope_theta`, `head_dim`, `window`, `first_window`: where config.json does not say, as in
    transformers; `head_dim` is None where it follows from the hidden size.

    `window` is None where the family has none. `switches_window`: only where config.json says
    use_sliding_window. `first_window`: only layers from max_window_layers on, or of their kind in layer_types.
    """

    architecture: str
    gguf_architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    as_gpt_oss: bool = False
    as_llama4: bool = False
    rope_theta: float = 10000.0
    head_dim: int | None = None
    window: int | None = None
    switches_window: bool = False
    first_window: int | None = None
