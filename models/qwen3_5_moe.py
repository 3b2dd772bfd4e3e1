"""Qwen3.5-MoE (Qwen Team 2026), as Qwen3.5-35B-A3B, its text part.

All layers have mixtures with a shared expert.
"""

from dataclasses import replace
from typing import Any

from contracts.errors import ConfigError
from models.config_fields import mixture, recurrent_fields
from models.family import Family
from models.qwen3_5 import FAMILY as DENSE


def qwen3_5_moe_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig. The weights of a token's experts always add up to 1."""
    if config.get("mlp_only_layers"):
        raise ConfigError(
            f"{source}: mlp_only_layers is {config['mlp_only_layers']}: layers without experts are not known"
        )
    shared = config["shared_expert_intermediate_size"]
    experts = mixture(config, source, config["moe_intermediate_size"], True, shared_size=shared)
    return {"experts": experts, **recurrent_fields(config, source)}


FAMILY = Family(
    "Qwen3_5MoeForCausalLM",
    "qwen35moe",
    multimodal="Qwen3_5MoeForConditionalGeneration",
    read=qwen3_5_moe_fields,
    names=replace(DENSE.names, stacked_experts=True),
    # No layer has an MLP of that width, which its config.json need not state.
    defaults={**DENSE.defaults, "intermediate_size": 512},
    qk_norm=True,
    partial_rotary=0.25,
)
