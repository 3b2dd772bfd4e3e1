"""What a product leaves to its reader, by its rows."""

import pytest
import torch

from engine.cuda.model.linear import QuantizedLinear, RowBuffer, Scaled, rounding
from engine.cuda.model.matrices import Matrix
from kernels import catalog
from kernels.caps import Caps
from kernels.cases import gemm_operands, relative_error
from kernels.decode_plan import skinny_parts
from kernels.layouts import tile_int4
from kernels.specs import GemmSpec, QuantSpec


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("count", [1, 64, 65])
def test_few_rows_are_multiplied_in_parts_and_many_without_scales(count, adds):
    n, k = 192, 2112
    rows, weight, row_scale, scale = gemm_operands(GemmSpec(n, k), count, "cpu")
    matrix, x = Matrix(weight, scale), Scaled(rows, row_scale)
    products = QuantizedLinear(catalog.registry(Caps("cpu")), [matrix], 65, torch.device("cpu"))
    whole, room = (torch.full((count, n), torch.nan) for _ in range(2))
    products(matrix, x, whole)
    found = products.unfinished(matrix, x, room, adds)
    assert found.parts == (2 if count <= 64 and adds else 1) and found.deferred == (found.parts == 1)
    total = found.out.view(found.parts, count, n).sum(0)
    if found.deferred:
        total = total * row_scale[:, None] * scale
    assert relative_error(total, whole) < 1e-5


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("count", "quant"), [(1, "group"), (128, "group"), (129, "none"), (132, "none")])
def test_few_rows_beside_blocks_come_rounded_and_many_are_rounded_here(count, quant, adds):
    n, k, registry, device = 192, 2176, catalog.registry(Caps("cpu")), torch.device("cpu")
    _, weight, _, scale = gemm_operands(GemmSpec(n, k, "block128"), 1, "cpu")
    matrix, plain = Matrix(weight, scale), torch.randn(count, k)
    products, room = (
        QuantizedLinear(registry, [matrix], 132, device),
        RowBuffer([matrix], 132, k, torch.float32, device),
    )
    assert rounding(matrix, count) == quant
    x = room.of(matrix, count)
    if quant == "none":
        x.rows.copy_(plain)
    else:
        registry.get("quant_fp8", QuantSpec(k, quant))(plain, x.rows, x.scale)
    found = products.unfinished(matrix, x, torch.full((count, n), torch.nan), adds)
    assert found.parts == (2 if quant == "group" and adds else 1) and not found.deferred
    blocks = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n]
    want = plain @ (weight.float() * blocks).t()
    assert 1e-3 < relative_error(found.out.view(found.parts, count, n).sum(0), want) < 0.04
    whole = torch.full((count, n), torch.nan)
    products(matrix, x, whole)
    assert relative_error(found.out.view(found.parts, count, n).sum(0), whole) < 1e-5


@pytest.mark.parametrize("adds", [True, False])
def test_a_product_of_few_columns_is_whole(adds):
    n, k = 192, 640
    rows, weight, row_scale, scale = gemm_operands(GemmSpec(n, k), 3, "cpu")
    products = QuantizedLinear(catalog.registry(Caps("cpu")), [Matrix(weight, scale)], 3, torch.device("cpu"))
    room = torch.full((3, n), torch.nan)
    found = products.unfinished(Matrix(weight, scale), Scaled(rows, row_scale), room, adds)
    assert (found.parts, found.deferred) == (1, False) and found.out is room and room.isfinite().all()


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("count", [1, 128, 129])
def test_few_rows_are_multiplied_in_parts_by_int4(count, adds):
    n, k = 192, 2176
    codes, scale, zero = torch.randint(0, 16, (n, k)), torch.rand(n, 1) + 0.1, torch.randint(0, 16, (n, 1))
    matrix, rows = Matrix(*tile_int4(codes, scale, zero)), torch.randn(count, k)
    assert (matrix.recipe, matrix.shape) == ("int4", (n, k))
    products = QuantizedLinear(catalog.registry(Caps("cpu")), [matrix], 129, torch.device("cpu"))
    found = products.unfinished(matrix, Scaled(rows, rows), torch.full((count, n), torch.nan), adds)
    assert found.parts == (4 if count <= 128 and adds else 1) and not found.deferred
    total = found.out.view(found.parts, count, n).sum(0)
    assert relative_error(total, rows @ ((codes - zero) * scale).t()) < 1e-5


@pytest.mark.parametrize(
    ("n", "k", "parts"),
    [
        (5120, 2048, (1, 1, 1, 1)),
        (2048, 4096, (2, 2, 2, 2)),
        (5120, 2880, (2, 2, 2, 2)),
        (6144, 4096, (2, 1, 1, 1)),
        (24576, 4096, (1, 1, 1, None)),
        (5121, 4096, (None,) * 4),
        (5120, 4100, (None,) * 4),
    ],
)
def test_the_plan_is_what_was_measured_to_be_fastest(n, k, parts):
    assert tuple(skinny_parts(rows, n, k) for rows in (8, 9, 32, 64)) == parts
    assert skinny_parts(65, n, k) is None


@pytest.mark.parametrize(
    ("n", "k", "parts"),
    [
        (4096, 4096, (2, 2, 2, 1, None)),
        (6144, 4096, (2, 1, 1, None, None)),
        (28672, 4096, (1, 1, 1, None, None)),
        (4096, 14336, (2, 2, 2, 1, None)),
    ],
)
def test_by_blocks_more_rows_are_faster_than_by_cublas(n, k, parts):
    assert tuple(skinny_parts(rows, n, k, by_blocks=True) for rows in (8, 32, 64, 128, 129)) == parts
