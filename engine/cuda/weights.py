"""From a checkpoint to weights on the device: fused, quantized on the way, rotary rows in halves as the kernels turn
them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint.checkpoint import Progress
from checkpoint.config import ModelConfig
from engine.cuda.formats import DeviceFormat
from engine.rope import rope_frequencies
from engine.tensors import ModelTensors, layer_prefix
from engine.weights import WeightSource
from kernels.reference.quant import to_e4m3, token_scale


@dataclass(frozen=True)
class Matrix:
    """`weight` `[n, k]`: e4m3 with a float32 `scale` for each row, or of the activations' type without one."""

    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    attention_gain: Tensor
    qkv: Matrix
    output: Matrix
    mlp_gain: Tensor
    gate_up: Matrix
    down: Matrix
    q_gain: Tensor | None
    k_gain: Tensor | None


@dataclass(frozen=True)
class DeviceWeights:
    """`cos_sin` `[max_model_len, head_dim]`: cosines, then sines."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_gain: Tensor
    head: Matrix
    cos_sin: Tensor


def load_device_weights(
    config: ModelConfig,
    source: WeightSource,
    number_format: DeviceFormat,
    max_model_len: int,
    device: torch.device,
    progress: Progress,
) -> DeviceWeights:
    """Raises ConfigError for a tensor that is missing or has another shape than the configuration says."""
    loader = _Loader(config, source, number_format, device)
    layers = []
    for index in range(config.num_layers):
        progress("load", index, config.num_layers)
        layers.append(loader.layer(index))
    embedding, final_gain, head = loader.ends()
    turns = rope_frequencies(config, max_model_len)
    cos_sin = torch.cat([turns.real, turns.imag], 1).contiguous().to(device)
    progress("load", config.num_layers, config.num_layers)
    return DeviceWeights(embedding, tuple(layers), final_gain, head, cos_sin)


def quantize_rows(weight: Tensor) -> Matrix:
    """e4m3 with the scale that maps each row's largest magnitude to 448."""
    scale = token_scale(weight).float()
    return Matrix(to_e4m3(weight / scale[:, None]), scale)


class _Loader:
    def __init__(
        self, config: ModelConfig, source: WeightSource, number_format: DeviceFormat, device: torch.device
    ) -> None:
        self._config, self._format, self._device = config, number_format, device
        self._tensors = ModelTensors(config, source, interleaved=False)

    def layer(self, index: int) -> LayerWeights:
        tensors, prefix = self._tensors, layer_prefix(index)
        return LayerWeights(
            attention_gain=self._rows(tensors.gain(prefix + "input_layernorm")),
            qkv=self._matrix(tensors.qkv(prefix), self._optional(tensors.qkv_bias(prefix))),
            output=self._matrix(tensors.output(prefix)),
            mlp_gain=self._rows(tensors.gain(prefix + "post_attention_layernorm")),
            gate_up=self._matrix(tensors.gate_up(prefix)),
            down=self._matrix(tensors.down(prefix)),
            q_gain=self._optional(tensors.head_gain(prefix, "q")),
            k_gain=self._optional(tensors.head_gain(prefix, "k")),
        )

    def ends(self) -> tuple[Tensor, Tensor, Matrix]:
        """The embedding table, the final norm's gain and the output head."""
        table = self._tensors.embedding()
        embedding = self._rows(table)
        if not self._config.tied_embeddings:
            table = self._tensors.head()
        is_table = self._config.tied_embeddings and not self._format.head_is_fp8
        head = Matrix(embedding) if is_table else self._matrix(table, fp8=self._format.head_is_fp8)
        return embedding, self._rows(self._tensors.gain("model.norm")), head

    def _matrix(self, weight: Tensor, bias: Tensor | None = None, fp8: bool | None = None) -> Matrix:
        if not (self._format.is_fp8 if fp8 is None else fp8):
            return Matrix(self._rows(weight), None, bias)
        quantized = quantize_rows(weight.to(self._device).float())
        return Matrix(quantized.weight, quantized.scale, bias)

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device).to(self._format.rows)

    def _optional(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else self._rows(tensor)
