"""GLM-4.5 (GLM Team 2025), and 4.5-Air and 4.6.

Rope turns half of each head; mixtures as DeepSeek-V3's behind the first layers.
"""

from typing import Any

from models.config import ExpertScoring
from models.config_fields import shared_mixture
from models.family import Family, TensorNames


def glm4_moe_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig."""
    experts = shared_mixture(
        config,
        source,
        scoring=ExpertScoring.SIGMOID,
        renormalize=bool(config.get("norm_topk_prob", True)),
        num_groups=config.get("n_group", 1),
        top_groups=config.get("topk_group", 1),
    )
    return {
        "experts": experts,
        "qkv_bias": bool(config.get("attention_bias", False)),
        "qk_norm": bool(config.get("use_qk_norm", False)),
        "num_mtp_layers": config.get("num_nextn_predict_layers") or 0,
    }


FAMILY = Family(
    "Glm4MoeForCausalLM",
    "glm4moe",
    read=glm4_moe_fields,
    names=TensorNames(renamed=((".shared_experts.", ".shared_expert."),)),
    reads_attention_bias=True,
    partial_rotary=0.5,
)
