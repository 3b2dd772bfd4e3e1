"""The places of a decoder's tensors in a GGUF file, by the names that Llama's safetensors have."""

import re
from dataclasses import dataclass

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


@dataclass(frozen=True)
class GgufPlace:
    """The tensor that holds another, and which expert's it is where it holds those of all of a layer."""

    name: str
    expert: int | None = None


def gguf_place(name: str) -> GgufPlace:
    """Return `blk.3.attn_q.weight` for `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, kind = name.rpartition(".")
    layer = _LAYER.fullmatch(stem)
    if layer is None:
        return GgufPlace(f"{_NAMES[stem]}.{kind}")
    if expert := _EXPERT.fullmatch(layer[2]):
        return GgufPlace(f"blk.{layer[1]}.ffn_{expert[2]}_exps.{kind}", int(expert[1]))
    return GgufPlace(f"blk.{layer[1]}.{_NAMES[layer[2]]}.{kind}")
