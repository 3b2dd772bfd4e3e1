"""The matrices of a model on a device: as they are stored, or quantized on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint.quantization import BLOCK
from contracts.errors import ConfigError
from engine.cuda.model.format_choice import INT4_GROUP
from engine.model_loader.quantized_matrices import Fp8Matrix, IntMatrix, StoredMatrix, joined
from kernels.layouts import tile_int4
from kernels.reference.quant import to_e4m3, token_scale

_GROUP, _SCALE_STEPS = 32, 8
"""Columns that share a scale where activations stay plain, and how many scales they are tried with, within a power of
two: with 16 the loss is no smaller (docs/models.md).
"""

Recipe = Literal["plain", "row", "block128", "w8", "int4"]


@dataclass(frozen=True)
class Matrix:
    """A weight `[n, k]`, by recipe:

    - plain: of the activations' type;
    - row: e4m3, `scale` float32 `[n]`;
    - block128: e4m3, `scale` float32 `[ceil(n / 128), k / 128]`;
    - w8: e4m3 beside plain rows of activations (`rounds_rows` false), `scale` as either, or `[n, ceil(k / 32)]`;
    - int4: int16 words, and as `scale` int32 factors, in the tiles of kernels.layouts.tile_int4.

    `bias`: `[n]`, of the activations' type, added by whoever reads a product. `input_scale`: what the checkpoint
    divides its rows of activations by before they are rounded; not of several matrices that were fused.
    """

    weight: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    input_scale: float | None = None
    rounds_rows: bool = True

    @property
    def recipe(self) -> Recipe:
        if self.scale is None:
            return "plain"
        if self.weight.dtype is torch.int16:
            return "int4"
        if not self.rounds_rows:
            return "w8"
        return "row" if self.scale.dim() == 1 else "block128"

    @property
    def shape(self) -> tuple[int, int]:
        """n and k."""
        n, k = self.weight.shape[:2]
        return (n * 64, k * 128) if self.recipe == "int4" else (n, k)


def quantize_rows(weight: Tensor) -> Matrix:
    """e4m3 with the scale that maps each row's largest magnitude to 448."""
    scale = token_scale(weight).float()
    return Matrix(to_e4m3(weight / scale[:, None]), scale)


def quantize_finely(weight: Tensor) -> Matrix:
    """Return e4m3 with a scale for each 32 columns, for rows of activations that stay plain.

    It has that scale for each 32 columns of a row, of some that cut off nothing, which leaves the least squared error.
    """
    n, k = weight.shape
    groups = F.pad(weight, (0, -k % _GROUP)).view(n, -1, _GROUP)
    scale = best = token_scale(groups).float()
    least = torch.full_like(scale, torch.inf)
    for step in range(_SCALE_STEPS):
        tried = scale * 2 ** (step / _SCALE_STEPS)
        error = (to_e4m3(groups / tried[..., None]).float() * tried[..., None] - groups).square().sum(-1)
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    rounded = to_e4m3(groups / best[..., None]).view(n, -1)[:, :k].contiguous()
    return Matrix(rounded, best, rounds_rows=False)


def keep(stored: list[StoredMatrix], int4: bool, name: str, rounds_rows: bool = True) -> Matrix | None:
    """Stored matrices one below the other, as the kernels read them.

    None where there are none, or are of the other kind than wanted. Raises ConfigError for shapes that the kernels do
    not take.
    """
    floats = [matrix for matrix in stored if isinstance(matrix, Fp8Matrix)]
    codes = [matrix for matrix in stored if isinstance(matrix, IntMatrix)]
    if int4 and codes:
        return _int4(codes, name)
    if int4 or not floats:
        return None
    if floats[0].is_blocks:
        _require_blocks(floats, name, rounds_rows)
    whole = joined(floats)
    return Matrix(whole.weight, whole.scale, input_scale=whole.input_scale, rounds_rows=rounds_rows)


def _require_blocks(matrices: list[Fp8Matrix], name: str, rounds_rows: bool) -> None:
    """Below each other, blocks must not straddle two matrices.

    Rows of activations are rounded by whole blocks.
    """
    if any(matrix.shape[0] % BLOCK for matrix in matrices[:-1]) or (rounds_rows and matrices[0].shape[1] % BLOCK):
        columns = ", and columns," if rounds_rows else ""
        _refuse(matrices, name, f"rows of all but the last{columns} in steps of {BLOCK}")


def _int4(matrices: list[IntMatrix], name: str) -> Matrix:
    if any(matrix.shape[0] % 64 or matrix.shape[1] % INT4_GROUP for matrix in matrices):
        _refuse(matrices, name, f"rows in steps of 64 and columns in steps of {INT4_GROUP}")
    if not all(matrix.is_ordered for matrix in matrices):
        _refuse(matrices, name, "groups of one size, their columns side by side in g_idx")
    tiles = [tile_int4(matrix.codes, matrix.scale, matrix.zero) for matrix in matrices]
    words, factors = (torch.cat(tensors) for tensors in zip(*tiles, strict=True))
    return Matrix(words, factors)


def _refuse(matrices: Sequence[StoredMatrix], name: str, wanted: str) -> NoReturn:
    shapes = ", ".join(str(list(matrix.shape)) for matrix in matrices)
    raise ConfigError(f"the quantized matrices of {name} are {shapes}; the kernels want {wanted}: use dtype bfloat16")


Round = Callable[[Tensor], Matrix]
"""How a float32 weight becomes e4m3: `quantize_rows` or `quantize_finely`."""
