"""The benchmark of decode attention over sequences of unequal lengths.

`python -m bench.kernels.unequal_lengths`

The shape is Llama-8B's, with an e4m3 cache. The fused step (`attn_decode_fused`) with slices shared out by length
stands beside the same number of slices for each sequence. The limit is the time to read all keys and values once at the
bandwidth of an H200.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from bench.report.hardware_limits import READ_RATE
from bench.report.result import ResultRow, write_result
from engine.cuda.inputs.buckets import batch_buckets, bucket_for, context_buckets
from kernels import caps, catalog
from kernels.cases import KernelCall, fused_attn_case
from kernels.specs import FusedAttnSpec
from kernels.timing import call_us
from kernels.triton import attn_decode

SPEC = FusedAttnSpec(32, 8, 128, parts=2)
LENGTHS = {
    **{f"{count} x 8192": [8192] * count for count in (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32)},
    "64 x 4096": [4096] * 64,
    "8 x 2500": [2500] * 8,
    "16000 and 7 x 1000": [16000] + [1000] * 7,
    "16000 and 15 x 1000": [16000] + [1000] * 15,
    "3 x 16000 and 13 x 500": [16000] * 3 + [500] * 13,
    "500, 1000, ... 8000": [500 * (1 + i) for i in range(16)],
    "200, 400, ... 12800": [200 * (1 + i) for i in range(64)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    found = caps.detect()
    run = catalog.registry(found).get("attn_decode_fused", SPEC)
    rows = [lengths_row(run, name, lengths) for name, lengths in LENGTHS.items()]
    write_result(args.out, "kernels-lengths", rows, {"card": found.name, "triton": found.triton})


def lengths_row(run: Callable, name: str, lengths: Sequence[int]) -> ResultRow:
    """Time a batch that is padded and launched as the engine would."""
    batch = bucket_for(batch_buckets(256), len(lengths))
    calls = [padded(lengths, batch) for _ in range(3)]  # several, so that L2 does not help
    shared, times = attn_decode.shared_plan, {}
    for kind, plan in (("shared out", shared), ("alike", lambda *asked: None)):
        attn_decode.shared_plan = plan
        try:
            times[kind] = call_us([partial(call.run, run) for call in calls])
        finally:
            attn_decode.shared_plan = shared
    del calls
    torch.cuda.empty_cache()
    limit = 2 * sum(lengths) * SPEC.kv_heads * SPEC.head_dim / READ_RATE * 1e6
    row = ResultRow(
        "attn_decode_fused", times["shared out"], "us", {"keys": name}, limit, "as many slices each", times["alike"]
    )
    print(f"{name:24s} {row.value:8.1f} us, alike {times['alike']:8.1f}, limit {limit:8.1f}", flush=True)
    return row


def padded(lengths: Sequence[int], batch: int) -> KernelCall:
    call = fused_attn_case(SPEC, [*lengths, *[1] * (batch - len(lengths))]).make("cuda")
    call.kwargs["max_len"] = bucket_for(context_buckets(131072), max(lengths))
    return call


if __name__ == "__main__":
    main()
