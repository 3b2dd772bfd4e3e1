"""LoRA adapters as PEFT saves them, and the models that it makes of them by merging."""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def lora_config(modules: Sequence[str], **changes: Any) -> dict[str, Any]:
    """The configuration that PEFT 0.21 writes, less what is null there."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1}
    config |= {"bias": "none", "inference_mode": True, "init_lora_weights": True, "fan_in_fan_out": False}
    return config | {"target_modules": [*modules], **changes}


def save_lora(
    folder: Path,
    model: PreTrainedModel,
    modules: Sequence[str],
    seed: int = 1,
    stated: Mapping[str, Any] = {},
    **changes: Any,
) -> PreTrainedModel:
    """Write an adapter of the modules whose names end so; return the model with it merged.

    PEFT's formula: W + lora_alpha / r * B A, or lora_alpha / sqrt(r) with rank stabilization. `stated`: what the file
    says beside what holds.
    """
    config = lora_config(modules, **changes)
    generator, merged, tensors = torch.Generator().manual_seed(seed), copy.deepcopy(model), {}
    for name, module in merged.named_modules():
        if not name.endswith(tuple(modules)):
            continue
        rank = _of_module(config, "rank_pattern", name, config["r"])
        alpha = _of_module(config, "alpha_pattern", name, config["lora_alpha"])
        assert isinstance(module, torch.nn.Linear)
        n, k = module.weight.shape
        down, up = torch.randn(rank, k, generator=generator) / k**0.5, torch.randn(n, rank, generator=generator) / 4
        tensors |= {f"base_model.model.{name}.lora_{letter}.weight": t for letter, t in (("A", down), ("B", up))}
        module.weight.data += alpha / (math.sqrt(rank) if config.get("use_rslora") else rank) * up @ down
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**config, **stated}))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return merged


def _of_module(config: Mapping[str, Any], pattern: str, name: str, default: float) -> Any:
    return next((value for end, value in config.get(pattern, {}).items() if name.endswith(end)), default)
