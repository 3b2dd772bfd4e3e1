"""Rows of activations times matrices, however these are stored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cuda.formats import E4M3
from engine.cuda.weights import Matrix
from kernels.registry import Registry
from kernels.specs import GemmSpec, QuantSpec, Spec, W4Spec, W8Spec
from kernels.workspace import widening_workspace_nbytes

# cuBLAS multiplies blocks for rows by fours, and our kernel what is left. Fewer rows than this that are not by fours go
# to ours as a whole: it reads weights about as fast (28672 x 4096: 62 us for one row, cuBLAS 59 for eight; H200).
_MIN_SPLIT_ROWS = 64


@dataclass(frozen=True)
class Scaled:
    """Rows as a product reads them: e4m3 with a scale each, or plain, where `scale` is of no use."""

    rows: Tensor
    scale: Tensor


class RowBuffer:
    """Room for `max_rows` rows that products with these matrices read: each recipe's as it wants them."""

    def __init__(self, matrices: Sequence[Matrix], max_rows: int, width: int, plain: torch.dtype, device: torch.device):
        kinds = {E4M3 if matrix.recipe == "row" else plain for matrix in matrices}
        self._rows = {dtype: torch.empty(max_rows, width, dtype=dtype, device=device) for dtype in kinds}
        self.scale = torch.empty(max_rows, device=device)
        self._plain = plain

    def of(self, matrix: Matrix, count: int) -> Scaled:
        rows = self._rows[E4M3 if matrix.recipe == "row" else self._plain]
        return Scaled(rows[:count], self.scale[:count])


class Products:
    """`max_rows`: the most rows of one call; what is rounded for blocks, and scratch memory, is allocated here."""

    def __init__(self, registry: Registry, matrices: Sequence[Matrix], max_rows: int, device: torch.device) -> None:
        self._registry, self._bound = registry, {}
        width = max((m.weight.shape[1] for m in matrices if m.recipe == "block128"), default=0)
        self._rounded = torch.empty(max_rows * width, dtype=E4M3, device=device)
        self._scales = torch.empty(max_rows * width // 128, device=device)
        specs = [_int4_spec(matrix) for matrix in matrices if matrix.recipe == "int4"]
        specs += [_w8_spec(matrix) for matrix in matrices if matrix.recipe == "w8"]
        nbytes = max((widening_workspace_nbytes(spec, max_rows) for spec in specs), default=0)
        self._workspace = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def __call__(self, matrix: Matrix, x: Scaled, out: Tensor, deferred: bool = False) -> None:
        """`out` `[T, n]`; without its scales if `deferred`, which only matrices with scales by row may be."""
        if matrix.recipe == "plain":
            torch.mm(x.rows, matrix.weight.t(), out=out)
        elif matrix.recipe == "row":
            n, k = matrix.weight.shape
            self._get("gemm_fp8", GemmSpec(n, k, deferred=deferred))(x.rows, matrix.weight, x.scale, matrix.scale, out)
        elif matrix.recipe == "block128":
            self._blocks(matrix, x.rows, out)
        elif matrix.recipe == "w8":
            product = self._get("gemm_w8", _w8_spec(matrix))
            product(x.rows, matrix.weight, matrix.scale, out, self._workspace)
        else:
            spec = _int4_spec(matrix)
            self._get("gemm_w4", spec)(x.rows, matrix.weight, matrix.scale, matrix.zero, out, self._workspace)
        if matrix.bias is not None:
            out.add_(matrix.bias)

    def _blocks(self, matrix: Matrix, rows: Tensor, out: Tensor) -> None:
        left = len(rows) % 4
        whole = 0 if left and len(rows) < _MIN_SPLIT_ROWS else len(rows) - left
        for part in (slice(0, whole), slice(whole, len(rows))):
            if part.start < part.stop:
                self._block_rows(matrix, rows[part], out[part])

    def _block_rows(self, matrix: Matrix, rows: Tensor, out: Tensor) -> None:
        count, (n, k) = len(rows), matrix.weight.shape
        rounded = self._rounded[: count * k].view(count, k)
        scales = self._scales[: count * k // 128].view(k // 128, count)
        self._get("quant_fp8", QuantSpec(k, "group"))(rows, rounded, scales)
        spec = GemmSpec(n, k, "block128", skinny=count % 4 != 0)
        self._get("gemm_fp8", spec)(rounded, matrix.weight, scales, matrix.scale, out)

    def _get(self, op: str, spec: Spec) -> Callable[..., None]:
        if (op, spec) not in self._bound:
            self._bound[op, spec] = self._registry.get(op, spec)
        return self._bound[op, spec]


def _w8_spec(matrix: Matrix) -> W8Spec:
    assert matrix.scale is not None
    n, k = matrix.weight.shape
    if matrix.scale.dim() == 1:
        return W8Spec(n, k, "row")
    return W8Spec(n, k, "group32" if len(matrix.scale) == n else "block128")


def _int4_spec(matrix: Matrix) -> W4Spec:
    assert matrix.scale is not None
    (n, half), num_groups = matrix.weight.shape, matrix.scale.shape[1]
    return W4Spec(n, 2 * half, "gptq" if matrix.zero is None else "awq", 2 * half // num_groups)
