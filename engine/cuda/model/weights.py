"""From a checkpoint to weights on the device: fused, quantized on the way, rotary rows in halves as the kernels turn
them.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint.checkpoint import Progress
from checkpoint.quantization import BLOCK
from contracts.errors import ConfigError
from engine.cuda.model.format_choice import INT4_GROUP, rounds_sparingly
from engine.cuda.model.moe import ExpertWeights
from engine.cuda.model.number_formats import DeviceFormat
from engine.model.rotary_embedding import attention_temperatures, rope_frequencies
from engine.model_loader.checkpoint_weights import WeightSource
from engine.model_loader.decoder_tensors import ExpertMatrix, ModelTensors, Mxfp4, layer_prefix, widened
from engine.model_loader.quantized_matrices import Fp8Matrix, Int4Matrix, StoredMatrix, joined
from engine.model_loader.tensor_parallel_shards import WHOLE, Shard
from kernels.layouts import pair_gate_up, tile_int4, tile_mxfp4
from kernels.reference.quant import to_e4m3, token_scale
from models.config import Experts, ModelConfig

MIN_SCALE = 1e-6
"""Of what is divided before it is rounded to e4m3: a layer that was all zeros while it was calibrated stays finite."""


_GROUP, _SCALE_STEPS = 32, 8
"""Columns that share a scale where activations stay plain, and how many scales they are tried with, within a power of
two: with 16 the loss is no smaller (docs/models.md).
"""

Recipe = Literal["plain", "row", "block128", "w8", "int4"]


@dataclass(frozen=True)
class Matrix:
    """A weight `[n, k]`, by recipe:

    - plain: of the activations' type;
    - row: e4m3, `scale` float32 `[n]`;
    - block128: e4m3, `scale` float32 `[ceil(n / 128), k / 128]`;
    - w8: e4m3 beside plain rows of activations (`rounds_rows` false), `scale` as either, or `[n, ceil(k / 32)]`;
    - int4: int16 words, and as `scale` int32 factors, in the tiles of kernels.layouts.tile_int4.

    `bias`: `[n]`, of the activations' type, added by whoever reads a product. `input_scale`: what the checkpoint
    divides its rows of activations by before they are rounded; not of several matrices that were fused.
    """

    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    input_scale: float | None = None
    rounds_rows: bool = True

    @property
    def recipe(self) -> Recipe:
        if self.scale is None:
            return "plain"
        if self.weight.dtype is torch.int16:
            return "int4"
        if not self.rounds_rows:
            return "w8"
        return "row" if self.scale.dim() == 1 else "block128"

    @property
    def shape(self) -> tuple[int, int]:
        """n and k."""
        n, k = self.weight.shape[:2]
        return (n * 64, k * 128) if self.recipe == "int4" else (n, k)


@dataclass(frozen=True)
class AttentionWindow:
    """What the tokens of a layer see: the newest `window` tokens or, with 0, all, or all of their segment; and a logit
    for each head, `[heads]` float32, of a sink that no token owns.
    """

    window: int = 0
    sinks: Tensor | None = None
    in_segments: bool = False


@dataclass(frozen=True)
class MlpWeights:
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class DeviceLayerWeights:
    """`gate_up` and `down` are those of a layer without experts; `shared` is one that all tokens go through beside
    theirs. `is_turned`: by rope.
    """

    attention_gain: Tensor
    qkv: Matrix
    output: Matrix
    mlp_gain: Tensor
    mlp: MlpWeights | ExpertWeights
    q_gain: Tensor | None
    k_gain: Tensor | None
    sight: AttentionWindow
    shared: MlpWeights | None = None
    is_rotated: bool = True

    def matrices(self) -> tuple[Matrix, ...]:
        """All but those of experts."""
        gated = [mlp for mlp in (self.mlp, self.shared) if isinstance(mlp, MlpWeights)]
        return self.qkv, self.output, *(matrix for mlp in gated for matrix in (mlp.gate_up, mlp.down))

    @property
    def gate_up(self) -> Matrix:
        return self.dense.gate_up

    @property
    def down(self) -> Matrix:
        return self.dense.down

    @property
    def dense(self) -> MlpWeights:
        assert isinstance(self.mlp, MlpWeights), "this layer has experts"
        return self.mlp


@dataclass(frozen=True)
class DeviceWeights:
    """`cos_sin` `[max_model_len, head_dim]`: cosines, then sines. `kv_scales` `[layers, 2]`, on the host: those of K
    and V that the checkpoint brings. `tunings` `[max_model_len]`: what q is multiplied by in layers that rope does not
    turn, if not by 1.
    """

    embedding: Tensor
    layers: tuple[DeviceLayerWeights, ...]
    final_gain: Tensor
    head: Matrix
    cos_sin: Tensor
    kv_scales: Tensor | None = None
    attention_temperatures: Tensor | None = None

    def input_scales(self) -> Tensor | None:
        """`[layers, 2]`: those of attention's output and of the MLP's middle, if the checkpoint brings all."""
        if any(not isinstance(layer.mlp, MlpWeights) for layer in self.layers):
            return None
        scales = [[layer.output.input_scale, layer.down.input_scale] for layer in self.layers]
        if any(scale is None for pair in scales for scale in pair):
            return None
        return torch.tensor(scales, device=self.embedding.device).clamp(min=MIN_SCALE)


def load_device_weights(
    config: ModelConfig,
    source: WeightSource,
    number_format: DeviceFormat,
    max_model_len: int,
    device: torch.device,
    progress: Progress,
    shard: Shard = WHOLE,
) -> DeviceWeights:
    """`config` and `source` are those of the `shard`. Raises ConfigError for a tensor that is missing or has another
    shape than the configuration says.
    """
    loader = _DeviceWeightLoader(config, source, number_format, device, shard)
    layers = []
    for index in range(config.num_layers):
        progress("load", index, config.num_layers)
        layers.append(loader.layer(index))
    embedding, final_gain, head = loader.ends()
    turns = rope_frequencies(config, max_model_len)
    cos_sin = torch.cat([turns.real, turns.imag], 1).contiguous().to(device)
    progress("load", config.num_layers, config.num_layers)
    scales = attention_temperatures(config, max_model_len)
    scales = None if scales is None else scales.to(device)
    return DeviceWeights(embedding, tuple(layers), final_gain, head, cos_sin, loader.kv_scales(), scales)


def shortened(layers: Sequence[DeviceLayerWeights]) -> Sequence[DeviceLayerWeights]:
    """The fewest of the first ones and the last that launch every kernel that all do. What a layer launches depends on
    its kind and on the next one's, and on whether it is the first or the last one.
    """
    known = dict[Hashable, int]()
    kinds = [known.setdefault(_kind(layer), len(known)) for layer in layers]
    pairs = set(pairwise(kinds))
    for left_out in range(len(layers) - 3, 0, -1):
        for start in range(2, len(layers) - left_out):
            end = start + left_out
            if set(pairwise([*kinds[:start], *kinds[end:]])) == pairs:
                return [*layers[:start], *layers[end:]]
    return layers


def _kind(weights: object) -> Hashable:
    """What tells weights apart that launch different kernels: not the values of tensors, and of scales."""
    match weights:
        case Tensor():
            return weights.shape, weights.dtype
        case float():
            return float
    if is_dataclass(weights):
        return tuple(_kind(getattr(weights, field.name)) for field in fields(weights))
    return weights


def quantize_rows(weight: Tensor) -> Matrix:
    """e4m3 with the scale that maps each row's largest magnitude to 448."""
    scale = token_scale(weight).float()
    return Matrix(to_e4m3(weight / scale[:, None]), scale)


def quantize_finely(weight: Tensor) -> Matrix:
    """For rows of activations that stay plain: e4m3 with that scale for each 32 columns of a row, of some that cut off
    nothing, which leaves the least squared error.
    """
    n, k = weight.shape
    groups = F.pad(weight, (0, -k % _GROUP)).view(n, -1, _GROUP)
    scale = best = token_scale(groups).float()
    least = torch.full_like(scale, torch.inf)
    for step in range(_SCALE_STEPS):
        tried = scale * 2 ** (step / _SCALE_STEPS)
        error = (to_e4m3(groups / tried[..., None]).float() * tried[..., None] - groups).square().sum(-1)
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    rounded = to_e4m3(groups / best[..., None]).view(n, -1)[:, :k].contiguous()
    return Matrix(rounded, best, rounds_rows=False)


def keep(stored: list[StoredMatrix], int4: bool, name: str, rounds_rows: bool = True) -> Matrix | None:
    """Stored matrices one below the other, as the kernels read them. None where there are none, or are of the other
    kind than wanted. Raises ConfigError for shapes that the kernels do not take.
    """
    floats = [matrix for matrix in stored if isinstance(matrix, Fp8Matrix)]
    codes = [matrix for matrix in stored if isinstance(matrix, Int4Matrix)]
    if int4 and codes:
        return _int4(codes, name)
    if int4 or not floats:
        return None
    if floats[0].is_blocks:
        _require_blocks(floats, name, rounds_rows)
    whole = joined(floats)
    return Matrix(whole.weight, whole.scale, input_scale=whole.input_scale, rounds_rows=rounds_rows)


def _require_blocks(matrices: list[Fp8Matrix], name: str, rounds_rows: bool) -> None:
    """Below each other, blocks must not straddle two matrices; rows of activations are rounded by whole blocks."""
    if any(matrix.shape[0] % BLOCK for matrix in matrices[:-1]) or (rounds_rows and matrices[0].shape[1] % BLOCK):
        columns = ", and columns," if rounds_rows else ""
        _refuse(matrices, name, f"rows of all but the last{columns} in steps of {BLOCK}")


def _int4(matrices: list[Int4Matrix], name: str) -> Matrix:
    if any(matrix.shape[0] % 64 or matrix.shape[1] % INT4_GROUP for matrix in matrices):
        _refuse(matrices, name, f"rows in steps of 64 and columns in steps of {INT4_GROUP}")
    if not all(matrix.is_ordered for matrix in matrices):
        _refuse(matrices, name, "groups of one size, their columns side by side in g_idx")
    tiles = [tile_int4(matrix.codes, matrix.scale, matrix.zero) for matrix in matrices]
    words, factors = (torch.cat(tensors) for tensors in zip(*tiles, strict=True))
    return Matrix(words, factors)


def _refuse(matrices: Sequence[StoredMatrix], name: str, wanted: str) -> NoReturn:
    shapes = ", ".join(str(list(matrix.shape)) for matrix in matrices)
    raise ConfigError(f"the quantized matrices of {name} are {shapes}; the kernels want {wanted}: use dtype bfloat16")


Round = Callable[[Tensor], Matrix]
"""How a float32 weight becomes e4m3: `quantize_rows` or `quantize_finely`."""


def _stacked(matrices: Sequence[Matrix]) -> tuple[Tensor, Tensor]:
    """Weights and scales, of no columns where there are none."""
    weight = torch.stack([matrix.weight for matrix in matrices])
    scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
    return weight, torch.stack(scales) if scales else weight.new_empty(len(weight), 0, dtype=torch.float32)


class _DeviceWeightLoader:
    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        number_format: DeviceFormat,
        device: torch.device,
        shard: Shard,
    ) -> None:
        self._config, self._format, self._device, self._shard = config, number_format, device, shard
        self._tensors = ModelTensors(config, source, False, config.vocab_size // shard.size)
        found = None if source.quantized is None else source.quantized.quantization
        self._rounds_rows = found is None or found.rounds_activations
        # What the checkpoint leaves plain beside its FP8 is so for a reason.
        self._round: Round | None = None
        if number_format.is_fp8 and (found is None or found.is_int4):
            self._round = quantize_finely if rounds_sparingly(config) else quantize_rows

    def layer(self, index: int) -> DeviceLayerWeights:
        tensors, prefix = self._tensors, layer_prefix(index)
        return DeviceLayerWeights(
            attention_gain=self._rows(tensors.gain(prefix + "input_layernorm")),
            qkv=self._matrix(prefix, "qkv", self._round, self._optional(tensors.qkv_bias(prefix))),
            output=self._matrix(prefix, "output", self._round, self._optional(tensors.output_bias(prefix))),
            mlp_gain=self._rows(tensors.gain(prefix + "post_attention_layernorm")),
            mlp=self._mlp(index),
            q_gain=self._optional(tensors.head_gain(index, "q")),
            k_gain=self._optional(tensors.head_gain(index, "k")),
            sight=self._sight(index),
            shared=self._shared(index),
            is_rotated=index not in self._config.no_rope_layers,
        )

    def _sight(self, index: int) -> AttentionWindow:
        sinks = self._tensors.sinks(layer_prefix(index))
        is_windowed = index in self._config.windowed_layers
        window, in_segments = (self._config.window, self._config.segment > 0) if is_windowed else (0, False)
        return AttentionWindow(window, None if sinks is None else sinks.to(self._device).float(), in_segments)

    def _shared(self, index: int) -> MlpWeights | None:
        experts = self._config.experts_of(index)
        if experts is None or not experts.as_llama4:
            return None
        parts = ("shared_gate_up", "shared_down")
        return MlpWeights(*(self._matrix(layer_prefix(index), part, self._round) for part in parts))

    def _mlp(self, index: int) -> MlpWeights | ExpertWeights:
        tensors, prefix, experts = self._tensors, layer_prefix(index), self._config.experts_of(index)
        if experts is None:
            is_kept = index == self._config.num_layers - 1 and rounds_sparingly(self._config)
            round_to = None if is_kept else self._round
            return MlpWeights(self._matrix(prefix, "gate_up", round_to), self._matrix(prefix, "down", round_to))
        (gate_up, gate_up_scale), (down, down_scale) = self._experts(experts, prefix)
        gate_up_bias, down_bias = tensors.expert_biases(prefix)
        return ExpertWeights(
            router=self._rows(tensors.router(prefix)),
            router_bias=self._optional(tensors.router_bias(prefix)),
            gate_up=gate_up,
            gate_up_scale=gate_up_scale,
            gate_up_bias=self._optional(gate_up_bias),
            down=down,
            down_scale=down_scale,
            down_bias=self._optional(down_bias),
        )

    def _experts(self, experts: Experts, prefix: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Weights and scales of gate and up, and of down."""
        if experts.is_mxfp4 and self._format.keeps_mxfp4:
            gate_up, down = self._tensors.mxfp4_experts(prefix)
            return self._tiled(gate_up, is_pair=True), self._tiled(down, is_pair=False)
        each = self._tensors.experts(prefix)
        pairs = ((self._expert(expert.gate_up), self._expert(expert.down)) for expert in each)
        gate_ups, downs = zip(*pairs, strict=True)
        return _stacked(gate_ups), _stacked(downs)

    def _tiled(self, stored: Mxfp4, is_pair: bool) -> tuple[Tensor, Tensor]:
        """Words and scales of all matrices in the order that the kernels read; `is_pair`: of gates above ups."""
        tiles = []
        for values, scales in zip(stored.values, stored.scales, strict=True):  # one by one: this takes room
            parts = values.to(self._device).flatten(-2), scales.to(self._device)
            tiles.append(tile_mxfp4(*map(pair_gate_up, parts) if is_pair else parts))
        words, shifted = zip(*tiles, strict=True)
        return torch.stack(words), torch.stack(shifted)

    def _expert(self, stored: ExpertMatrix) -> Matrix:
        """A group of experts is one product, of one type: what is not e4m3 with scales by row is made so."""
        if self._format.is_fp8 and isinstance(stored, Fp8Matrix):
            return Matrix(stored.weight.to(self._device), stored.scale.to(self._device))
        weight = widened(stored)
        return self._rounded(weight, quantize_rows) if self._format.is_fp8 else Matrix(self._rows(weight))

    def ends(self) -> tuple[Tensor, Tensor, Matrix]:
        """The embedding table, the final norm's gain and the output head."""
        table = self._tensors.embedding()
        embedding = self._rows(table)
        if not self._config.tied_embeddings:
            head = self._matrix("", "head", quantize_rows if self._format.head_is_fp8 else None)
        else:
            stored = table if self._format.head_is_fp8 else embedding
            rows = stored.chunk(self._shard.size)[self._shard.rank]
            head = self._rounded(rows, quantize_rows) if self._format.head_is_fp8 else Matrix(rows)
        return embedding, self._rows(self._tensors.gain("model.norm")), head

    def kv_scales(self) -> Tensor | None:
        scales = [self._tensors.kv_scales(layer_prefix(index)) for index in range(self._config.num_layers)]
        whole = [pair for pair in scales if pair is not None]
        return torch.tensor(whole).clamp(min=MIN_SCALE) if len(whole) == len(scales) else None

    def _matrix(self, prefix: str, part: str, round_to: Round | None, bias: Tensor | None = None) -> Matrix:
        """As it is stored where the format keeps that; else widened, and rounded to e4m3 if it is said how."""
        if self._format.is_fp8 or self._format.is_int4:
            stored = self._tensors.stored(prefix, part)
            kept = keep(stored, self._format.is_int4, f"{prefix}{part}", self._rounds_rows)
            if kept is not None:
                return replace(kept, bias=bias)
        weight = self._tensors.fused(prefix, part)
        matrix = Matrix(self._rows(weight)) if round_to is None else self._rounded(weight, round_to)
        return replace(matrix, bias=bias)

    def _rounded(self, weight: Tensor, round_to: Round) -> Matrix:
        return round_to(weight.to(self._device).float())

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device).to(self._format.rows)

    def _optional(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self._rows(tensor)
