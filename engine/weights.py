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
from checkpoint.quantization import Quantization
from checkpoint.safetensors_index import tensor_files
from contracts.errors import ConfigError
from engine.quantized import QuantizedMatrices

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
    """`interleaved`: rows of q and k are stored with the two parts of a rotary pair side by side. `quantized`: the
    matrices that a checkpoint holds so, as they are stored; None if it has no such.
    """

    interleaved: bool

    @property
    def quantized(self) -> QuantizedMatrices | None: ...

    def tensor(self, name: str) -> torch.Tensor:
        """float32, contiguous, unless opened for a device; widened if quantized, bytes as they are. Raises ConfigError
        if the checkpoint lacks it.
        """
        ...


def open_weights(checkpoint: Checkpoint, device: torch.device | None = None) -> WeightSource:
    """`device`: safetensors go straight there, in the type that they have in their file."""
    if checkpoint.format is WeightFormat.GGUF:
        return GgufWeights(checkpoint)
    return SafetensorsWeights(checkpoint.path, device, checkpoint.quantization)


class SafetensorsWeights:
    interleaved = False

    def __init__(
        self, folder: Path, device: torch.device | None = None, quantization: Quantization | None = None
    ) -> None:
        self._folder, self._device = folder, device
        self._files = tensor_files(folder)
        self.quantized = None if quantization is None else QuantizedMatrices(quantization, self._find)

    def tensor(self, name: str) -> torch.Tensor:
        module, _, kind = name.rpartition(".")
        matrix = self.quantized.matrix(module) if self.quantized is not None and kind == "weight" else None
        tensor = self._plain(name) if matrix is None else matrix.dense()
        return tensor.float().contiguous() if self._device is None and tensor.is_floating_point() else tensor

    def _plain(self, name: str) -> torch.Tensor:
        tensor = self._read(name)
        is_plain = tensor.is_floating_point() and tensor.itemsize > 1
        if not is_plain and tensor.dtype is not torch.uint8:
            raise ConfigError(
                f"'{name}' is {tensor.dtype} in {self._files[name]}: its scales are missing, or its config.json says "
                "that it is not quantized"
            )
        return tensor

    def _find(self, name: str) -> torch.Tensor | None:
        return self._read(name) if name in self._files else None

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise ConfigError(f"{self._folder} lacks the tensor '{name}': the weights do not fit its config.json")
        try:
            with safe_open(self._files[name], framework="pt", device=str(self._device or "cpu")) as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read '{name}' from {self._files[name]}: {error}") from error


class GgufWeights:
    """llama.cpp's converter permutes the rows of q and k in Llama and Mistral files, and in no others."""

    quantized = None  # its formats are widened as they are read

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
