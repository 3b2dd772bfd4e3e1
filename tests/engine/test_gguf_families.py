"""GGUF files of each family, written by the names of the gguf package: answers are those of transformers."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from bench.models.transformers_oracle import greedy as oracle_greedy
from contracts.errors import ConfigError
from engine.loader import load_engine
from tests.engine.driving import answers, greedy, random_prompts, settings
from tests.engine.tiny_models import VOCAB, save_tiny

PROMPTS = random_prompts(VOCAB, (1, 17, 150))
ARCHITECTURES = {
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
PERMUTED = {"granite", "llama", "mixtral"}
"""The families whose converter puts the two parts of a rotary pair side by side."""
CHANGES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "phi3": {"sliding_window": 100},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"mlp_only_layers": []},
}


def write_gguf(path: Path, family: str, model: PreTrainedModel) -> Path:
    config: Any = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    OWN.get(family, lambda *_: None)(writer, config)
    if part := rope.get("partial_rotary_factor"):
        writer.add_rope_dimension_count(int(head_dim * part))
    if rope["rope_type"] == "longrope":
        add_longrope(writer, config)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"<{index}>" for index in range(config.vocab_size)])
    writer.add_token_merges([])
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config.num_hidden_layers)
    for stored, tensor in model.state_dict().items():
        if stored == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for name, part in split_experts(stored, tensor):
            written = names.get_name(name, (".weight", ".bias"))
            assert written is not None, name
            writer.add_tensor(written, converted(family, name, part, head_dim).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split_experts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Gates and ups of all experts apart, by the names that the gguf package knows; any other tensor as it is."""
    if name.endswith("mlp.experts.gate_up_proj"):
        stem, (gates, ups) = name.removesuffix("gate_up_proj"), tensor.chunk(2, 1)
        return [(f"{stem}gate_proj.weight", gates), (f"{stem}up_proj.weight", ups)]
    return [(f"{name}.weight" if name.endswith("mlp.experts.down_proj") else name, tensor)]


def converted(family: str, name: str, tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """What llama.cpp's converter does to a tensor."""
    if family in PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight")):
        halves = tensor.view(-1, 2, head_dim // 2, tensor.shape[1])
        return halves.transpose(1, 2).reshape(tensor.shape)
    if name.endswith("shared_expert_gate.weight"):
        return tensor.squeeze()
    return tensor + 1 if family == "gemma3" and name.endswith("norm.weight") else tensor


def add_granite(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def add_window(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)


def add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if width := getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(width)
    if width := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(width)


def add_longrope(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    original = rope["original_max_position_embeddings"]
    factor = config.max_position_embeddings / original
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
    for name in ("long", "short"):
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))


OWN: dict[str, Callable[[gguf.GGUFWriter, Any], None]] = {
    "gemma3": add_window,
    "granite": add_granite,
    "mixtral": add_experts,
    "phi3": add_window,
    "qwen2_moe": add_experts,
    "qwen3_moe": add_experts,
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_answers_of_a_gguf_file_equal_transformers(family: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, family, **CHANGES.get(family, {}))
    path = write_gguf(tmp_path / "tiny.gguf", family, model)
    expected = [oracle_greedy(model, prompt, 12) for prompt in PROMPTS]
    assert answers(load_engine(settings(model=str(path))), PROMPTS, greedy()) == expected


def test_longrope_of_a_gguf_file_is_that_of_transformers(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 3.0], "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 11.0]}
    rope = factors | {"rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.75}
    model = save_tiny(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64, sliding_window=512)
    path = write_gguf(tmp_path / "tiny.gguf", "phi3", model)
    prompts = random_prompts(VOCAB, (65, 150))
    expected = [oracle_greedy(model, prompt, 12) for prompt in prompts]
    assert answers(load_engine(settings(model=str(path))), prompts, greedy()) == expected


def test_fused_matrices_of_another_height_than_their_parts_are_refused(tmp_path: Path) -> None:
    """Rows of k and v would be taken from other places, without a word."""
    model = save_tiny(tmp_path, "phi3", sliding_window=512)
    model.config.num_key_value_heads = 1
    path = write_gguf(tmp_path / "tiny.gguf", "phi3", model)
    with pytest.raises(ConfigError, match=r"blk.0.attn_qkv.weight' is \[160, 96\]; its configuration says 128 rows"):
        load_engine(settings(model=str(path)))


def test_a_mixture_that_lacks_experts_is_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "qwen3_moe", mlp_only_layers=[])
    model.config.num_experts = 9
    path = write_gguf(tmp_path / "more.gguf", "qwen3_moe", model)
    with pytest.raises(ConfigError, match=r"its configuration says \[9, 96\]|lacks 9 experts"):
        load_engine(settings(model=str(path)))
