"""The tensors of a decoder in a checkpoint, by their part in it: fused, and of the shapes that its config.json says."""

import torch

from checkpoint.config import ModelConfig
from contracts.errors import ConfigError
from engine.weights import WeightSource


class ModelTensors:
    """`prefix` is that of a layer, see `layer_prefix`. `interleaved`: how rows of q and k are wanted, the parts of a
    rotary pair side by side, or in halves.

    All methods raise ConfigError for a tensor that is missing or has another shape than the configuration says.
    """

    def __init__(self, config: ModelConfig, source: WeightSource, interleaved: bool) -> None:
        self._config, self._source, self._interleaved = config, source, interleaved
        self._q_width = config.num_heads * config.head_dim
        self._kv_width = config.num_kv_heads * config.head_dim

    def embedding(self) -> torch.Tensor:
        return self._tensor("model.embed_tokens.weight", self._config.vocab_size, self._config.hidden_size)

    def head(self) -> torch.Tensor:
        """Of a model that does not take its embedding for it."""
        return self._tensor("lm_head.weight", self._config.vocab_size, self._config.hidden_size)

    def gain(self, name: str) -> torch.Tensor:
        """Of a norm over the hidden size."""
        return self._tensor(f"{name}.weight", self._config.hidden_size)

    def qkv(self, prefix: str) -> torch.Tensor:
        return torch.cat([self._projection(prefix, name, self._config.hidden_size) for name in "qkv"])

    def qkv_bias(self, prefix: str) -> torch.Tensor | None:
        if not self._config.qkv_bias:
            return None
        return torch.cat([self._projection(prefix, name) for name in "qkv"])

    def head_gain(self, prefix: str, name: str) -> torch.Tensor | None:
        """Of the norm over each head of q or k, if there is one."""
        if not self._config.qk_norm:
            return None
        return self._turned(self._tensor(f"{prefix}self_attn.{name}_norm.weight", self._config.head_dim))

    def output(self, prefix: str) -> torch.Tensor:
        return self._tensor(prefix + "self_attn.o_proj.weight", self._config.hidden_size, self._q_width)

    def gate_up(self, prefix: str) -> torch.Tensor:
        shape = (self._config.intermediate_size, self._config.hidden_size)
        return torch.cat([self._tensor(f"{prefix}mlp.{name}_proj.weight", *shape) for name in ("gate", "up")])

    def down(self, prefix: str) -> torch.Tensor:
        return self._tensor(prefix + "mlp.down_proj.weight", self._config.hidden_size, self._config.intermediate_size)

    def _projection(self, prefix: str, name: str, *columns: int) -> torch.Tensor:
        """The weight of q, k or v, or without `columns` its bias."""
        rows = self._q_width if name == "q" else self._kv_width
        tensor = self._tensor(f"{prefix}self_attn.{name}_proj.{'weight' if columns else 'bias'}", rows, *columns)
        return tensor if name == "v" else self._turned(tensor)

    def _turned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of each head from pairs (x0, y0, x1, y1, ..) to halves (x0, x1, .., y0, y1, ..), or back."""
        if self._interleaved == self._source.interleaved:
            return tensor
        half = self._config.head_dim // 2
        split = (2, half) if self._interleaved else (half, 2)
        return tensor.view(-1, *split, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._source.tensor(name)
        if tensor.shape != shape:
            raise ConfigError(f"the tensor '{name}' is {list(tensor.shape)}; its configuration says {list(shape)}")
        return tensor


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."
