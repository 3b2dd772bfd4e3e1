"""Mistral (Jiang et al. 2023), with a sliding window or without. Its GGUF files say "llama"."""

from models.family import Family, GgufForm

FAMILY = Family("MistralForCausalLM", "mistral", gguf=GgufForm(), window=4096)
