"""Rows of activations times matrices, however these are stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from engine.cuda.model.matrices import Matrix
from engine.cuda.model.number_formats import E4M3
from kernels.decode_plan import SKINNY_ROWS, int4_parts, skinny_parts
from kernels.registry import Registry
from kernels.specs import GemmSpec, Quant, QuantSpec, W4Spec, W8Spec
from kernels.workspace import widening_workspace_nbytes

# cuBLAS multiplies blocks for rows by fours, and our kernel what is left. Fewer rows than this that are not by fours go
# to ours as a whole, whose tiles of 64 rows share what they read.
_MIN_SPLIT_ROWS = 128


@dataclass(frozen=True)
class Scaled:
    """Rows as a product reads them.

    `rounding` says how: e4m3 with a scale each or one for each 128 columns, or plain, where `scale` is of no use.
    """

    rows: Tensor
    scale: Tensor


@dataclass(frozen=True)
class SplitKPartials:
    """A product that its reader finishes.

    `out` `[T, n]`, or float32 `[parts, T, n]` to be added up; without its scales if `deferred`.
    """

    out: Tensor
    parts: int = 1
    deferred: bool = False


def finishing_arguments(matrix: Matrix, x: Scaled, product: SplitKPartials) -> dict[str, Tensor]:
    """Return what is left to whoever reads a product: its bias, and its scales if it is deferred."""
    bias = {} if matrix.bias is None else {"bias": matrix.bias}
    if not product.deferred or matrix.scale is None:
        return bias
    return bias | {"token_scale": x.scale, "channel_scale": matrix.scale}


def rounding(matrix: Matrix, count: int) -> Quant:
    """How so many rows are left for a product with this matrix.

    What cuBLAS multiplies by blocks is rounded here.
    """
    if matrix.recipe == "row":
        return "token"
    return "group" if matrix.recipe == "block128" and _parts_of(matrix, count) is not None else "none"


def _parts_of(matrix: Matrix, count: int) -> int | None:
    """Parts along k of a product with so many rows, if its reader adds them up.

    None: its kernel knows no parts.
    """
    if matrix.recipe == "int4":
        return int4_parts(count, *matrix.shape)
    if matrix.recipe in ("row", "block128"):
        return skinny_parts(count, *matrix.shape, by_blocks=matrix.recipe == "block128")
    return None


class RowBuffer:
    """Room for `max_rows` rows that products with these matrices read: each recipe's as it wants them.

    `plain`: the type of those that are not rounded; None if they need no room.
    """

    def __init__(
        self, matrices: Sequence[Matrix], max_rows: int, width: int, plain: torch.dtype | None, device: torch.device
    ) -> None:
        recipes = {matrix.recipe for matrix in matrices}
        num_rounded = max_rows if "row" in recipes else min(max_rows, SKINNY_ROWS) if "block128" in recipes else 0
        num_plain = max_rows if plain is not None and recipes - {"row"} else 0
        self._rounded = torch.empty(num_rounded, width, dtype=E4M3, device=device)
        self._plain = torch.empty(num_plain, width, dtype=plain, device=device)
        self._width = width
        self.scale = torch.empty(max(max_rows, min(max_rows, SKINNY_ROWS) * width // 128), device=device)

    def of(self, matrix: Matrix, count: int) -> Scaled:
        quant = rounding(matrix, count)
        if quant == "group":
            num_groups = self._width // 128
            return Scaled(self._rounded[:count], self.scale[: num_groups * count].view(num_groups, count))
        return Scaled((self._rounded if quant == "token" else self._plain)[:count], self.scale[:count])


class QuantizedLinear:
    """`max_rows`: the most rows of one call.

    What is rounded for blocks, and scratch memory, is allocated here.
    """

    def __init__(self, registry: Registry, matrices: Sequence[Matrix], max_rows: int, device: torch.device) -> None:
        self._get = cache(registry.get)  # asked at every step, and bound once
        width = max((m.weight.shape[1] for m in matrices if m.recipe == "block128"), default=0)
        self._rounded = torch.empty(max_rows * width, dtype=E4M3, device=device)
        self._scales = torch.empty(max_rows * width // 128, device=device)
        specs = [_w4_spec(matrix) for matrix in matrices if matrix.recipe == "int4"]
        specs += [_w8_spec(matrix) for matrix in matrices if matrix.recipe == "w8"]
        nbytes = max((widening_workspace_nbytes(spec, max_rows) for spec in specs), default=0)
        self._workspace = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        numel = max((parts_numel(matrix, max_rows) for matrix in matrices), default=0)
        self._parts = torch.empty(numel, device=device)

    def as_read(self, matrix: Matrix, rows: Tensor, room: RowBuffer) -> Scaled:
        """Return plain rows as a product with this matrix reads them, in `room` if they are rounded."""
        quant = rounding(matrix, len(rows))
        if quant == "none":
            return Scaled(rows, room.scale)
        read = room.of(matrix, len(rows))
        self._get("quant_fp8", QuantSpec(rows.shape[1], quant))(rows, read.rows, read.scale)
        return read

    def unfinished(self, matrix: Matrix, x: Scaled, out: Tensor, adds: bool = True) -> SplitKPartials:
        """Without the bias, for a reader that applies scales, and adds up parts if `adds`.

        `out` `[T, n]`: room for what is in one part; parts are overwritten by the next product in parts.
        """
        (n, k), parts = matrix.shape, _parts_of(matrix, len(x.rows))
        # Whole, what is best in parts loses to cuBLAS with many rows: 4096 x 14336 takes 29.6 us for 64, there 21.3.
        if parts is None or (parts > 1 and not adds):
            if matrix.recipe == "row":
                self._scaled_product(GemmSpec(n, k, deferred=True), matrix, x, out)
                return SplitKPartials(out, deferred=True)
            self(matrix, x, out)
            return SplitKPartials(out)
        if parts > 1:
            out = self._parts[: parts * out.numel()].view(parts, *out.shape)
        if matrix.recipe in ("row", "block128"):
            self._scaled_product(GemmSpec(n, k, matrix.recipe, parts=parts, skinny=True), matrix, x, out)
        else:
            self._int4(matrix, x, out, parts)
        return SplitKPartials(out, parts)

    def __call__(self, matrix: Matrix, x: Scaled, out: Tensor) -> None:
        """`out` `[T, n]`, without the bias."""
        n, k = matrix.shape
        if matrix.recipe == "plain":
            torch.mm(x.rows, matrix.weight.t(), out=out)
        elif matrix.recipe == "row":
            self._scaled_product(GemmSpec(n, k, skinny=_parts_of(matrix, len(x.rows)) == 1), matrix, x, out)
        elif matrix.recipe == "block128" and x.rows.dtype == E4M3:
            self._scaled_product(GemmSpec(n, k, "block128", skinny=True), matrix, x, out)
        elif matrix.recipe == "block128":
            self._plain_rows_by_blocks(matrix, x.rows, out)
        elif matrix.recipe == "w8":
            product = self._get("gemm_w8", _w8_spec(matrix))
            product(x.rows, matrix.weight, matrix.scale, out, self._workspace)
        else:
            self._int4(matrix, x, out)

    def _scaled_product(self, spec: GemmSpec, matrix: Matrix, x: Scaled, out: Tensor) -> None:
        self._get("gemm_fp8", spec)(x.rows, matrix.weight, x.scale, matrix.scale, out)

    def _int4(self, matrix: Matrix, x: Scaled, out: Tensor, parts: int = 1) -> None:
        product = self._get("gemm_w4", _w4_spec(matrix, parts))
        product(x.rows, matrix.weight, matrix.scale, out, self._workspace)

    def _plain_rows_by_blocks(self, matrix: Matrix, rows: Tensor, out: Tensor) -> None:
        left = len(rows) % 4
        whole = 0 if left and len(rows) < _MIN_SPLIT_ROWS else len(rows) - left
        for part in (slice(0, whole), slice(whole, len(rows))):
            if part.start < part.stop:
                self._round_and_multiply(matrix, rows[part], out[part])

    def _round_and_multiply(self, matrix: Matrix, rows: Tensor, out: Tensor) -> None:
        count, (n, k) = len(rows), matrix.weight.shape
        rounded = self._rounded[: count * k].view(count, k)
        scales = self._scales[: count * k // 128].view(k // 128, count)
        self._get("quant_fp8", QuantSpec(k, "group"))(rows, rounded, scales)
        spec = GemmSpec(n, k, "block128", skinny=count % 4 != 0)
        self._scaled_product(spec, matrix, Scaled(rounded, scales), out)


def unrounded(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """The product with a plain weight `[n, k]` as it was added up: `out` `[T, n]` float32.

    An output head's ends there: a bf16 of 16 or more knows eighths only, and a text's two likeliest words are often
    nearer.
    """
    if rows.is_cuda and rows.dtype != torch.float32:
        torch.mm(rows, weight.t(), out_dtype=torch.float32, out=out)
    else:
        torch.mm(rows.float(), weight.t().float(), out=out)


def parts_numel(matrix: Matrix, max_rows: int) -> int:
    """Return how many float32 values the parts of a product of up to so many rows take at most."""
    counts = range(1, min(max_rows, SKINNY_ROWS) + 1)
    in_parts = ((_parts_of(matrix, count) or 1, count) for count in counts)
    return max((parts * count * matrix.shape[0] for parts, count in in_parts if parts > 1), default=0)


def _w4_spec(matrix: Matrix, parts: int = 1) -> W4Spec:
    n, k = matrix.shape
    return W4Spec(n, k, parts)


def _w8_spec(matrix: Matrix) -> W8Spec:
    assert matrix.scale is not None
    n, k = matrix.weight.shape
    if matrix.scale.dim() == 1:
        return W8Spec(n, k, "row")
    return W8Spec(n, k, "group32" if len(matrix.scale) == n else "block128")
