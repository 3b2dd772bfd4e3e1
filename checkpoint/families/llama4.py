"""Llama 4 (Meta 2025), its text part: mixtures with a shared expert, attention in segments, layers without rope."""

from checkpoint.families.family import Family

FAMILY = Family("Llama4ForCausalLM", "llama4", as_llama4=True, head_dim=128, rope_theta=500000.0)
