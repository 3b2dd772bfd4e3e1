"""The way of weights from a checkpoint to the device.

Fused, quantized, rotary rows in halves for the kernels.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from checkpoint.checkpoint import Progress
from engine.cuda.model.format_choice import rounds_sparingly
from engine.cuda.model.matrices import Matrix, Round, keep, quantize_finely, quantize_rows
from engine.cuda.model.moe import ExpertWeights
from engine.cuda.model.number_formats import DeviceFormat
from engine.cuda.model.weights import MIN_SCALE, AttentionWindow, DeviceLayerWeights, DeviceWeights, MlpWeights
from engine.model.rotary_embedding import attention_temperatures, rope_frequencies
from engine.model_loader.checkpoint_weights import WeightSource
from engine.model_loader.decoder_tensors import ExpertMatrix, ModelTensors, Mxfp4, layer_prefix, widened
from engine.model_loader.quantized_matrices import Fp8Matrix
from engine.model_loader.tensor_parallel_shards import WHOLE, Shard
from kernels.layouts import pair_gate_up, tile_mxfp4
from models.config import Experts, ModelConfig


def load_device_weights(
    config: ModelConfig,
    source: WeightSource,
    number_format: DeviceFormat,
    max_model_len: int,
    device: torch.device,
    progress: Progress,
    shard: Shard = WHOLE,
) -> DeviceWeights:
    """`config` and `source` are those of the `shard`.

    Raises ConfigError for a tensor that is missing or has another shape than the configuration says.
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
        if number_format.is_fp8 and (found is None or not found.is_fp8):
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
        prefix = layer_prefix(index)
        gate_up = self._matrix(prefix, "shared_gate_up", self._round)
        return MlpWeights(gate_up, self._matrix(prefix, "shared_down", self._round))

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
        """Return it as it is stored where the format keeps that.

        Else widened, and rounded to e4m3 if it is said how.
        """
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
