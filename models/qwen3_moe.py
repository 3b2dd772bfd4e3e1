"""Qwen3-MoE (Yang et al. 2025), as Qwen3-30B-A3B: Qwen3 with a mixture of experts in place of the MLP."""

from typing import Any

from models.config_fields import EXPERT_TENSORS, gguf_mixture, mixture
from models.family import Family, GgufForm


def qwen3_moe_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig."""
    renormalize = bool(config.get("norm_topk_prob", False))
    return {"experts": mixture(config, source, config["moe_intermediate_size"], renormalize)}


def qwen3_moe_gguf_fields(metadata: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig."""
    return {"experts": gguf_mixture(metadata, source, renormalize=True)}


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    "qwen3moe",
    read=qwen3_moe_fields,
    gguf=GgufForm(qwen3_moe_gguf_fields, expert_tensors=EXPERT_TENSORS),
    qk_norm=True,
    window=4096,
    switches_window=True,
)
