"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2 with a mixture in place of the MLP.

Beside it all tokens go through one expert.
"""

from typing import Any

from contracts.errors import ConfigError
from models.config_fields import EXPERT_TENSORS, gguf_mixture, mixture
from models.family import Family, GgufForm


def qwen2_moe_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig."""
    if config.get("use_sliding_window"):
        raise ConfigError(f"{source}: use_sliding_window is true: which layers have a window is not known here")
    experts = mixture(
        config,
        source,
        config["moe_intermediate_size"],
        bool(config.get("norm_topk_prob", False)),
        shared_size=config["shared_expert_intermediate_size"],
    )
    return {"experts": experts, "qkv_bias": bool(config.get("qkv_bias", True))}


def qwen2_moe_gguf_fields(metadata: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig."""
    width = metadata["expert_shared_feed_forward_length"]
    return {"experts": gguf_mixture(metadata, source, renormalize=False, shared_size=width)}


_SHARED = ("ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")

FAMILY = Family(
    "Qwen2MoeForCausalLM",
    "qwen2moe",
    read=qwen2_moe_fields,
    gguf=GgufForm(qwen2_moe_gguf_fields, expert_tensors=(*EXPERT_TENSORS, *_SHARED)),
    qkv_bias=True,
    window=4096,
    switches_window=True,
)
