"""From a checkpoint to weights on the device: fused, quantized on the way, rotary rows in halves as the kernels turn
them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint.checkpoint import Progress
from checkpoint.config import ModelConfig
from contracts.errors import ConfigError
from engine.cuda.formats import DeviceFormat
from engine.rope import rope_frequencies
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
        self._config, self._source, self._format, self._device = config, source, number_format, device
        self._q_width = config.num_heads * config.head_dim
        self._kv_width = config.num_kv_heads * config.head_dim

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        gate_up = [self._tensor(prefix + f"mlp.{name}_proj.weight", inner, hidden) for name in ("gate", "up")]
        return LayerWeights(
            attention_gain=self._rows(self._tensor(prefix + "input_layernorm.weight", hidden)),
            qkv=self._matrix(self._qkv(prefix), self._bias(prefix)),
            output=self._matrix(self._tensor(prefix + "self_attn.o_proj.weight", hidden, self._q_width)),
            mlp_gain=self._rows(self._tensor(prefix + "post_attention_layernorm.weight", hidden)),
            gate_up=self._matrix(torch.cat(gate_up)),
            down=self._matrix(self._tensor(prefix + "mlp.down_proj.weight", hidden, inner)),
            q_gain=self._head_gain(prefix + "self_attn.q_norm.weight"),
            k_gain=self._head_gain(prefix + "self_attn.k_norm.weight"),
        )

    def ends(self) -> tuple[Tensor, Tensor, Matrix]:
        """The embedding table, the final norm's gain and the output head."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        table = self._tensor("model.embed_tokens.weight", *shape)
        embedding = self._rows(table)
        if not self._config.tied_embeddings:
            table = self._tensor("lm_head.weight", *shape)
        is_table = self._config.tied_embeddings and not self._format.head_is_fp8
        head = Matrix(embedding) if is_table else self._matrix(table, fp8=self._format.head_is_fp8)
        return embedding, self._rows(self._tensor("model.norm.weight", self._config.hidden_size)), head

    def _matrix(self, weight: Tensor, bias: Tensor | None = None, fp8: bool | None = None) -> Matrix:
        if not (self._format.is_fp8 if fp8 is None else fp8):
            return Matrix(self._rows(weight), None, bias)
        quantized = quantize_rows(weight.float())
        return Matrix(quantized.weight, quantized.scale, bias)

    def _qkv(self, prefix: str) -> Tensor:
        return torch.cat([self._projection(prefix, name, self._config.hidden_size) for name in "qkv"])

    def _bias(self, prefix: str) -> Tensor | None:
        if not self._config.qkv_bias:
            return None
        return self._rows(torch.cat([self._projection(prefix, name) for name in "qkv"]))

    def _projection(self, prefix: str, name: str, *columns: int) -> Tensor:
        """The weight of q, k or v, or without `columns` its bias."""
        rows = self._q_width if name == "q" else self._kv_width
        tensor = self._tensor(f"{prefix}self_attn.{name}_proj.{'weight' if columns else 'bias'}", rows, *columns)
        return self._halves(tensor) if name != "v" and self._source.interleaved else tensor

    def _halves(self, tensor: Tensor) -> Tensor:
        """Rows of each head from pairs (x0, y0, x1, y1, ..) to halves (x0, x1, .., y0, y1, ..)."""
        pairs = tensor.view(-1, self._config.head_dim // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)

    def _head_gain(self, name: str) -> Tensor | None:
        if not self._config.qk_norm:
            return None
        gain = self._tensor(name, self._config.head_dim)
        return self._rows(self._halves(gain) if self._source.interleaved else gain)

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._format.rows)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._source.tensor(name)
        if tensor.shape != shape:
            raise ConfigError(f"the tensor '{name}' is {list(tensor.shape)}; its configuration says {list(shape)}")
        return tensor.to(self._device)
