"""An EAGLE3 head of random weights in the shape of those that are published for Llama 3.1 8B."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

_SHAPE = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 1, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 131072, "vocab_size": 128256, "draft_vocab_size": 32000,
    "hidden_act": "silu", "model_type": "llama",
}  # fmt: skip
_HIDDEN, _INNER, _KV, _DRAFTED = 4096, 14336, 1024, 32000
_MATRICES = {
    "fc": (_HIDDEN, 3 * _HIDDEN), "lm_head": (_DRAFTED, _HIDDEN), "midlayer.self_attn.q_proj": (_HIDDEN, 2 * _HIDDEN),
    "midlayer.self_attn.k_proj": (_KV, 2 * _HIDDEN), "midlayer.self_attn.v_proj": (_KV, 2 * _HIDDEN),
    "midlayer.self_attn.o_proj": (_HIDDEN, _HIDDEN), "midlayer.mlp.gate_proj": (_INNER, _HIDDEN),
    "midlayer.mlp.up_proj": (_INNER, _HIDDEN), "midlayer.mlp.down_proj": (_HIDDEN, _INNER),
}  # fmt: skip
_NORMS = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")


def save_random_head(folder: Path) -> Path:
    """Write the head, 0.85 GB in bfloat16; returns its folder."""
    draw = torch.Generator().manual_seed(5)
    tensors = {
        f"{name}.weight": torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, shape[1] ** -0.5, generator=draw)
        for name, shape in _MATRICES.items()
    }
    tensors |= {f"{name}.weight": torch.ones(_HIDDEN, dtype=torch.bfloat16) for name in _NORMS}
    tensors["d2t"] = 3 * torch.arange(_DRAFTED)
    (folder / "config.json").write_text(json.dumps(_SHAPE))
    save_file(tensors, folder / "model.safetensors")
    return folder
