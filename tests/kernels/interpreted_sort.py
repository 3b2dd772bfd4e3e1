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
from kernels.triton import moe_sort
from kernels.workspace import sort_chunk
from tests.kernels.interpreter import patch

# experts, top_k, tokens, rows of a tile
SHAPES = [
    (4, 2, 1, 16),
    (1, 1, 1, 16),
    (12, 3, 20, 16),
    (5, 1, 90, 32),
    (32, 4, 128, 16),
    (128, 8, 64, 64),
    (128, 8, 300, 64),
]


def sort(spec: MoESpec, ids: Tensor, bx: int) -> tuple[list[int], list[int]]:
    total = ids.numel()
    max_tiles = min(total, spec.experts) + total // bx
    order, tiles = (torch.full((n,), -7, dtype=torch.int32) for n in (max_tiles * bx, max_tiles + 1))
    chunks = -(-total // sort_chunk(spec.experts))
    count = torch.full((2 * chunks * spec.experts,), -7, dtype=torch.int32)
    moe_sort.sort_by_expert(spec, ids, count, order, tiles, total, max_tiles, bx, False)
    assert (count == -7).all() == (total <= moe_sort.FEW_ASSIGNMENTS), "counted in the other way"
    return order.tolist(), tiles.tolist()


def both_ways(experts: int, top_k: int, bx: int, ids: Tensor) -> dict[str, Any]:
    spec = MoESpec(experts, top_k, 64, 64)
    found = {}
    for name, limit in (("together", 512), ("apart", 0)):
        moe_sort.FEW_ASSIGNMENTS = limit
        found[name] = sort(spec, ids, bx)
    return dict(experts=experts, bx=bx, ids=ids.flatten().tolist(), **found)


def main() -> None:
    patch()
    torch.manual_seed(0)
    results = []
    for experts, top_k, tokens, bx in SHAPES:
        spread = torch.rand(tokens, experts).topk(top_k).indices.int()
        same = torch.arange(experts - top_k, experts, dtype=torch.int32).repeat(tokens, 1)
        results += [both_ways(experts, top_k, bx, ids) for ids in (spread, same)]
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
