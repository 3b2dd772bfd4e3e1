"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al. 2024).

They have q, k and v in one matrix, gate and up in another, and LongRoPE.
"""

from typing import Any

from models.family import Family, GgufForm, TensorNames


def phi3_gguf_fields(metadata: dict[str, Any], source: str) -> dict[str, Any]:
    """Return fields of a ModelConfig: all layers have the window, if there is one."""
    window, length = metadata.get("attention.sliding_window", 0), metadata["context_length"]
    layers = tuple(range(metadata["block_count"])) if 0 < window < length else ()
    return {"window": window if layers else 0, "windowed_layers": layers}


FAMILY = Family(
    "Phi3ForCausalLM",
    "phi3",
    names=TensorNames(
        fused={
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        }
    ),
    gguf=GgufForm(phi3_gguf_fields, tensors=("attn_qkv",), turns_part=True, ends=("<|end|>", "<|im_end|>")),
    partial_rotary=1.0,
    window=0,
)
