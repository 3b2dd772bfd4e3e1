"""Tiny random models of each family, saved as Hugging Face folders: small enough for tests, shaped like the real
ones.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from bench.models.random_model import byte_tokenizer
from bench.models.transformers_oracle import greedy as oracle_greedy
from kernels.reference.quant import quantize_mxfp4
from tests.engine.driving import random_prompts

VOCAB = 320
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Tiny:
    config: type
    model: type
    extra: dict[str, Any] = field(default_factory=dict)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}

GROUPED_EXPERTS = {
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
LATENT = {
    **GROUPED_EXPERTS,
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
RECURRENT = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MIXED = {
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 80,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}

FAMILIES: dict[str, Tiny] = {
    "deepseek_v2": Tiny(
        DeepseekV2Config, DeepseekV2ForCausalLM, {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"}
    ),
    "deepseek_v3": Tiny(
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {**LATENT, "q_lora_rank": 40, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "gemma3": Tiny(
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "glm4": Tiny(Glm4Config, Glm4ForCausalLM, {"head_dim": 32}),
    "glm4_moe": Tiny(
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {**GROUPED_EXPERTS, "head_dim": 32, "attention_bias": True, "use_qk_norm": True},
    ),
    "gpt_oss": Tiny(
        GptOssConfig,
        GptOssForCausalLM,
        {
            "head_dim": 32,
            "intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 40,
            "rope_parameters": YARN,
        },
    ),
    "granite": Tiny(
        GraniteConfig,
        GraniteForCausalLM,
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "llama": Tiny(LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama3": Tiny(LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "llama4": Tiny(
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            "head_dim": 32,
            "intermediate_size": 64,
            "intermediate_size_mlp": 192,
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
            "floor_scale": 32,
            "attn_scale": 0.5,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "mistral": Tiny(MistralConfig, MistralForCausalLM, {"sliding_window": None, "tie_word_embeddings": False}),
    "mixtral": Tiny(MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": Tiny(Olmo2Config, Olmo2ForCausalLM),
    "phi3": Tiny(
        Phi3Config,
        Phi3ForCausalLM,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
    ),
    "qwen2": Tiny(Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2_moe": Tiny(
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 80,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3": Tiny(Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen3_5": Tiny(Qwen3_5TextConfig, Qwen3_5ForCausalLM, RECURRENT),
    "qwen3_5_moe": Tiny(Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, RECURRENT | MIXED),
    "qwen3_moe": Tiny(
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 32,
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_next": Tiny(
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        RECURRENT | MIXED | {"mlp_only_layers": [1], "linear_conv_kernel_dim": 3},
    ),
}

STATE_FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]
"""Those with recurrent layers."""
DEVICE_FAMILIES = sorted(
    FAMILIES.keys()
    - {"deepseek_v2", "deepseek_v3", "gemma3", "glm4", "glm4_moe", "granite", "olmo2", "qwen2_moe"}
    - {*STATE_FAMILIES}
)
"""Those that a GPU serves."""


def save_tiny(folder: Path, family: str, **changes: Any) -> PreTrainedModel:
    """Write config.json, model.safetensors and tokenizer.json; returns the model itself, the reference."""
    tiny = FAMILIES[family]
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": None,
    }
    torch.manual_seed(7)
    model = tiny.model(tiny.config(**{**shape, **tiny.extra, **changes})).eval()
    randomize(model)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def randomize(model: torch.nn.Module) -> None:
    """Make norm gains and biases count, which start as ones and zeros, and matrices larger."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.uniform_(-5, -1)  # a state remembers some hundred tokens
        elif parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5) if "norm" in name else parameter.data.uniform_(-0.5, 0.5)
        elif "bias" in name:
            parameter.data.uniform_(-0.5, 0.5)
        else:
            parameter.data.mul_(4)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2)


def save_answered(folder: Path, family: str, lengths: Sequence[int]) -> tuple[Path, list[list[int]], list[list[int]]]:
    """Write a tiny model; return its folder, prompts, and transformers' 12 greedy tokens after each."""
    model = save_tiny(folder, family)
    prompts = random_prompts(VOCAB, lengths)
    return folder, prompts, [oracle_greedy(model, prompt, 12) for prompt in prompts]


def save_mxfp4(folder: Path, model: PreTrainedModel) -> None:
    """A saved gpt-oss again, its experts as the released ones have them. `model` takes the rounded weights."""
    file = folder / "model.safetensors"
    tensors, parameters = load_file(file), dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        rows = tensors.pop(name).transpose(1, 2).contiguous()  # [experts, n, k]
        pairs, exponents = quantize_mxfp4(rows.flatten(0, 1))
        parameters[name].data.copy_(dequantized(pairs, exponents).view(rows.shape).transpose(1, 2))
        tensors[name + "_blocks"] = pairs.view(*rows.shape[:2], -1, 16)
        tensors[name + "_scales"] = exponents.view(*rows.shape[:2], -1)
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))


def dequantized(pairs: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    table = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    values = torch.tensor([*table, *(-value for value in table)])
    codes = torch.stack([pairs % 16, pairs // 16], -1).flatten(-2).long()
    return values[codes] * (2.0 ** (exponents.float() - 127)).repeat_interleave(32, -1)


def as_multimodal(
    folder: Path,
    architecture: str = "Llama4ForConditionalGeneration",
    model_type: str = "llama4",
    tower: str = "vision_model.layernorm_pre",
    projector: str = "multi_modal_projector.x",
) -> None:
    """A saved Llama 4 again, or another, beside a vision tower."""
    file = folder / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    vision = {f"{name}.weight": torch.ones(2, 2) for name in (tower, projector)}
    save_file(tensors | vision, file)
    config = json.loads((folder / "config.json").read_text())
    whole = {"architectures": [architecture], "model_type": model_type, "text_config": config}
    whole |= {key: config.pop(key) for key in ("quantization_config",) if key in config}
    (folder / "config.json").write_text(json.dumps(whole))


def change_config(folder: Path, changes: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
