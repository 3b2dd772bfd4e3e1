"""Llama 2 and 3, SmolLM2, and others that call themselves Llama (Touvron et al. 2023)."""

from checkpoint.families.family import Family

FAMILY = Family("LlamaForCausalLM", "llama")
