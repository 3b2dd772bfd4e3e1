"""Qwen3-MoE (Yang et al. 2025), as Qwen3-30B-A3B: Qwen3 with a mixture of experts in place of the MLP."""

from models.family import Family

FAMILY = Family("Qwen3MoeForCausalLM", "qwen3moe", qk_norm=True, experts=True, window=4096, switches_window=True)
