"""Qwen2 and Qwen2.5 (Yang et al. 2024): biases on q, k and v."""

from models.family import Family, GgufForm

FAMILY = Family(
    "Qwen2ForCausalLM", "qwen2", gguf=GgufForm(), qkv_bias=True, window=4096, switches_window=True, first_window=28
)
