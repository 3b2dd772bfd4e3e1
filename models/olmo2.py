"""OLMo 2 (OLMo Team 2025).

Norms stand after attention and MLP only; q and k are normalised over all heads together.
"""

from typing import Any

from models.config import NormPlacement
from models.family import Family, GgufForm, TensorNames

_FIELDS = {"norms": NormPlacement.AFTER, "joint_qk_norm": True, "qk_norm": True}


def olmo2_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig."""
    return _FIELDS


def olmo2_gguf_fields(metadata: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig."""
    return _FIELDS


FAMILY = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    read=olmo2_fields,
    names=TensorNames(
        renamed=(
            (".post_attention_layernorm.", ".post_self_attn_layernorm."),
            (".post_feedforward_layernorm.", ".post_mlp_layernorm."),
        )
    ),
    gguf=GgufForm(olmo2_gguf_fields, tensors=("post_attention_norm", "post_ffw_norm")),
)
