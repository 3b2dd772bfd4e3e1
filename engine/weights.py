"""Tensors of a checkpoint by their Hugging Face names, whatever file they are in."""

import re
from pathlib import Path
from typing import Protocol

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from checkpoint.checkpoint import Checkpoint, WeightFormat
from checkpoint.gguf_file import GgufFile
from checkpoint.safetensors_index import tensor_files
from contracts.errors import ConfigError

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class WeightSource(Protocol):
    """`interleaved`: rows of q and k are stored with the two parts of a rotary pair side by side."""

    interleaved: bool

    def tensor(self, name: str) -> torch.Tensor:
        """float32, contiguous, unless opened for a device. Raises ConfigError if the checkpoint lacks it."""
        ...


def open_weights(checkpoint: Checkpoint, device: torch.device | None = None) -> WeightSource:
    """`device`: safetensors go straight there, in the type that they have in their file."""
    if checkpoint.format is WeightFormat.GGUF:
        return GgufWeights(checkpoint)
    return SafetensorsWeights(checkpoint.path, device)


class SafetensorsWeights:
    interleaved = False

    def __init__(self, folder: Path, device: torch.device | None = None) -> None:
        self._folder, self._device = folder, device
        self._files = tensor_files(folder)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise ConfigError(f"{self._folder} lacks the tensor '{name}': the weights do not fit its config.json")
        try:
            with safe_open(self._files[name], framework="pt", device=str(self._device or "cpu")) as file:
                tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read '{name}' from {self._files[name]}: {error}") from error
        return tensor.float().contiguous() if self._device is None else tensor


class GgufWeights:
    """llama.cpp's converter permutes the rows of q and k in Llama and Mistral files, and in no others."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._file = GgufFile.open(checkpoint.path)
        self.interleaved = self._file.metadata["general.architecture"] == "llama"

    def tensor(self, name: str) -> torch.Tensor:
        info = self._file.tensors.get(gguf_name(name))
        if info is None:
            raise ConfigError(f"{self._file.path} lacks the tensor '{gguf_name(name)}'")
        try:
            values = gguf.dequantize(np.array(self._file.blocks(info)), info.kind)
        except NotImplementedError as error:
            raise ConfigError(f"{self._file.path}: the format {info.kind.name} of '{name}' is not supported") from error
        return torch.from_numpy(np.ascontiguousarray(values.reshape(info.shape), np.float32))


def gguf_name(name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` -> `blk.3.attn_q.weight`."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{layer[1]}.{_GGUF_NAMES[layer[2]]}.{kind}" if layer else f"{_GGUF_NAMES[stem]}.{kind}"
