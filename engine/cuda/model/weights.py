"""The weights of a model on a device, layer by layer."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.cuda.model.matrices import Matrix
from engine.cuda.model.moe import ExpertWeights

MIN_SCALE = 1e-6
"""The least scale by which values are divided before they are rounded to e4m3: a layer that was all zeros while it was
calibrated stays finite.
"""


@dataclass(frozen=True)
class AttentionWindow:
    """What the tokens of a layer see: the newest `window` tokens or, with 0, all, or all of their segment.

    And a logit for each head, `[heads]` float32, of a sink that no token owns.
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
    """`gate_up` and `down` are those of a layer without experts.

    `shared` is one that all tokens go through beside theirs. `is_turned`: by rope.
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
    """`cos_sin` `[max_model_len, head_dim]`: cosines, then sines.

    `kv_scales` `[layers, 2]`, on the host: those of K and V that the checkpoint brings. `tunings` `[max_model_len]`:
    what q is multiplied by in layers that rope does not turn, if not by 1.
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


def shortened(layers: Sequence[DeviceLayerWeights]) -> Sequence[DeviceLayerWeights]:
    """The fewest of the first ones and the last that launch every kernel that all do.

    What a layer launches depends on its kind and on the next one's, and on whether it is the first or the last one.
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
