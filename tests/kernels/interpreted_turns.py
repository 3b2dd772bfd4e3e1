# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""How slices are shared out among sequences by length, under Triton's interpreter: JSON for test_interpreted.py."""

import json
import os
import random
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are decorated, hence before the imports below

import torch
import triton
import triton.language as tl

from kernels.triton.attn_state import turn
from tests.kernels.interpreter import patch

SLICES = 66


@triton.jit
def turns_kernel(
    len_ptr, out_ptr, num_seqs,
    SLICES: tl.constexpr, MOST: tl.constexpr, LEAST: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    seq, slice_id, count, first = turn(place, len_ptr, num_seqs, SLICES, MOST, LEAST, SEQS)
    tl.store(out_ptr + place * 4, seq)
    tl.store(out_ptr + place * 4 + 1, slice_id)
    tl.store(out_ptr + place * 4 + 2, count)
    tl.store(out_ptr + place * 4 + 3, first)


def lengths() -> list[list[int]]:
    dice = random.Random(0)
    uneven = [dice.choice((1, 40, 3000, 100_000)) for _ in range(60)]
    return [[1], [1 << 20], [16000] + [1] * 15, [1 << 20] * 16, [7] * 33, uneven]


def main() -> None:
    patch()
    found = []
    for case in lengths():
        out = torch.full((SLICES, 4), -7, dtype=torch.int32)
        turns_kernel[(SLICES,)](torch.tensor(case, dtype=torch.int32), out, len(case), SLICES, 64, 256, 64)
        found.append({"lengths": case, "slices": SLICES, "turns": out.tolist()})
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
