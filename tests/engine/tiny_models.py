"""Tiny random models of each family, saved as Hugging Face folders: small enough for tests, shaped like the real
ones.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bench.random_model import byte_tokenizer

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


FAMILIES = {
    "llama": Tiny(LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama3": Tiny(LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "mistral": Tiny(MistralConfig, MistralForCausalLM, {"sliding_window": None, "tie_word_embeddings": False}),
    "qwen2": Tiny(Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": Tiny(Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": False}),
}


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
    for name, parameter in model.named_parameters():
        # Norm gains and biases start as ones and zeros: make them count.
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5) if "norm" in name else parameter.data.uniform_(-0.5, 0.5)
        else:
            parameter.data.mul_(4)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model
