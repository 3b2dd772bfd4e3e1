"""Qwen3 (Yang et al. 2025), dense: q and k of each head are normalised."""

from models.family import Family, GgufForm

FAMILY = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    gguf=GgufForm(),
    qk_norm=True,
    head_dim=128,
    window=4096,
    switches_window=True,
    first_window=28,
)
