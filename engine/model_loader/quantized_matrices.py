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

from checkpoint.quantization import NVFP4_GROUP, Quantization, Scheme
from contracts.errors import ConfigError
from kernels.layouts import from_awq, from_gptq, unpacked
from kernels.reference.quant import dequantize_blocks, dequantize_rows, unpack_e2m1

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
class IntMatrix:
    """`codes` `[n, k]` of 4 or 8 bits; `scale`, `zero` `[n, groups]`; `groups` `[k]`: that of each column."""

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


StoredMatrix = Fp8Matrix | IntMatrix


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
        """None for a module that the configuration leaves out, that lacks scales, or that no kernel takes.

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
        return self._matrix(module) if self.quantization.has_kernels else None

    def dense(self, module: str) -> Tensor | None:
        """Return a matrix in float32; None for one that is plain. Raises ConfigError as `matrix` does."""
        match self.quantization.scheme:
            case Scheme.INT8_ROWS | Scheme.NVFP4 if self.quantization.skips(self._stored_name(module)):
                return None
            case Scheme.INT8_ROWS:
                return self._int8(module)
            case Scheme.NVFP4:
                return self._nvfp4(module)
        matrix = self._matrix(module)
        return None if matrix is None else matrix.dense()

    def _matrix(self, module: str) -> StoredMatrix | None:
        if self.quantization.skips(self._stored_name(module)):
            return None
        match self.quantization.scheme:
            case Scheme.PACKED:
                return self._packed(module)
            case Scheme.GPTQ | Scheme.AWQ:
                return self._grouped(module)
        return self._fp8(module)

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

    def _grouped(self, module: str) -> IntMatrix | None:
        qweight = self._find(f"{module}.qweight")
        if qweight is None:
            return None
        qzeros, scales = self._needed(f"{module}.qzeros"), self._needed(f"{module}.scales")
        if self.quantization.scheme is Scheme.AWQ:
            codes, scale, zero = from_awq(qweight, qzeros, scales)
        else:
            quantization = self.quantization
            codes, scale, zero = from_gptq(qweight, qzeros, scales, quantization.zero_shift, quantization.bits)
        groups = self._groups(module, "g_idx", codes.shape[1], scale.shape[1])
        return IntMatrix(codes, scale, zero, groups.to(codes.device))

    def _packed(self, module: str) -> IntMatrix | None:
        """Read integers that are less 2^(bits - 1), packed along rows of words; zeros along columns."""
        words, bits = self._find(f"{module}.weight_packed"), self.quantization.bits
        if words is None:
            return None
        n, k = self._needed(f"{module}.weight_shape").tolist()
        if words.shape != (n, -(-k * bits // 32)):
            raise ConfigError(f"'{module}.weight_packed' is {list(words.shape)}; its weight_shape says [{n}, {k}]")
        scale = self._needed(f"{module}.weight_scale")
        scale = scale.view(n, -1) if scale.numel() > 1 else scale.view(1, 1).expand(n, 1)
        zero = torch.full(scale.shape, 1 << (bits - 1), dtype=torch.uint8, device=words.device)
        if not self.quantization.is_symmetric:
            stored = self._needed(f"{module}.weight_zero_point")
            zero = unpacked(stored.t().contiguous(), bits)[:, :n].t().contiguous()
        groups = self._groups(module, "weight_g_idx", k, scale.shape[1])
        return IntMatrix(unpacked(words, bits)[:, :k].contiguous(), scale.contiguous(), zero, groups.to(words.device))

    def _int8(self, module: str) -> Tensor | None:
        weight, scale = self._find(f"{module}.weight"), self._find(f"{module}.weight_scale")
        if weight is None or scale is None:
            return None
        if weight.dtype is not torch.int8 or scale.numel() not in (1, len(weight)):
            raise ConfigError(
                f"'{module}.weight' is {weight.dtype} {list(weight.shape)}, its scale {list(scale.shape)}: not "
                f"{self.quantization.scheme}"
            )
        values = weight.float()
        if not self.quantization.is_symmetric:
            values = values - self._needed(f"{module}.weight_zero_point").float().view(-1, 1)
        return values * scale.float().view(-1, 1)

    def _nvfp4(self, module: str) -> Tensor | None:
        """Read e2m1 in pairs, beside scales in e4m3, and one for all.

        compressed-tensors divides by that one, ModelOpt multiplies.
        """
        packed = self._find(f"{module}.weight_packed")
        divisor = None if packed is None else self._needed(f"{module}.weight_global_scale")
        if packed is None:
            packed, scale = self._find(f"{module}.weight"), self._find(f"{module}.weight_scale")
            if packed is None or scale is None:
                return None
        scale = self._needed(f"{module}.weight_scale").float()
        if packed.dtype is not torch.uint8 or scale.shape != (len(packed), packed.shape[1] * 2 // NVFP4_GROUP):
            raise ConfigError(
                f"the scale of '{module}' is {list(scale.shape)}, its packed weight {list(packed.shape)} "
                f"{packed.dtype}: not {self.quantization.scheme}"
            )
        if self._find(f"{module}.pre_quant_scale") is not None:
            raise ConfigError(f"'{module}.pre_quant_scale' scales activations (AWQ), which is not supported")
        factor = self._needed(f"{module}.weight_scale_2").float() if divisor is None else 1 / divisor.float()
        return unpack_e2m1(packed) * (scale * factor).repeat_interleave(NVFP4_GROUP, 1)

    def _groups(self, module: str, index: str, num_columns: int, num_groups: int) -> Tensor:
        size = num_columns if self.quantization.group_size == -1 else self.quantization.group_size
        if -(-num_columns // size) != num_groups:
            raise ConfigError(
                f"'{module}' has {num_groups} scales in {num_columns} columns; group_size is {size} in config.json"
            )
        stored = self._find(f"{module}.{index}")
        # All zeros say nothing, as text-generation-inference reads them too, nor do compressed-tensors' -1.
        if stored is None or not stored.any() or bool((stored == -1).all()):
            return torch.arange(num_columns) // size
        if len(stored) != num_columns or not 0 <= int(stored.min()) <= int(stored.max()) < num_groups:
            raise ConfigError(f"'{module}.{index}' does not say for {num_columns} columns which of {num_groups} scales")
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
