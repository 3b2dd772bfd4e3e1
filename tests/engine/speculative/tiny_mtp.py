"""Layers for multi-token prediction of random weights behind tiny models, and what they draft in transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from tests.engine.tiny_models import randomize, save_tiny

_OWN = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
"""The parts of such a layer that others have not: their names in transformers, and in a checkpoint."""


class TinyMtp:
    """A tiny model with such a layer, and beside it the layer in transformers."""

    def __init__(self, folder: Path, family: str, **changes: Any) -> None:
        self.model = save_tiny(folder, family, num_nextn_predict_layers=1, **changes)
        torch.manual_seed(11)
        self._layer: Any = MtpModel(self.model, 1).eval()
        randomize(self._layer.layers)
        index, file = self.model.config.num_hidden_layers, folder / "model.safetensors"
        save_file(load_file(file) | stored(self._layer, f"model.layers.{index}."), file, {"format": "pt"})

    @torch.no_grad()
    def after(self, tokens: Sequence[int], k: int) -> list[int]:
        """Return k drafts after the tokens; each goes on behind the row that the layer gave the one before."""
        states = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
        read, drafts = list(tokens[1:]), list[int]()
        while len(drafts) < k:
            positions = torch.arange(1, len(read) + 1)[None]
            rows = self._layer.forward_layer(0, states, positions, None, input_ids=torch.tensor([read]))
            drafts.append(int(self._layer._project_to_logits(rows[:, -1]).argmax()))
            states, read = torch.cat([states, rows[:, -1:]], 1), [*read, drafts[-1]]
        return drafts


def stored(layer: Any, prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer as checkpoints have them: a module for each matrix of an expert."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in layer.layers.state_dict().items():
        name = name.removeprefix("0.")
        module = name.partition(".")[0]
        if module in _OWN:
            tensors[f"{prefix}{_OWN[module]}.weight"] = tensor
            continue
        name = prefix + name.removeprefix("mtp_block.")
        if "mlp.experts." not in name:
            tensors[name] = tensor
            continue
        kinds = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        for expert, matrix in enumerate(tensor):
            for kind, part in zip(kinds, matrix.chunk(len(kinds)), strict=True):
                tensors[f"{name.rpartition('.')[0]}.{expert}.{kind}.weight"] = part
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
