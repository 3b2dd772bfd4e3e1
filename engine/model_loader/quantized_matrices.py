"""Quantized matrices of a Hugging Face folder: as they are stored, and widened.

Names of Llama 4's experts: llm-compressor has a module for each matrix of an expert (its modeling/llama4.py), as Meta's
FP8 Maverick does; ModelOpt keeps transformers' tensors of all experts, beside `NAME_weight_scale` (TensorRT-LLM's and
vLLM's loaders), and so does fbgemm in transformers, beside `NAME_scale`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from checkpoint.quantization import Quantization, Scheme
from contracts.errors import ConfigError
from kernels.layouts import from_awq, from_gptq
from kernels.reference.quant import dequantize_blocks, dequantize_rows

_SCALES, _INPUT_SCALES = ("weight_scale", "weight_scale_inv"), ("input_scale", "activation_scale")
_EXPERT_SCALES = ("{}_weight_scale", "{}_scale")
# `output_scale` is AMD Quark's; vLLM takes it for the same (Fp8Config.get_cache_scale).
_KV_NAMES = (
    *("{0}self_attn.{1}_scale", "{0}self_attn.{1}_proj.{1}_scale", "{0}self_attn.{1}_proj.output_scale"),
    "{0}self_attn.kv_scale",
)


@dataclass(frozen=True)
class Fp8Matrix:
    """`weight` `[n, k]` e4m3; float32 `scale` by row `[n]`, or by block `[ceil(n / 128), ceil(k / 128)]`.

    `input_scale`: what its rows of activations are divided by before they are rounded, if the checkpoint says.
    """

    weight: Tensor
    scale: Tensor
    input_scale: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def is_blocks(self) -> bool:
        return self.scale.dim() == 2

    def dense(self) -> Tensor:
        """float32."""
        return (dequantize_blocks if self.is_blocks else dequantize_rows)(self.weight, self.scale)


@dataclass(frozen=True)
class Fp8Experts:
    """A matrix of each expert, transposed.

    `weight` `[experts, k, n]` e4m3, float32 `scale` `[experts, n]`.
    """

    weight: Tensor
    scale: Tensor

    def matrix(self, expert: int) -> Fp8Matrix:
        return Fp8Matrix(self.weight[expert].t().contiguous(), self.scale[expert])


@dataclass(frozen=True)
class Int4Matrix:
    """`codes` `[n, k]` 0..15; `scale`, `zero` `[n, groups]`; `groups` `[k]`: that of each column."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    groups: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def is_ordered(self) -> bool:
        """Whether the columns of each group lie side by side, the groups in order and of one size."""
        size = -(-self.shape[1] // self.scale.shape[1])
        return torch.equal(self.groups, torch.arange(self.shape[1], device=self.groups.device) // size)

    def dense(self) -> Tensor:
        """float32."""
        return (self.codes.float() - self.zero.float()[:, self.groups]) * self.scale.float()[:, self.groups]


StoredMatrix = Fp8Matrix | Int4Matrix


def joined(matrices: Sequence[Fp8Matrix]) -> Fp8Matrix:
    """One below the other."""
    weight = torch.cat([matrix.weight.view(torch.uint8) for matrix in matrices]).view(torch.float8_e4m3fn)
    input_scale = matrices[0].input_scale if len(matrices) == 1 else None
    return Fp8Matrix(weight, torch.cat([matrix.scale for matrix in matrices]), input_scale)


class Quantized(Protocol):
    """The matrices that a checkpoint holds quantized."""

    @property
    def quantization(self) -> Quantization: ...

    def matrix(self, module: str) -> StoredMatrix | None:
        """None for a module that the configuration leaves out, or whose scales are not there.

        Raises ConfigError where tensors are missing or are of another type than the configuration says.
        """
        ...

    def has_weight(self, module: str) -> bool:
        """Whether a matrix, quantized or not, has a tensor to itself."""
        ...

    def experts(self, name: str) -> Fp8Experts | None:
        """The tensor `name` of all experts.

        None if the configuration leaves it out, or its scales are not there.

        Scales are one for all, or one for each expert, or for each row of each: `[experts, n]` with a 1 anywhere.
        Raises ConfigError as `matrix` does.
        """
        ...

    def kv_scale(self, prefix: str, name: str) -> float | None:
        """What K or V (`name` "k" or "v") of a layer is divided by before it is rounded to e4m3."""
        ...


class QuantizedMatrices:
    """`find` gives a tensor of the checkpoint as it is in its file, or None.

    `stored_name` what the file and the configuration call a module.
    """

    def __init__(
        self, quantization: Quantization, find: Callable[[str], Tensor | None], stored_name: Callable[[str], str]
    ) -> None:
        self.quantization, self._find, self._stored_name = quantization, find, stored_name

    def matrix(self, module: str) -> StoredMatrix | None:
        if self.quantization.skips(self._stored_name(module)):
            return None
        return self._int4(module) if self.quantization.is_int4 else self._fp8(module)

    def has_weight(self, module: str) -> bool:
        return self._find(f"{module}.weight") is not None

    def experts(self, name: str) -> Fp8Experts | None:
        found = (self._find(pattern.format(name)) for pattern in _EXPERT_SCALES)
        scale = next((tensor for tensor in found if tensor is not None), None)
        if scale is None or self.quantization.skips(self._stored_name(name)):
            return None
        weight = self._e4m3(name)
        count, _, n = weight.shape
        if scale.numel() not in (1, count, count * n):
            raise ConfigError(f"the scale of '{name}' is {list(scale.shape)}, its experts are {list(weight.shape)}")
        by_expert = scale.float().reshape(-1, n) if scale.numel() == count * n else scale.float().reshape(-1, 1)
        return Fp8Experts(weight, by_expert.expand(count, n))

    def kv_scale(self, prefix: str, name: str) -> float | None:
        return self._first(pattern.format(prefix, name) for pattern in _KV_NAMES)

    def _fp8(self, module: str) -> Fp8Matrix | None:
        found = (self._find(f"{module}.{name}") for name in _SCALES)
        scale = next((tensor for tensor in found if tensor is not None), None)
        if scale is None:
            return None
        weight = self._e4m3(f"{module}.weight")
        input_scale = self._first(f"{module}.{name}" for name in _INPUT_SCALES)
        return Fp8Matrix(weight, self._shaped(module, scale.float(), weight.shape), input_scale)

    def _e4m3(self, name: str) -> Tensor:
        weight = self._needed(name)
        if weight.dtype is not torch.float8_e4m3fn:
            raise ConfigError(f"'{name}' is {weight.dtype} beside a scale; only float8_e4m3fn is supported")
        return weight

    def _shaped(self, module: str, scale: Tensor, shape: torch.Size) -> Tensor:
        """Return scales by row if that is the scheme, one for all rows included."""
        n, k = shape
        if self.quantization.scheme is Scheme.FP8_BLOCKS and scale.shape == (-(-n // 128), -(-k // 128)):
            return scale
        if self.quantization.scheme is Scheme.FP8_ROWS and scale.numel() in (1, n):
            return scale.flatten().expand(n).contiguous()
        scheme = self.quantization.scheme
        raise ConfigError(f"the scale of '{module}' is {list(scale.shape)}, its weight {list(shape)}: not {scheme}")

    def _int4(self, module: str) -> Int4Matrix | None:
        qweight = self._find(f"{module}.qweight")
        if qweight is None:
            return None
        qzeros, scales = self._needed(f"{module}.qzeros"), self._needed(f"{module}.scales")
        if self.quantization.scheme is Scheme.AWQ:
            codes, scale, zero = from_awq(qweight, qzeros, scales)
        else:
            codes, scale, zero = from_gptq(qweight, qzeros, scales, self.quantization.zero_shift)
        groups = self._groups(module, codes.shape[1], scale.shape[1])
        return Int4Matrix(codes, scale, zero, groups.to(codes.device))

    def _groups(self, module: str, num_columns: int, num_groups: int) -> Tensor:
        size = num_columns if self.quantization.group_size == -1 else self.quantization.group_size
        if -(-num_columns // size) != num_groups:
            raise ConfigError(
                f"'{module}' has {num_groups} scales in {num_columns} columns; group_size is {size} in config.json"
            )
        stored = self._find(f"{module}.g_idx")
        if stored is None or not stored.any():  # all zeros say nothing, as text-generation-inference reads them too
            return torch.arange(num_columns) // size
        if len(stored) != num_columns or not 0 <= int(stored.min()) <= int(stored.max()) < num_groups:
            raise ConfigError(f"'{module}.g_idx' does not say for {num_columns} columns which of {num_groups} scales")
        return stored.long()

    def _needed(self, name: str) -> Tensor:
        tensor = self._find(name)
        if tensor is None:
            raise ConfigError(f"the checkpoint lacks '{name}', which goes with its quantized neighbours")
        return tensor

    def _first(self, names: Iterable[str]) -> float | None:
        """The single number that is stored under the first of these names."""
        found = (self._find(name) for name in names)
        return next((tensor.float().max().item() for tensor in found if tensor is not None), None)
