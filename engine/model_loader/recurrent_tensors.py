"""The tensors of a recurrent layer in a checkpoint, by key heads.

They are of the shapes that its config.json says. Qwen3-Next stores query, key, values and gates of each key head one
below the other, and so beta and time steps; Qwen3.5 stores all queries, then all keys, and so on. Here both are as the
former.
"""

import torch

from engine.model_loader.checkpoint_weights import WeightSource
from engine.model_loader.decoder_tensors import require_shape
from models.config import Recurrence

_MODULE = "linear_attn"


class RecurrentTensors:
    """The tensors of the layer whose names begin with `prefix`.

    All methods raise ConfigError for a tensor that is missing or has another shape than the configuration says.
    """

    def __init__(self, shape: Recurrence, hidden_size: int, source: WeightSource, prefix: str) -> None:
        self._shape, self._hidden, self._source = shape, hidden_size, source
        self._prefix = f"{prefix}{_MODULE}."
        keys, values = shape.num_key_heads * shape.key_dim, shape.num_value_heads * shape.value_dim
        self._keys, self._values = keys, values

    def projection(self) -> torch.Tensor:
        """Return what gives columns and gates, `[key heads * (C + gates), hidden]`.

        See engine.cpu.recurrent_layer.
        """
        if self._shape.as_qwen3_next:
            return self._weight("in_proj_qkvz", 2 * self._keys + 2 * self._values, self._hidden)
        mixed = self._by_key_head(self._weight("in_proj_qkv", 2 * self._keys + self._values, self._hidden))
        gates = self._weight("in_proj_z", self._values, self._hidden)
        heads = [mixed, gates.view(self._shape.num_key_heads, -1, self._hidden)]
        return torch.cat(heads, 1).flatten(0, 1)

    def rates(self) -> torch.Tensor:
        """Return what gives beta and time steps, `[2 * value heads, hidden]`, beta's rows first."""
        heads = self._shape.num_value_heads
        if not self._shape.as_qwen3_next:
            return torch.cat([self._weight(f"in_proj_{name}", heads, self._hidden) for name in "ba"])
        stored = self._weight("in_proj_ba", 2 * heads, self._hidden)
        by_head = stored.view(self._shape.num_key_heads, 2, self._shape.group, self._hidden)
        return by_head.transpose(0, 1).reshape(2 * heads, self._hidden)

    def convolution(self) -> torch.Tensor:
        """Return the weights of the causal convolution, `[W, key heads, C]`."""
        stored = self._weight("conv1d", 2 * self._keys + self._values, 1, self._shape.conv_width)
        return self._by_key_head(stored[:, 0]).permute(2, 0, 1).contiguous()

    def of_heads(self, name: str) -> torch.Tensor:
        """Return a parameter of each value head."""
        return self._tensor(name, self._shape.num_value_heads)

    def gain(self) -> torch.Tensor:
        """Return the gain of the norm of each head's output."""
        return self._weight("out_gain", self._shape.value_dim)

    def output(self) -> torch.Tensor:
        """Return the output projection, `[hidden, value heads * V]`."""
        return self._weight("out_proj", self._hidden, self._values)

    def _by_key_head(self, stored: torch.Tensor) -> torch.Tensor:
        """Return rows of all queries, all keys and all values, `[2 keys + values, n]`, as `[key heads, C, n]`."""
        parts = stored.split([self._keys, self._keys, self._values])
        return torch.cat([part.view(self._shape.num_key_heads, -1, part.shape[1]) for part in parts], 1)

    def _weight(self, module: str, *shape: int) -> torch.Tensor:
        return self._tensor(f"{module}.weight", *shape)

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._source.tensor(self._prefix + name)
        require_shape(self._prefix + name, tuple(tensor.shape), shape)
        return tensor
