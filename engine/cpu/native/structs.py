"""What the native structs of a model and of a draft head have in common."""

from typing import Any, Protocol

import numpy as np
import torch

from engine.cpu.kv_cache import KVCache
from kernels.cpu.native import LayerStruct
from models.config import ModelConfig
from models.eagle3 import Eagle3Config


class LayerGains(Protocol):
    """The gains of a checkpoint's norms."""

    def gain(self, name: str, /) -> torch.Tensor: ...

    def head_gain(self, index: int, name: str, /) -> torch.Tensor | None: ...


class HeldObjects:
    """All that structs point to, kept as long as they are."""

    def __init__(self, *objects: Any) -> None:
        self.objects: list[Any] = list(objects)

    def address(self, tensor: torch.Tensor | None) -> int | None:
        """Return where the tensor's values lie in float32, one after the other; None for no tensor."""
        if tensor is None:
            return None
        array = np.ascontiguousarray(tensor.numpy(), np.float32)
        self.objects.append(array)
        return array.ctypes.data


def fill_layer(
    layer: LayerStruct, prefix: str, index: int, gains: LayerGains, cache: KVCache, held: HeldObjects
) -> None:
    """Set the gains of a layer and where its K and V go."""
    layer.attention_gain = held.address(gains.gain(prefix + "input_layernorm"))
    layer.mlp_gain = held.address(gains.gain(prefix + "post_attention_layernorm"))
    layer.q_gain = held.address(gains.head_gain(index, "q"))
    layer.k_gain = held.address(gains.head_gain(index, "k"))
    pages = cache.pages(index)
    layer.keys = pages.data_ptr()
    layer.values = pages.data_ptr() + pages.numel() * pages.element_size() // 2


def shape_fields(config: ModelConfig | Eagle3Config, cache: KVCache) -> dict[str, Any]:
    """Return the fields of ModelStruct that a configuration and a cache determine."""
    return {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "inner_size": config.intermediate_size,
        "num_layers": config.num_layers,
        "block_size": cache.group.block_size,
        "is_kv_float32": int(cache.dtype is torch.float32),
        "norm_eps": config.norm_eps,
    }
