"""The folder of a trained head, as vLLM's speculators reads it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from checkpoint.huggingface.eagle3_folder import open_eagle3
from models.config import ModelConfig
from models.eagle3 import Eagle3Config, Eagle3Dialect, default_aux_layers
from tools.eagle3.draft_model import Eagle3Draft
from tools.eagle3.target import TargetModel

DRAFT_TOKENS = 3


def head_config(target: ModelConfig, width: int, draft_vocab_size: int) -> Eagle3Config:
    """Return the configuration of a head of one layer for a target; `width` is of its feed-forward."""
    return Eagle3Config(
        dialect=Eagle3Dialect.SPECULATORS,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=width,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        norm_eps=target.norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=None,
        max_model_len=target.max_model_len,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layers=default_aux_layers(target.num_layers),
        norm_before_residual=True,
    )


def write_head(folder: Path, draft: Eagle3Draft, verifier: str, architectures: list[str]) -> None:
    """Write config.json and model.safetensors; `verifier` is the target's name on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_json(draft.config, verifier, architectures), indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in draft.checkpoint_tensors().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def open_draft(folder: Path, target: TargetModel) -> Eagle3Draft:
    """Return a head that was trained here, or one like it, as it is served."""
    head = open_eagle3(folder, target.config)
    tensors = {name: load_file(file)[stored] for name, (file, stored) in head.files.items()}
    drafted = torch.arange(head.config.draft_vocab_size) + tensors["d2t"]
    draft = Eagle3Draft(head.config, target.embedding, drafted.to(target.device))
    draft.load_state_dict({name: tensors[name] for name, _ in draft.named_parameters()})
    return draft.to(target.device, target.dtype)


def config_json(config: Eagle3Config, verifier: str, architectures: list[str]) -> dict[str, Any]:
    """Return config.json in the dialect of speculators."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "max_position_embeddings": config.max_model_len,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFT_TOKENS}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }
