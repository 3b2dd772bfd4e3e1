"""A tiny random model as a Hugging Face folder, made without transformers: systems of it start in a few seconds."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 257
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
    "bos_token_id": 256,
    "torch_dtype": "float32",
}


def save_tiny(folder: Path, seed: int = 0) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(seed), folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)} | {"<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Large enough that greedy answers wander instead of repeating one token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors = {"model.embed_tokens.weight": draw(VOCAB, 64), "model.norm.weight": torch.ones(64)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
        tensors |= {f"{prefix}self_attn.{name}.weight": draw(*shape) for name, shape in shapes.items()}
        shapes = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)}
        tensors |= {f"{prefix}mlp.{name}.weight": draw(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(64)
    return tensors
