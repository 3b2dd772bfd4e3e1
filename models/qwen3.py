"""Qwen3 (Yang et al. 2025), dense: q and k of each head are normalised."""

from models.family import Family

FAMILY = Family(
    "Qwen3ForCausalLM", "qwen3", qk_norm=True, head_dim=128, window=4096, switches_window=True, first_window=28
)
