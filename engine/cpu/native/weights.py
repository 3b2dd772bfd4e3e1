"""From a checkpoint to a model of the native kernels: matrices as they are stored, in strips."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from checkpoint.checkpoint import Progress
from contracts.errors import ConfigError
from engine.cpu.kv_cache import KVCache
from engine.cpu.native.strips import padded
from engine.cpu.native.structs import HeldObjects, fill_layer, shape_fields
from engine.model.rotary_embedding import rope_frequencies
from engine.model_loader.checkpoint_weights import StoredBlocks, StoredWeightSource
from engine.model_loader.decoder_tensors import PARTS, ModelTensors, layer_prefix
from kernels.cpu.native import LayerStruct, MatrixStruct, ModelStruct, NativeKernels, StripMemory
from models.config import ModelConfig

_EMBEDDING, _HEAD, _FINAL_NORM = "model.embed_tokens", "lm_head", "model.norm"
_FIELDS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""The matrices of a layer, by their fields in LayerStruct."""


@dataclass(frozen=True)
class NativeModel:
    """A model and all that its structs point to."""

    struct: ModelStruct
    held: tuple[Any, ...]


def matrix_names(config: ModelConfig) -> Iterator[str]:
    """Yield the names of all matrices, the embedding among them."""
    yield f"{_EMBEDDING}.weight"
    if not config.tied_embeddings:
        yield f"{_HEAD}.weight"
    for index in range(config.num_layers):
        yield from (f"{layer_prefix(index)}{module}.weight" for module in _FIELDS.values())


def strips_nbytes(config: ModelConfig, source: StoredWeightSource, kernels: NativeKernels) -> int:
    """Return what the packed matrices of a model take in a file."""
    names = list(matrix_names(config))
    total = 0
    for name in names if config.tied_embeddings else names[1:]:
        blocks = source.blocks(name)
        total += sum(map(padded, kernels.packed_nbytes(blocks.kind, *blocks.shape)))
    return total


def load_native_model(
    config: ModelConfig,
    source: StoredWeightSource,
    kernels: NativeKernels,
    cache: KVCache,
    max_model_len: int,
    progress: Progress,
    memory: StripMemory,
) -> NativeModel:
    """Return a model whose matrices are in `memory`.

    Raises ConfigError for a tensor that is missing or has another shape than the configuration says.
    """
    loader = _NativeWeightLoader(config, source, kernels, cache, memory)
    embedding, head = loader.ends()  # first: a vocabulary of another size is told before much is loaded
    layers = (LayerStruct * config.num_layers)()
    for index in range(config.num_layers):
        progress("load", index, config.num_layers)
        loader.fill(layers[index], index)
    progress("load", config.num_layers, config.num_layers)
    rope = torch.view_as_real(rope_frequencies(config, max_model_len)).contiguous().numpy()
    final_gain = loader.tensors.gain(_FINAL_NORM).numpy()
    struct = ModelStruct(
        **shape_fields(config, cache),
        embedding_kind=int(embedding.kind),
        embedding_row_nbytes=embedding.rows.shape[1],
        embedding=embedding.rows.ctypes.data,
        rope=rope.ctypes.data,
        layers=ctypes.cast(layers, ctypes.POINTER(LayerStruct)),
        final_gain=final_gain.ctypes.data,
        head=head,
    )
    return NativeModel(struct, (embedding, layers, rope, final_gain, cache, *loader.held.objects))


class _NativeWeightLoader:
    def __init__(
        self,
        config: ModelConfig,
        source: StoredWeightSource,
        kernels: NativeKernels,
        cache: KVCache,
        memory: StripMemory,
    ) -> None:
        self._config, self._source, self._kernels = config, source, kernels
        self._cache, self._memory = cache, memory
        self.tensors = ModelTensors(config, source, interleaved=True)
        self.held = HeldObjects()
        hidden, inner = config.hidden_size, config.intermediate_size
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._shapes = {
            "q": (q_width, hidden),
            "k": (kv_width, hidden),
            "v": (kv_width, hidden),
            "output": (hidden, q_width),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }

    def ends(self) -> tuple[StoredBlocks, MatrixStruct]:
        """The embedding as it is stored, mapped, and the head, which is packed of it where they are tied."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        embedding = self._blocks(f"{_EMBEDDING}.weight", shape)
        head = embedding if self._config.tied_embeddings else self._blocks(f"{_HEAD}.weight", shape)
        return embedding, self._packed(head.kind, head.rows)

    def fill(self, layer: LayerStruct, index: int) -> None:
        prefix = layer_prefix(index)
        biases = self._biases(prefix)
        for field, module in _FIELDS.items():
            blocks = self._blocks(f"{prefix}{module}.weight", self._shapes[field])
            rows = self._rotary_order(blocks.rows) if module in PARTS["qkv"][:2] else blocks.rows
            setattr(layer, field, self._packed(blocks.kind, rows, biases.get(field)))
        fill_layer(layer, prefix, index, self.tensors, self._cache, self.held)
        layer.window = self._config.window if index in self._config.windowed_layers else 0

    def _biases(self, prefix: str) -> dict[str, np.ndarray]:
        biases = {}
        if (bias := self.tensors.qkv_bias(prefix)) is not None:
            widths = [self._shapes[field][0] for field in "qkv"]
            biases |= {field: part.numpy() for field, part in zip("qkv", bias.split(widths), strict=True)}
        if (bias := self.tensors.output_bias(prefix)) is not None:
            biases["output"] = bias.numpy()
        return biases

    def _blocks(self, name: str, shape: tuple[int, int]) -> StoredBlocks:
        blocks = self._source.blocks(name)
        if blocks.shape != shape:
            raise ConfigError(f"the tensor '{name}' is {list(blocks.shape)}; its configuration says {list(shape)}")
        return blocks

    def _rotary_order(self, rows: np.ndarray) -> np.ndarray:
        """Rows of each head from halves to pairs, where the file has halves."""
        if self._source.interleaved:
            return rows
        halves = rows.reshape(-1, 2, self._config.head_dim // 2, rows.shape[1])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)

    def _packed(self, kind: int, rows: np.ndarray, bias: np.ndarray | None = None) -> MatrixStruct:
        matrix = self._kernels.pack(kind, rows, bias, self._memory)
        self.held.objects.append(matrix)
        return matrix.struct
