"""DeepSeek-V2 and V3 (DeepSeek-AI 2024), R1, Kimi K2; of Kimi K2.5 the text part.

Attention over latents; mixtures with shared experts, whose experts V3 scores by a sigmoid and chooses by group.
"""

import math
from typing import Any

from contracts.errors import ConfigError
from models.config import ExpertScoring, LatentAttention, Multipliers
from models.config_fields import shared_mixture
from models.family import Family, TensorNames

_V2, _V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
_SCORING = {
    "greedy": ExpertScoring.SOFTMAX,
    "group_limited_greedy": ExpertScoring.SOFTMAX,
    "noaux_tc": ExpertScoring.SIGMOID,
}
"""How experts are scored, by the `topk_method` that chooses them."""


def deepseek_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig."""
    is_v2 = _V2 in (config.get("architectures") or ()) or config.get("model_type") == "deepseek_v2"
    heads, stated = config["num_attention_heads"], config.get("num_key_value_heads")
    if stated not in (None, heads):
        raise ConfigError(f"{source}: num_key_value_heads is {stated}; as many as num_attention_heads are expected")
    latent = LatentAttention(
        q_rank=config.get("q_lora_rank") or 0,
        kv_rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
        is_interleaved=is_v2 or bool(config.get("rope_interleave", True)),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    return {
        "num_kv_heads": 1,
        "head_dim": head_dim,
        "rotary_dim": latent.rope_dim,
        "latent": latent,
        "multipliers": Multipliers(attention=head_dim**-0.5 * _yarn_scale(config)),
        "experts": shared_mixture(config, source, **_routing(config, source, is_v2)),
        "num_mtp_layers": config.get("num_nextn_predict_layers") or 0,
    }


def _routing(config: dict[str, Any], source: str, is_v2: bool) -> dict[str, Any]:
    """Return fields of Experts."""
    method = config.get("topk_method") or ("greedy" if is_v2 else "noaux_tc")
    scoring = _SCORING.get(method)
    if not is_v2 and method != "noaux_tc":
        raise ConfigError(f"{source}: topk_method '{method}' is not supported of DeepSeek-V3; only 'noaux_tc' is")
    if scoring is None:
        raise ConfigError(f"{source}: topk_method '{method}' is not supported; supported are {', '.join(_SCORING)}")
    if (said := config.get("scoring_func", scoring)) != scoring:
        raise ConfigError(f"{source}: scoring_func '{said}' is not supported with topk_method '{method}': {scoring} is")
    renormalize = bool(config.get("norm_topk_prob", not is_v2))
    if (
        renormalize and scoring is ExpertScoring.SOFTMAX
    ):  # with or without the factor: its own code, transformers differ
        raise ConfigError(f"{source}: norm_topk_prob is true; with topk_method '{method}' only false is supported")
    groups = {} if method == "greedy" else {"num_groups": config["n_group"], "top_groups": config["topk_group"]}
    return {"scoring": scoring, "renormalize": renormalize, **groups}


def _yarn_scale(config: dict[str, Any]) -> float:
    """Return what YaRN's `mscale_all_dim` multiplies scores by, beside its length of q and k."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    share = rope.get("mscale_all_dim") or 0
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not share:
        return 1.0
    return (0.1 * share * math.log(max(rope["factor"], 1.0)) + 1.0) ** 2


FAMILY = Family(
    _V3,
    "deepseek2",
    also=(_V2, "deepseek_v2"),
    read=deepseek_fields,
    multimodal="KimiK25ForConditionalGeneration",
    names=TensorNames(
        renamed=(("language_model.", ""), (".shared_experts.", ".shared_expert.")),
        left_out=("vision_tower.", "mm_projector."),
    ),
)
