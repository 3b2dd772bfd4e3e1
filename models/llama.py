"""Llama 2 and 3, SmolLM2, and others that call themselves Llama (Touvron et al. 2023)."""

from models.family import Family

FAMILY = Family("LlamaForCausalLM", "llama")
