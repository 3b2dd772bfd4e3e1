"""Tensors of a checkpoint by their Hugging Face names, whatever file they are in."""

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
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
from engine.model_loader.gguf_names import gguf_place
from engine.model_loader.quantized_matrices import Quantized, QuantizedMatrices
from models.config import Experts, ModelConfig
from models.family import GgufForm, TensorNames
from models.registry import family_of

_log = logging.getLogger(__name__)

ToDevice = Callable[[torch.Tensor], torch.Tensor]
"""Copies a tensor of a mapped file to where the model runs. The tensor may go when this returns."""
_AS_LLAMA, _GAIN = TensorNames(), "norm.weight"
_MATRIX_KINDS = ("weight", "weight_packed", "qweight")
"""What a matrix is called behind its module."""
_LAYER, _GGUF_LAYER = re.compile(r"model\.layers\.(\d+)\."), re.compile(r"blk\.(\d+)\.")
_GGUF_KINDS = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
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
class FusedRows:
    """The place of a matrix in one that holds several.

    `module` is that one's name, `height` its number of rows. `expert`: which one's it is of a tensor of all experts.
    """

    module: str
    rows: range
    height: int
    expert: int | None = None

    def require_height(self, shape: Sequence[int], name: str, source: Path) -> None:
        """Raise ConfigError for a matrix of another height, whose rows would be cut in other places."""
        if [*shape[:1]] != [self.height]:
            raise ConfigError(f"{source}: '{name}' is {list(shape)}; its configuration says {self.height} rows")


def fused_rows(config: ModelConfig, names: TensorNames) -> dict[str, FusedRows]:
    """Return module -> where it is stored, of those that a family stores as one."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    heights = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    found: dict[str, FusedRows] = {}
    for module, parts in names.fused.items():
        of_parts = [heights.get(part.rpartition(".")[2], config.intermediate_size) for part in parts]
        for index, part in enumerate(parts):
            first, after = sum(of_parts[:index]), sum(of_parts[: index + 1])
            found[part] = FusedRows(module, range(first, after), sum(of_parts))
    return found


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

    @property
    def layers(self) -> set[int]:
        """The layers of which there are tensors."""
        ...

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
    family = family_of(checkpoint.config.family, str(checkpoint.path))
    rows = fused_rows(checkpoint.config, family.names)
    if checkpoint.format is WeightFormat.GGUF:
        assert family.gguf is not None, "a GGUF file of it was not opened"
        source = GgufWeights(checkpoint.path, family.gguf, rows)
    else:
        source = SafetensorsWeights(
            checkpoint.path, to_device, checkpoint.quantization, family.names, rows, checkpoint.config.experts
        )
    _require_layers(source.layers, checkpoint)
    return source


def _require_layers(found: Collection[int], checkpoint: Checkpoint) -> None:
    """Raise ConfigError before anything is loaded.

    A model without its last layers would answer, and wrongly.
    """
    stated, num_mtp = checkpoint.config.num_layers, checkpoint.config.num_mtp_layers
    behind = sorted(layer for layer in found if layer >= stated)
    if behind and len(found) - len(behind) == stated and behind[-1] < stated + num_mtp:
        _log.info("layers for multi-token prediction, %s, draft with --speculate mtp", ", ".join(map(str, behind)))
    elif found and max(found) + 1 != stated:
        raise ConfigError(
            f"{checkpoint.path}: its weights have {max(found) + 1} layers, its configuration says {stated}: "
            "one of the two is of another model, or the download is incomplete"
        )


class SafetensorsWeights:
    """The tensors of a folder of safetensors, by the names that Llama's have."""

    def __init__(
        self,
        folder: Path,
        to_device: ToDevice | None = None,
        quantization: Quantization | None = None,
        names: TensorNames = _AS_LLAMA,
        rows: Mapping[str, FusedRows] = MappingProxyType({}),
        experts: Experts | None = None,
    ) -> None:
        self._folder, self._to_device, self._names = folder, to_device, names
        self.interleaved = names.interleaved
        self._files = tensor_files(folder)
        self._stored, self._rows = _with_parts(llama_names(self._files, names), rows)
        if experts is not None and names.stacked_experts:
            self._add_experts(experts)
        self.quantized = None if quantization is None else QuantizedMatrices(quantization, self._find, self._module)

    def tensor(self, name: str, cut: TensorSlice | None = None) -> torch.Tensor:
        module, _, kind = name.rpartition(".")
        dense = self.quantized.dense(module) if self.quantized is not None and kind == "weight" else None
        tensor = self._plain(name, cut) if dense is None else _cut(dense, cut)
        if self._names.gain_offset and name.endswith(_GAIN):
            tensor = tensor.float() + self._names.gain_offset
        return tensor.float().contiguous() if self._to_device is None and tensor.is_floating_point() else tensor

    def _add_experts(self, experts: Experts) -> None:
        """Find the matrices of each expert in tensors of all of a layer, where there are such."""
        width = experts.intermediate_size
        parts = {"gate_up_proj": {"gate_proj": (0, width), "up_proj": (width, 2 * width)}}
        for name, stored in list(self._stored.items()):
            stem, _, kind = name.rpartition(".")
            if not stem.endswith(".mlp.experts") or kind not in ("gate_up_proj", "down_proj"):
                continue
            with safe_open(self._files[stored], framework="pt") as file:
                count, height, *_ = file.get_slice(stored).get_shape()
            if count != experts.count:
                raise ConfigError(
                    f"{self._folder}: '{stored}' is of {count} experts, its configuration of {experts.count}"
                )
            for part, (first, last) in parts.get(kind, {kind: (0, height)}).items():
                total = 2 * width if kind in parts else height
                for expert in range(count):
                    alias = f"{stem}.{expert}.{part}.weight"
                    self._stored[alias] = stored
                    self._rows[alias] = FusedRows(kind, range(first, last), total, expert)

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
        found = ((kind, self._stored.get(f"{name}.{kind}")) for kind in _MATRIX_KINDS)
        stored = next((stored.removesuffix(f".{kind}") for kind, stored in found if stored is not None), None)
        return self._stored.get(name, name) if stored is None else stored

    def _read(self, name: str, cut: TensorSlice | None = None) -> torch.Tensor:
        if name not in self._stored:
            raise ConfigError(f"{self._folder} lacks the tensor '{name}': the weights do not fit its config.json")
        try:
            with safe_open(self._file(name), framework="pt") as file:
                stored = self._stored[name]
                if (fused := self._rows.get(name)) is not None:
                    matrix, rows = file.get_slice(stored), slice(fused.rows.start, fused.rows.stop)
                    shape = matrix.get_shape()[0 if fused.expert is None else 1 :]
                    fused.require_height(shape, stored, self._folder)
                    tensor = _cut(matrix[rows] if fused.expert is None else matrix[fused.expert, rows], cut)
                else:
                    tensor = file.get_tensor(stored) if cut is None else _part(file.get_slice(stored), cut)
                return tensor if self._to_device is None else self._to_device(tensor)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read '{name}' from {self._file(name)}: {error}") from error

    def _file(self, name: str) -> Path:
        return self._files[self._stored[name]]


class GgufWeights:
    """The tensors of a GGUF file. `rows`: where those are that it stores as one."""

    quantized = None  # its formats are widened as they are read

    def __init__(self, path: Path, form: GgufForm, rows: Mapping[str, FusedRows]) -> None:
        self._file, self.interleaved, self._rows = GgufFile.open(path), form.interleaved, rows

    @property
    def layers(self) -> set[int]:
        """The layers of which there are tensors."""
        return {int(match[1]) for name in self._file.tensors if (match := _GGUF_LAYER.match(name))}

    def blocks(self, name: str) -> StoredBlocks:
        """Return a tensor's bytes. Raises ConfigError if the file lacks it, or has no such row of an expert."""
        fused = next((place for part, place in self._rows.items() if name.endswith(f".{part}.weight")), None)
        if fused is not None:
            return self._fused(name, fused)
        place = gguf_place(name)
        info = self._info(place.name)
        blocks = self._file.blocks(info)
        if place.expert is None:
            return StoredBlocks(info.kind, blocks, info.shape)
        if len(info.shape) != 3 or place.expert >= info.shape[0]:
            raise ConfigError(
                f"{self._file.path}: '{place.name}' is {list(info.shape)}; it lacks {place.expert + 1} experts"
            )
        height = info.shape[1]
        return StoredBlocks(info.kind, blocks[place.expert * height :][:height], info.shape[1:])

    def _fused(self, name: str, fused: FusedRows) -> StoredBlocks:
        """Return the rows of a matrix that is stored in one with others."""
        layer = name.rpartition(".self_attn.")[0] or name.rpartition(".mlp.")[0]
        info = self._info(gguf_place(f"{layer}.{fused.module}.weight").name)
        fused.require_height(info.shape, info.name, self._file.path)
        blocks = self._file.blocks(info)[fused.rows.start : fused.rows.stop]
        return StoredBlocks(info.kind, blocks, (len(blocks), info.shape[1]))

    def _info(self, name: str) -> TensorInfo:
        info = self._file.tensors.get(name)
        if info is None:
            raise ConfigError(f"{self._file.path} lacks the tensor '{name}'")
        return info

    def tensor(self, name: str, cut: TensorSlice | None = None) -> torch.Tensor:
        stored = self.blocks(name)
        try:
            values = gguf.dequantize(np.array(stored.rows), stored.kind)
        except NotImplementedError as error:
            words = f"the format {stored.kind.name} of '{name}' is not supported"
            raise ConfigError(f"{self._file.path}: {words}") from error
        tensor = torch.from_numpy(np.ascontiguousarray(values.reshape(stored.shape), np.float32))
        return _cut(tensor, cut)


def _cut(tensor: torch.Tensor, cut: TensorSlice | None) -> torch.Tensor:
    return tensor if cut is None else cut.of(tensor)


def _part(stored: Any, cut: TensorSlice) -> torch.Tensor:
    """Read only the cut of safetensors' slice of a file."""
    parts = cut.parts(stored.get_shape()[cut.dim])
    wanted = [stored[(*[slice(None)] * cut.dim, slice(part.start, part.stop))] for part in parts]
    return torch.cat(wanted, cut.dim) if len(wanted) > 1 else wanted[0]


def llama_names(stored: Collection[str], names: TensorNames) -> dict[str, str]:
    """Return names as Llama has them -> as they are stored.

    `model.layers.1.mlp.down_proj.weight` -> `language_model.model.layers.1.feed_forward.down_proj.weight` of a Llama 4.
    Without what belongs to images.
    """
    others = sum(name.startswith(names.left_out) for name in stored) if names.left_out else 0
    drafting = sum(name.startswith(names.drafting) for name in stored) if names.drafting else 0
    if others:
        _log.info("%d tensors of the vision tower are not read: text alone is served", others)
    if drafting:
        _log.info("%d tensors that predict further tokens (MTP) are not read: they draft nothing here", drafting)
    text = [name for name in stored if not name.startswith((*names.left_out, *names.drafting))]
    return {llama_name(name, names): name for name in text}


def _with_parts(stored: dict[str, str], parts: Mapping[str, FusedRows]) -> tuple[dict[str, str], dict[str, FusedRows]]:
    """Return the names with those of parts of matrices that are stored as one, and where such parts are."""
    names, rows = {}, {}
    for name, there in stored.items():
        module, _, kind = name.rpartition(".")
        found = {part: place for part, place in parts.items() if module.endswith(place.module)}
        stem = module.rpartition(".")[0].rpartition(".")[0]
        for part, place in found.items():
            names[f"{stem}.{part}.{kind}"], rows[f"{stem}.{part}.{kind}"] = there, place
        if not found:
            names[name] = there
    return names, rows


def llama_name(name: str, names: TensorNames) -> str:
    """Return what a tensor or module is called in Llama."""
    for stored, known in names.renamed:
        name = name.replace(stored, known)
    return name
