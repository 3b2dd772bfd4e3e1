"""Llama 2 and 3, SmolLM2, and others that call themselves Llama (Touvron et al. 2023)."""

from typing import Any

from models.config_fields import EXPERT_TENSORS, gguf_mixture
from models.family import Family, GgufForm


def llama_gguf_fields(metadata: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig: Mixtral's files say "llama", too."""
    return {"experts": gguf_mixture(metadata, source, renormalize=True)}


FAMILY = Family(
    "LlamaForCausalLM", "llama", gguf=GgufForm(llama_gguf_fields, expert_tensors=EXPERT_TENSORS, interleaved=True)
)
