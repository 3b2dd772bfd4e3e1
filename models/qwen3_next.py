"""Qwen3-Next (Qwen Team 2025): three layers of a gated delta rule to each that attends.

Attention has a gate at its output, and rope in a quarter of each head; all layers have mixtures with a shared expert.
Gains are stored less 1, but for those of the norm over the delta rule's heads.
"""

from typing import Any

from models.config_fields import mixture, recurrent_fields
from models.family import Family, TensorNames

GAIN_OF_HEADS = (".linear_attn.norm.", ".linear_attn.out_gain.")
"""Its stored name and the one here, which is none of a gain to which 1 is added."""
DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def qwen3_next_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig."""
    experts = mixture(
        config,
        source,
        config["moe_intermediate_size"],
        bool(config.get("norm_topk_prob", True)),
        shared_size=config["shared_expert_intermediate_size"],
    )
    return {"experts": experts, **recurrent_fields(config, source, as_qwen3_next=True)}


FAMILY = Family(
    "Qwen3NextForCausalLM",
    "qwen3next",
    read=qwen3_next_fields,
    names=TensorNames(renamed=(GAIN_OF_HEADS,), drafting=("mtp.",), gain_offset=1.0),
    defaults=DEFAULTS,
    qk_norm=True,
    partial_rotary=0.25,
)
