"""Mistral (Jiang et al. 2023), in the versions without a sliding window. Its GGUF files say "llama"."""

from models.family import Family

FAMILY = Family("MistralForCausalLM", "mistral", window=4096)
