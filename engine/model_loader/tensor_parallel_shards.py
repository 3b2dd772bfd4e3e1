"""The part of a model that each GPU of a tensor-parallel group holds.

Heads of attention, a slice of each MLP's middle, rows of the output head (Shoeybi et al. 2019, Megatron-LM). A model's
code knows nothing of it: it is given a smaller configuration and a checkpoint of smaller tensors, and adds up what the
group's members computed where those meet in the hidden size.

Where there are more GPUs than KV heads, neighbours hold the same one: that of their query heads.
"""

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from checkpoint.quantization import BLOCK, Quantization
from contracts.errors import ConfigError
from engine.model_loader.checkpoint_weights import TensorSlice, WeightSource
from engine.model_loader.quantized_matrices import Fp8Experts, Fp8Matrix, IntMatrix, Quantized, StoredMatrix
from models.config import Experts, ModelConfig

_PROJECTION = r"(?:mlp\.|shared_expert\.|experts\.\d+\.)"
_CUTS = {
    r"self_attn\.[qkv]_proj\.(weight|bias)|lm_head\.weight|self_attn\.sinks": 0,
    rf"{_PROJECTION}(gate|up)_proj\.weight": 0,
    rf"self_attn\.o_proj\.weight|{_PROJECTION}down_proj\.weight": 1,
    # All experts of a layer in one tensor, transposed or not. gpt-oss has gate and up in turn, so that a slice of both
    # is one slice.
    r"experts\.down_proj|experts\.gate_up_proj_(bias|blocks|scales)": 1,
    r"experts\.gate_up_proj|experts\.down_proj_(blocks|scales)": 2,
}
"""The dimension along which a tensor is cut, by the end of its name."""
_OF_KV_HEADS = r"self_attn\.[kv]_proj\.(weight|bias)"
_ADDED_ONCE = r"experts\.down_proj_bias"
"""What is added before the sum over the group, so by one of it. All add the bias of attention's output, behind that."""
_EXPERT_STEP = 64
"""Columns of a tile of an expert (kernels.layouts.tile_mxfp4). gpt-oss has 45 times as many: its parts are equal for no
number of GPUs.
"""


@dataclass(frozen=True)
class Shard:
    """Which of how many parts of a model; the first of them is the one that draws tokens."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()


def kv_shard(config: ModelConfig, shard: Shard) -> Shard:
    """Return which part of the KV heads it holds, and of how many.

    Fewer than GPUs where several hold the same head.
    """
    size = min(shard.size, config.num_kv_heads)
    return Shard(shard.rank * size // shard.size, size)


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The model that one of the group computes; its vocabulary is the whole one.

    Raises ConfigError for what can't be shared equally, or as good as that.
    """
    if shard.size == 1:
        return config
    experts, cuts = config.experts, _TensorSlices(config, shard)
    if not config.spreads_kv_heads(shard.size):
        raise ConfigError(
            f"tensor_parallel is {shard.size}; this model has {config.num_kv_heads} KV heads: set a number that "
            "divides them, or a multiple of them"
        )
    counts = {
        "attention heads": config.num_heads,
        "columns in an MLP": config.intermediate_size,
        "columns in an expert": experts.intermediate_size if experts and not cuts.num_pieces else 0,
        "tokens in its vocabulary": config.vocab_size,
    }
    for what, count in counts.items():
        if count % shard.size:
            raise ConfigError(
                f"tensor_parallel is {shard.size}; this model has {count} {what}: set a number that divides them"
            )
    if experts and experts.is_mxfp4:
        _require_tiles(experts.intermediate_size, shard.size)
    return replace(
        config,
        num_heads=config.num_heads // shard.size,
        num_kv_heads=config.num_kv_heads // kv_shard(config, shard).size,
        intermediate_size=config.intermediate_size // shard.size,
        experts=replace(experts, intermediate_size=cuts.expert_width(experts)) if experts else None,
    )


def _require_tiles(num_columns: int, num_gpus: int) -> None:
    """Raise ConfigError where a tile of MXFP4 would be cut, which the kernels read whole.

    Or a scale, for 32 columns.
    """
    if num_columns % _EXPERT_STEP or num_columns < num_gpus * _EXPERT_STEP:
        raise ConfigError(
            f"tensor_parallel is {num_gpus}; this model has {num_columns} columns in an MXFP4 expert: set a number "
            f"that leaves each GPU {_EXPERT_STEP} of them, or a multiple of that"
        )


class ShardedWeights:
    """One part of a checkpoint, as a checkpoint of its own.

    It is an engine.model_loader.checkpoint_weights.WeightSource.
    """

    def __init__(self, source: WeightSource, config: ModelConfig, shard: Shard) -> None:
        self._source, self._cuts, self.interleaved = source, _TensorSlices(config, shard), source.interleaved
        self._is_first = shard.rank == 0
        quantized = source.quantized
        self.quantized: Quantized | None = None if quantized is None else ShardedMatrices(quantized, self._cuts)

    def tensor(self, name: str, cut: TensorSlice | None = None) -> Tensor:
        assert cut is None, "a part is not cut again"
        tensor = self._source.tensor(name, self._cuts.of(name))
        return tensor if self._is_first or not _ends(_ADDED_ONCE, name) else torch.zeros_like(tensor)


class ShardedMatrices:
    """engine.model_loader.quantized_matrices.Quantized, each matrix cut as its plain one would be."""

    def __init__(self, quantized: Quantized, cuts: "_TensorSlices") -> None:
        self._quantized, self._cuts = quantized, cuts

    @property
    def quantization(self) -> Quantization:
        return self._quantized.quantization

    def matrix(self, module: str) -> StoredMatrix | None:
        """Raises ConfigError where a scale would belong to two parts."""
        matrix, cut = self._quantized.matrix(module), self._cuts.of(f"{module}.weight")
        if matrix is None or cut is None:
            return matrix
        said = f"tensor_parallel is {self._cuts.num_gpus}; '{module}'"
        return _fp8(matrix, cut, said) if isinstance(matrix, Fp8Matrix) else _int4(matrix, cut, said)

    def has_weight(self, module: str) -> bool:
        return self._quantized.has_weight(module)

    def experts(self, name: str) -> Fp8Experts | None:
        experts, cut = self._quantized.experts(name), self._cuts.of(name)
        if experts is None or cut is None:
            return experts
        weight = cut.of(experts.weight.view(torch.uint8)).view(experts.weight.dtype)
        return Fp8Experts(weight, cut.along(1).of(experts.scale) if cut.dim == 2 else experts.scale)

    def kv_scale(self, prefix: str, name: str) -> float | None:
        return self._quantized.kv_scale(prefix, name)


class _TensorSlices:
    """The cuts of each tensor.

    `num_pieces` of an expert's middle that are not cut, which some then have one more of than others; 0 if it is cut
    equally.
    """

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        self._shard, self._kv_shard, experts = shard, kv_shard(config, shard), config.experts
        num_pieces, rest = divmod(experts.intermediate_size if experts else 0, _EXPERT_STEP)
        self.num_pieces = num_pieces if rest == 0 and num_pieces > shard.size and num_pieces % shard.size else 0
        # Llama 4 has an expert's gate before its up, in one tensor of all experts.
        self._num_halves = 2 if experts is not None and experts.as_llama4 else 1

    @property
    def num_gpus(self) -> int:
        return self._shard.size

    def of(self, name: str) -> TensorSlice | None:
        dim = next((dim for pattern, dim in _CUTS.items() if _ends(pattern, name)), None)
        if dim is None:
            return None
        if _ends(_OF_KV_HEADS, name):
            return TensorSlice(dim, self._kv_shard.rank, self._kv_shard.size) if self._kv_shard.size > 1 else None
        num_halves = self._num_halves if name.endswith("experts.gate_up_proj") else 1
        return self._cut(dim, num_halves, self.num_pieces if "expert" in name else 0)

    def expert_width(self, experts: Experts) -> int:
        (part,) = self._cut(0, 1, self.num_pieces).parts(experts.intermediate_size)
        return len(part)

    def _cut(self, dim: int, num_groups: int, num_pieces: int) -> TensorSlice:
        return TensorSlice(dim, self._shard.rank, self._shard.size, num_groups, num_pieces)


def _fp8(matrix: Fp8Matrix, cut: TensorSlice, said: str) -> Fp8Matrix:
    scale = matrix.scale
    if matrix.is_blocks:
        _require(matrix, cut, BLOCK, said)
        scale = cut.of(scale)
    elif cut.dim == 0:
        scale = cut.of(scale)
    weight = cut.of(matrix.weight.view(torch.uint8)).view(matrix.weight.dtype)
    return replace(matrix, weight=weight, scale=scale)


def _int4(matrix: IntMatrix, cut: TensorSlice, said: str) -> IntMatrix:
    if cut.dim == 0:
        return replace(matrix, codes=cut.of(matrix.codes), scale=cut.of(matrix.scale), zero=cut.of(matrix.zero))
    part = replace(matrix, codes=cut.of(matrix.codes), groups=cut.along(0).of(matrix.groups))
    num_groups = matrix.scale.shape[1]
    if num_groups == 1 or not matrix.is_ordered:  # as GPTQ's desc_act leaves them: any column may be of any group
        return part
    _require(matrix, cut, matrix.shape[1] // num_groups, said)
    scale, zero = cut.of(matrix.scale), cut.of(matrix.zero)
    return replace(part, scale=scale, zero=zero, groups=part.groups - part.groups[0])


def _require(matrix: StoredMatrix, cut: TensorSlice, step: int, said: str) -> None:
    if matrix.shape[cut.dim] % (cut.count * step):
        raise ConfigError(f"{said} is {list(matrix.shape)} with a scale for each {step}: its parts would share scales")


def _ends(pattern: str, name: str) -> bool:
    return re.search(rf"(?:^|\.)(?:{pattern})$", name) is not None
