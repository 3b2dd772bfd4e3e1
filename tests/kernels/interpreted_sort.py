"""Assignments sorted by expert under Triton's interpreter, counted in the sort's own launch and in one before it: JSON
for test_interpreted.py.
"""

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are decorated, hence before the imports below

import torch
from torch import Tensor

from kernels.specs import MoESpec
from kernels.triton import moe, moe_hopper, moe_sort
from kernels.workspace import sort_chunk
from tests.kernels.interpreter import patch

# experts, top_k, tokens, rows of a tile
SHAPES = [
    (4, 2, 1, 16),
    (1, 1, 1, 16),
    (12, 3, 20, 16),
    (5, 1, 90, 32),
    (32, 4, 128, 16),
    (16, 2, 300, 64),
    (64, 4, 140, 64),
    (130, 2, 70, 16),
]

MOST_ALIKE = 32
"""Experts up to which all tokens are also sent to the same ones: with more, the interpreter takes five seconds each."""
WIDTH = 24


def sort(spec: MoESpec, ids: Tensor, bx: int) -> tuple[list[int], list[int]]:
    total = ids.numel()
    max_tiles = min(total, spec.experts) + total // bx
    order, tiles = (torch.full((n,), -7, dtype=torch.int32) for n in (max_tiles * bx, max_tiles + 1))
    chunks = -(-total // sort_chunk(spec.experts))
    count = torch.full((2 * chunks * spec.experts,), -7, dtype=torch.int32)
    moe_sort.sort_by_expert(spec, ids, count, order, tiles, total, max_tiles, bx, False)
    assert (count == -7).all() == (total <= moe_sort.FEW_ASSIGNMENTS), "counted in the other way"
    return order.tolist(), tiles.tolist()


def gathered(order: list[int], tiles: list[int], total: int, top_k: int) -> list[list[float]]:
    """Rows that say whose they are, and their scales, as they are sorted: -1 where nothing was written."""
    x = torch.arange(total // top_k).float()[:, None] * 100 + torch.arange(WIDTH)
    copy, scale = torch.full((len(order), WIDTH), -1.0), torch.full((len(order),), -1.0)
    sorted_ids, owners = torch.tensor(order, dtype=torch.int32), torch.tensor(tiles, dtype=torch.int32)
    moe_hopper.gather(x, x[:, 0].contiguous(), top_k, sorted_ids, owners, copy, scale, pdl=False)
    return torch.cat([copy, scale[:, None]], 1).tolist()


def both_ways(experts: int, top_k: int, bx: int, ids: Tensor) -> dict[str, Any]:
    spec = MoESpec(experts, top_k, 64, 64)
    found: dict[str, tuple[list[int], list[int]]] = {}
    for name, limit in (("together", 512), ("apart", 0)):
        moe_sort.FEW_ASSIGNMENTS = limit
        found[name] = sort(spec, ids, bx)
    rows = gathered(*found["apart"], ids.numel(), top_k)
    return dict(experts=experts, top_k=top_k, rows=rows, bx=bx, ids=ids.flatten().tolist(), **found)


def routed(experts: int, top_k: int, tokens: int) -> Tensor:
    """Return tokens as the router sends them; the last one has logits that are NaN."""
    logits = torch.randn(tokens, experts)
    logits[-1] = float("nan")
    score, ids = torch.empty(tokens, top_k), torch.empty(tokens, top_k, dtype=torch.int32)
    moe.moe_route(MoESpec(experts, top_k, 64, 64), logits, score, ids)
    assert score[:-1].isfinite().all() and score[-1].isnan().all(), "a row of NaN weighs NaN, no other does"
    return ids


def main() -> None:
    patch()
    torch.manual_seed(0)
    results = []
    for experts, top_k, tokens, bx in SHAPES:
        spread = torch.rand(tokens, experts).topk(top_k).indices.int()
        results.append(both_ways(experts, top_k, bx, spread))
        if experts <= MOST_ALIKE:
            same = torch.arange(experts - top_k, experts, dtype=torch.int32).repeat(tokens, 1)
            results.append(both_ways(experts, top_k, bx, same))
    results.append(both_ways(12, 3, 16, routed(12, 3, 20)))
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
