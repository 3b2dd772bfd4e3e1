"""Tensors of a checkpoint by their Hugging Face names, whatever file they are in."""

import logging
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from checkpoint.checkpoint import Checkpoint, WeightFormat
from checkpoint.gguf.file import GgufFile, TensorInfo
from checkpoint.huggingface.safetensors_index import tensor_files
from checkpoint.quantization import Quantization
from contracts.errors import ConfigError
from engine.model_loader.quantized_matrices import Quantized, QuantizedMatrices

_log = logging.getLogger(__name__)

ToDevice = Callable[[torch.Tensor], torch.Tensor]
"""Copies a tensor of a mapped file to where the model runs. The tensor may go when this returns."""
_LLAMA4 = "llama4"
_VISION = ("vision_model.", "multi_modal_projector.")
_LAYER, _GGUF_LAYER = re.compile(r"model\.layers\.(\d+)\."), re.compile(r"blk\.(\d+)\.")
_GGUF_KINDS = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}
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


@dataclass(frozen=True)
class TensorSlice:
    """The part `index` of `count` along `dim`.

    Of `num_groups` that lie there one after the other, the same part of each. A group is `num_pieces` long, none of
    which is cut, whatever their length; 0: one for each part.
    """

    dim: int
    index: int
    count: int
    num_groups: int = 1
    num_pieces: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the slice, so that the rest can be freed."""
        parts = [tensor.narrow(self.dim, part.start, len(part)) for part in self.parts(tensor.shape[self.dim])]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)

    def parts(self, length: int) -> list[range]:
        """Return the slice's ranges of a dimension of `length`, which must be a multiple."""
        num_pieces = self.num_pieces or self.count
        size = length // (num_pieces * self.num_groups)
        assert size * num_pieces * self.num_groups == length, f"{length} is not cut into whole pieces by {self}"
        first, last = (index * num_pieces // self.count for index in (self.index, self.index + 1))
        groups = range(0, length, num_pieces * size)
        return [range(group + first * size, group + last * size) for group in groups]

    def along(self, dim: int) -> "TensorSlice":
        return replace(self, dim=dim)


@dataclass(frozen=True)
class StoredBlocks:
    """A matrix as its file has it.

    `rows` `[n, row_nbytes]` uint8, mapped and not copied where the file is GGUF; `kind` is GGUF's.
    """

    kind: gguf.GGMLQuantizationType
    rows: np.ndarray
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """The tensors of a model, by name.

    `interleaved`: rows of q and k are stored with the two parts of a rotary pair side by side. `quantized`: the
    matrices that a checkpoint holds so, as they are stored; None if it has no such.
    """

    interleaved: bool

    @property
    def quantized(self) -> Quantized | None: ...

    def tensor(self, name: str, cut: TensorSlice | None = None) -> torch.Tensor:
        """Return float32, contiguous, unless opened for a device.

        Widened if quantized, bytes as they are; all of it, or a part. Raises ConfigError if the checkpoint lacks it.
        """
        ...


class StoredWeightSource(WeightSource, Protocol):
    """The same with matrices as their file has them."""

    def blocks(self, name: str) -> StoredBlocks:
        """Return a matrix.

        Raises ConfigError if the checkpoint lacks it, or has it in a type that GGUF has not.
        """
        ...


def open_weights(checkpoint: Checkpoint, to_device: ToDevice | None = None) -> StoredWeightSource:
    """Return the tensors of a checkpoint.

    Safetensors go through `to_device` in the type that they have in their file, else become float32.

    Raises ConfigError for weights of another number of layers than their configuration says.
    """
    if checkpoint.format is WeightFormat.GGUF:
        source = GgufWeights(checkpoint)
    else:
        is_llama4 = checkpoint.config.family == _LLAMA4
        source = SafetensorsWeights(checkpoint.path, to_device, checkpoint.quantization, is_llama4)
    _require_layers(source.layers, checkpoint)
    return source


def _require_layers(found: Collection[int], checkpoint: Checkpoint) -> None:
    """Raise ConfigError before anything is loaded.

    A model without its last layers would answer, and wrongly.
    """
    stated = checkpoint.config.num_layers
    if found and max(found) + 1 != stated:
        raise ConfigError(
            f"{checkpoint.path}: its weights have {max(found) + 1} layers, its configuration says {stated}: "
            "one of the two is of another model, or the download is incomplete"
        )


class SafetensorsWeights:
    """The tensors of a folder of safetensors.

    Those of a Llama 4 are named as other families' are; what belongs to its vision tower is left.
    """

    def __init__(
        self,
        folder: Path,
        to_device: ToDevice | None = None,
        quantization: Quantization | None = None,
        is_llama4: bool = False,
    ) -> None:
        self._folder, self._to_device, self.interleaved = folder, to_device, is_llama4
        self._files = tensor_files(folder)
        self._stored = llama4_names(self._files) if is_llama4 else {name: name for name in self._files}
        self.quantized = None if quantization is None else QuantizedMatrices(quantization, self._find, self._module)

    def tensor(self, name: str, cut: TensorSlice | None = None) -> torch.Tensor:
        module, _, kind = name.rpartition(".")
        matrix = self.quantized.matrix(module) if self.quantized is not None and kind == "weight" else None
        tensor = self._plain(name, cut) if matrix is None else _cut(matrix.dense(), cut)
        return tensor.float().contiguous() if self._to_device is None and tensor.is_floating_point() else tensor

    def blocks(self, name: str) -> StoredBlocks:
        """Return a tensor as it is stored.

        Raises ConfigError if it is not there, or its type is none of GGUF's.
        """
        tensor = self._plain(name, None).contiguous()
        kind = _GGUF_KINDS.get(tensor.dtype)
        if kind is None:
            raise ConfigError(f"'{name}' is {tensor.dtype} in {self._file(name)}: native kernels do not take it")
        rows = tensor.view(torch.uint8).numpy().reshape(len(tensor), -1)
        return StoredBlocks(kind, rows, tuple(tensor.shape))

    @property
    def layers(self) -> set[int]:
        """The layers of which there are tensors."""
        return {int(match[1]) for name in self._stored if (match := _LAYER.match(name))}

    def _plain(self, name: str, cut: TensorSlice | None) -> torch.Tensor:
        tensor = self._read(name, cut)
        is_plain = tensor.is_floating_point() and tensor.itemsize > 1
        if not is_plain and tensor.dtype is not torch.uint8:
            raise ConfigError(
                f"'{name}' is {tensor.dtype} in {self._file(name)}: its scales are missing, or its config.json says "
                "that it is not quantized"
            )
        return tensor

    def _find(self, name: str) -> torch.Tensor | None:
        return self._read(name) if name in self._stored else None

    def _module(self, name: str) -> str:
        """Return a module's name as the file has it; the tensor itself, of all experts in one."""
        return self._stored.get(f"{name}.weight", self._stored.get(name, name)).removesuffix(".weight")

    def _read(self, name: str, cut: TensorSlice | None = None) -> torch.Tensor:
        if name not in self._stored:
            raise ConfigError(f"{self._folder} lacks the tensor '{name}': the weights do not fit its config.json")
        try:
            with safe_open(self._file(name), framework="pt") as file:
                stored = self._stored[name]
                tensor = file.get_tensor(stored) if cut is None else _part(file.get_slice(stored), cut)
                return tensor if self._to_device is None else self._to_device(tensor)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read '{name}' from {self._file(name)}: {error}") from error

    def _file(self, name: str) -> Path:
        return self._files[self._stored[name]]


class GgufWeights:
    """The tensors of a GGUF file.

    llama.cpp's converter permutes the rows of q and k in Llama and Mistral files, and in no others.
    """

    quantized = None  # its formats are widened as they are read

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._file = GgufFile.open(checkpoint.path)
        self.interleaved = self._file.metadata["general.architecture"] == "llama"

    @property
    def layers(self) -> set[int]:
        """The layers of which there are tensors."""
        return {int(match[1]) for name in self._file.tensors if (match := _GGUF_LAYER.match(name))}

    def blocks(self, name: str) -> StoredBlocks:
        """Return a tensor's bytes. Raises ConfigError if the file lacks it."""
        info = self._info(name)
        return StoredBlocks(info.kind, self._file.blocks(info), info.shape)

    def _info(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(gguf_name(name))
        if info is None:
            raise ConfigError(f"{self._file.path} lacks the tensor '{gguf_name(name)}'")
        return info

    def tensor(self, name: str, cut: TensorSlice | None = None) -> torch.Tensor:
        info = self._info(name)
        try:
            values = gguf.dequantize(np.array(self._file.blocks(info)), info.kind)
        except NotImplementedError as error:
            raise ConfigError(f"{self._file.path}: the format {info.kind.name} of '{name}' is not supported") from error
        tensor = torch.from_numpy(np.ascontiguousarray(values.reshape(info.shape), np.float32))
        return _cut(tensor, cut)


def _cut(tensor: torch.Tensor, cut: TensorSlice | None) -> torch.Tensor:
    return tensor if cut is None else cut.of(tensor)


def _part(stored: Any, cut: TensorSlice) -> torch.Tensor:
    """Read only the cut of safetensors' slice of a file."""
    parts = cut.parts(stored.get_shape()[cut.dim])
    wanted = [stored[(*[slice(None)] * cut.dim, slice(part.start, part.stop))] for part in parts]
    return torch.cat(wanted, cut.dim) if len(wanted) > 1 else wanted[0]


def llama4_names(stored: Collection[str]) -> dict[str, str]:
    """Return names as other families have them -> as they are stored.

    `model.layers.1.mlp.down_proj.weight` -> `language_model.model.layers.1.feed_forward.down_proj.weight`. Without what
    belongs to images.
    """
    text = [name for name in stored if not name.startswith(_VISION)]
    num_left = len(stored) - len(text)
    if num_left:
        _log.info("%d tensors of the vision tower are not read: text alone is served", num_left)
    return {name.removeprefix("language_model.").replace(".feed_forward.", ".mlp."): name for name in text}


def gguf_name(name: str) -> str:
    """Return `blk.3.attn_q.weight` for `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{layer[1]}.{_GGUF_NAMES[layer[2]]}.{kind}" if layer else f"{_GGUF_NAMES[stem]}.{kind}"
