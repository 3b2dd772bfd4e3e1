"""An EAGLE3 head on the native kernels, beside the native step."""

import ctypes
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from contracts.errors import ConfigError
from engine.cpu.eagle3.draft_cache import DraftCache
from engine.cpu.eagle3.head_rows import HeadOutput, HeadRows
from engine.cpu.native.structs import HeldObjects, fill_layer, shape_fields
from engine.model.rotary_embedding import rope_frequencies
from engine.model_loader.eagle3_tensors import Eagle3Tensors
from kernels.cpu.native import BatchStruct, LayerStruct, ModelStruct, NativeKernels, NativeMatrix
from models.eagle3 import Eagle3Config

_EMBEDDING_KINDS = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}


@dataclass(frozen=True)
class EmbeddingRows:
    """An embedding in memory that `held` keeps.

    Rows of `row_nbytes` follow each other from `address` on; `kind` is one of GGUF's formats.
    """

    kind: int
    address: int
    row_nbytes: int
    held: Any

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> Self:
        """Take those of a tensor `[vocab, hidden]`, which is contiguous."""
        assert tensor.is_contiguous()
        row_nbytes = tensor.shape[1] * tensor.element_size()
        return cls(_EMBEDDING_KINDS[tensor.dtype], tensor.data_ptr(), row_nbytes, tensor)


class NativeEagle3Head:
    """See engine.cpu.eagle3.head_rows.DraftingHead. `held`: all that the struct points to."""

    def __init__(
        self,
        config: Eagle3Config,
        targets: np.ndarray,
        kernels: NativeKernels,
        struct: ModelStruct,
        fc: NativeMatrix,
        aux_gains: tuple[np.ndarray, ...],
        held: tuple[Any, ...],
    ) -> None:
        self.config, self.targets = config, targets
        self._kernels, self._struct, self._held = kernels, struct, held
        self._fc, self._aux_gains = fc, aux_gains
        self._output = NativeMatrix(struct.head, ())

    def fuse(self, aux_MA: torch.Tensor) -> torch.Tensor:
        aux = aux_MA.numpy()
        if self._aux_gains:
            parts = np.split(aux, len(self._aux_gains), 1)
            aux = np.concatenate([self._norm(part, gain) for part, gain in zip(parts, self._aux_gains, strict=True)], 1)
        return torch.from_numpy(self._kernels.linear(self._fc, np.ascontiguousarray(aux)))

    def write(self, rows: HeadRows) -> None:
        self._compute(rows, np.empty(0, np.int32))

    def forward(self, rows: HeadRows) -> HeadOutput:
        normed, ends = self._compute(rows, rows.lasts_S.astype(np.int32))
        logits = torch.from_numpy(self._kernels.linear(self._output, normed))
        return HeadOutput(logits, torch.from_numpy(normed if self.config.norm_output else ends))

    def _compute(self, rows: HeadRows, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Write K and V of all rows; return what becomes of those `wanted`, with the final norm and without."""
        features = np.ascontiguousarray(rows.features_MH.numpy(), np.float32)
        tables = np.ascontiguousarray(rows.tables_SN)
        normed, ends = (np.empty((len(wanted), self.config.hidden_size), np.float32) for _ in range(2))
        batch = BatchStruct(
            num_rows=len(rows.tokens_M),
            num_wanted=len(wanted),
            table_stride=tables.shape[1],
            tokens=rows.tokens_M.ctypes.data,
            positions=rows.slots_M.ctypes.data,
            sequences=rows.owners_M.ctypes.data,
            tables=tables.ctypes.data,
            wanted=wanted.ctypes.data,
            hidden=normed.ctypes.data,
            features=features.ctypes.data,
            seen_from=rows.seen_from_S.ctypes.data,
            ends=ends.ctypes.data,
        )
        self._kernels.forward(self._struct, batch)
        return normed, ends

    def _norm(self, x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        """x / sqrt(mean(x^2) + eps) * gain."""
        return x / np.sqrt(np.mean(x * x, 1, keepdims=True) + np.float32(self.config.norm_eps)) * gain


def load_native_head(
    tensors: Eagle3Tensors,
    kernels: NativeKernels,
    cache: DraftCache,
    target: EmbeddingRows,
    max_model_len: int,
    is_exact: bool = False,
) -> NativeEagle3Head:
    """Return the head, its matrices in Q8_0, or in float32. `target`: the model's embedding.

    Raises ConfigError, which names the field, for widths that the native step does not take.
    """
    if reason := unfit_widths(tensors.config):
        raise ConfigError(f"{reason}: set another dtype")
    return _NativeHeadLoader(tensors, kernels, cache, is_exact).load(target, max_model_len)


def unfit_widths(config: Eagle3Config) -> str | None:
    """Return why the native step can't take the head, or None."""
    for name in ("hidden_size", "target_hidden_size", "intermediate_size", "head_dim"):
        if (width := getattr(config, name)) % 32:
            return f"the head's {name} is {width}; the native step takes multiples of 32"
    return None


class _NativeHeadLoader:
    def __init__(self, tensors: Eagle3Tensors, kernels: NativeKernels, cache: DraftCache, is_exact: bool) -> None:
        self._tensors, self._kernels, self._cache = tensors, kernels, cache.kv
        self._kind = GGMLQuantizationType.F32 if is_exact else GGMLQuantizationType.Q8_0
        self._held = HeldObjects(cache)

    def load(self, target: EmbeddingRows, max_model_len: int) -> NativeEagle3Head:
        tensors, config = self._tensors, self._tensors.config
        layers = (LayerStruct * config.num_layers)()
        for index, layer in enumerate(layers):
            self._fill(layer, index)
        # A row's position is that of its feature, one before its slot.
        rope = torch.view_as_real(rope_frequencies(config, max_model_len)).flatten(1)
        struct = ModelStruct(
            **shape_fields(config, self._cache),
            rope=self._held.address(torch.cat([rope[:1], rope])),
            layers=ctypes.cast(layers, ctypes.POINTER(LayerStruct)),
            final_gain=self._held.address(tensors.gain("norm")),
            head=self._packed(tensors.output()).struct,
            feature_gain=self._held.address(tensors.gain("layers.0.hidden_norm")),
            adds_normed=int(config.norm_before_residual),
        )
        own = tensors.own_embedding()
        embedding = target if own is None else EmbeddingRows.of_tensor(own.contiguous())
        struct.embedding, struct.embedding_kind = embedding.address, embedding.kind
        struct.embedding_row_nbytes = embedding.row_nbytes
        fc = self._packed(tensors.tensor("fc.weight"))
        held = (layers, embedding, *self._held.objects)
        return NativeEagle3Head(config, tensors.targets(), self._kernels, struct, fc, self._aux_gains(), held)

    def _fill(self, layer: LayerStruct, index: int) -> None:
        tensors, prefix = self._tensors, f"layers.{index}."
        for field, name in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")):
            setattr(layer, field, self._packed(*tensors.projection(index, name)).struct)
        for field in ("gate", "up", "down"):
            setattr(layer, field, self._packed(tensors.tensor(f"{prefix}mlp.{field}_proj.weight")).struct)
        fill_layer(layer, prefix, index, tensors, self._cache, self._held)

    def _aux_gains(self) -> tuple[np.ndarray, ...]:
        config, tensors = self._tensors.config, self._tensors
        if config.norm_before_fc:
            return (tensors.gain("input_norm").numpy(),)
        if config.fc_norm:
            return tuple(tensors.gain(f"fc_norm.{index}").numpy() for index in range(len(config.aux_layers)))
        return ()

    def _packed(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeMatrix:
        values = np.ascontiguousarray(weight.numpy(), np.float32)
        rows = values.view(np.uint8) if self._kind is GGMLQuantizationType.F32 else quantize(values, self._kind)
        matrix = self._kernels.pack(self._kind, rows, None if bias is None else bias.numpy())
        self._held.objects.append(matrix)
        return matrix
