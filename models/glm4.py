"""GLM-4 (GLM Team 2025), the 0414 releases.

Rope turns pairs of neighbours in half of each head; norms stand before and after attention and MLP.
"""

from typing import Any

from models.config import NormPlacement
from models.family import Family, GgufForm, TensorNames


def glm4_fields(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig."""
    return {"norms": NormPlacement.AROUND, "qkv_bias": bool(config.get("attention_bias", True))}


def glm4_gguf_fields(metadata: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig."""
    return {"norms": NormPlacement.AROUND}


FAMILY = Family(
    "Glm4ForCausalLM",
    "glm4",
    read=glm4_fields,
    names=TensorNames(fused={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}, interleaved=True),
    gguf=GgufForm(
        glm4_gguf_fields, tensors=("post_attention_norm", "post_ffw_norm"), interleaved=True, turns_part=True
    ),
    reads_attention_bias=True,
    head_dim=128,
    partial_rotary=0.5,
)
