"""EAGLE3 heads of random weights for tiny models, in their dialects' names, and what they draft by the formulas."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from bench.models.eagle3_reference import Eagle3Reference
from checkpoint.huggingface.eagle3_folder import Eagle3Folder, open_eagle3, read_eagle3
from models.config import ModelConfig
from models.eagle3 import Eagle3Dialect, optional_tensors, required_tensors

AUX_LAYERS = [0, 1, 2]
"""Inputs of all layers of a tiny model."""
LAYER = {
    "hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 512,
    "vocab_size": 320, "hidden_act": "silu", "model_type": "llama",
}  # fmt: skip


def speculators(layer: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return a config.json as speculators writes it."""
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 128,
        "eagle_aux_hidden_state_layer_ids": AUX_LAYERS, "transformer_layer_config": LAYER | (layer or {}),
    } | fields  # fmt: skip


def specforge(**fields: Any) -> dict[str, Any]:
    """Return a flat config.json, as SpecForge writes it; its ids name outputs, so the embedding can't be named."""
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    head = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 128, "eagle_config": ids}
    return LAYER | head | fields


HEADS: dict[str, dict[str, Any]] = {
    "speculators": speculators(),
    "SpecForge": specforge(),
    "norms before": speculators(norm_before_residual=True, norm_before_fc=True),
    "norms of each": speculators(fc_norm=True, norm_output=True),
    "two layers": speculators({"model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": True}),
    "whole vocabulary": specforge(draft_vocab_size=None),
    "narrow": speculators(
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1}, target_hidden_size=96
    ),
}


def save_head(folder: Path, stated: dict[str, Any], target: ModelConfig) -> Path:
    """Write a head of random weights."""
    config = read_eagle3(stated, target, "made here")
    draw = torch.Generator().manual_seed(3)
    shapes = required_tensors(config)
    if not config.has_reduced_vocabulary:
        shapes["lm_head.weight"] = optional_tensors(config)["lm_head.weight"]
    tensors = {name: torch.randn(shape, generator=draw) * 0.2 for name, shape in sorted(shapes.items())}
    for name in tensors:
        if "norm" in name:
            tensors[name].uniform_(0.5, 1.5, generator=draw)
    if config.has_reduced_vocabulary:
        drafted = torch.randperm(config.vocab_size, generator=draw)[: config.draft_vocab_size].sort().values
        tensors["d2t"] = drafted - torch.arange(config.draft_vocab_size)
    return write_head(folder, stated, config.dialect, tensors)


def write_head(folder: Path, stated: dict[str, Any], dialect: Eagle3Dialect, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a head, its tensors under the names of its dialect."""
    if dialect is Eagle3Dialect.SPECFORGE:
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated))
    save_file(tensors, folder / "model.safetensors")
    return folder


class ReferenceDrafts:
    """What a head drafts by the formulas, beside a model of transformers.

    `num_unread`: so many tokens of each sequence the head has not read, as those whose KV came from elsewhere.
    """

    def __init__(self, folder: Path, target: ModelConfig, model: PreTrainedModel, num_unread: int = 0) -> None:
        self._head: Eagle3Folder = open_eagle3(folder, target)
        self._model, self._num_unread = model, num_unread
        files = {file for file, _ in self._head.files.values()}
        stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self._tensors = {name: stored[there] for name, (_, there) in self._head.files.items()}
        self._readers: dict[tuple[int, ...], Eagle3Reference] = {}
        """Those that have read a text, under all its tokens."""

    @torch.no_grad()
    def after(self, tokens: Sequence[int], k: int) -> list[int]:
        """Return k drafts after the tokens; none where the head has read none of them."""
        unread, config = self._num_unread, self._head.config
        if unread >= len(tokens) - 1:
            return []
        states = self._model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        aux = torch.cat([states[layer][0] for layer in config.aux_layers], 1)[unread:]
        reader = self._take_reader(tokens)
        reader.forget(len(aux) - 1)  # it reads the last row again if it has read just these tokens
        self._readers[tuple(tokens)] = reader
        return reader.draft(aux, list(tokens[unread:]), k)

    def _take_reader(self, tokens: Sequence[int]) -> Eagle3Reference:
        """Return the one that has read most of these tokens and no other, or a new one."""
        for length in range(len(tokens), 0, -1):
            if (reader := self._readers.pop(tuple(tokens[:length]), None)) is not None:
                return reader
        embedding = self._model.get_input_embeddings().weight
        assert isinstance(embedding, torch.Tensor)
        return Eagle3Reference(self._head.config, self._tensors, embedding)
