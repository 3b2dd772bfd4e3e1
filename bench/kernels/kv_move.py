"""The benchmark of KV pack, unpack, verify and checksums alone.

The pages are random ones of a Llama-8B FP8 cache; the rows vary chunk size and number of CTAs.
"""

from functools import partial

import torch

from bench.kernels.figure import Figure, show
from kernels.cases import KernelCall, KernelCase, move_case
from kernels.registry import Registry
from kernels.specs import MoveSpec
from kernels.timing import call_us, copy_rate

PLANES, UNIT, POOL = 64, 65536, 1024
CTAS = (8, 16, 32, 132, 264)


def rows(registry: Registry) -> list[Figure]:
    limit = copy_rate()
    result = [show(Figure("copy_rate", {}, limit / 1e9, "GB/s"))]
    for op, checksum, convert in (
        ("kv_pack", False, False),
        ("kv_unpack", False, False),
        ("kv_pack", True, False),
        ("kv_unpack", True, False),
        ("kv_sums", True, False),
        ("kv_pack", False, True),
        ("kv_pack", True, True),
    ):
        spec = MoveSpec(PLANES, UNIT, convert, checksum)
        for tokens in (256, 1024, 2048):
            result += shape_rows(
                registry, move_case(op, spec, tokens // 64, POOL // (2 if convert else 1)), tokens, limit
            )
    return result


def shape_rows(registry: Registry, case: KernelCase, tokens: int, limit: float) -> list[Figure]:
    assert isinstance(case.spec, MoveSpec)
    op = registry.get(case.op, case.spec)
    call = case.make("cuda")
    others = [call, *(reordered(call) for _ in range(5))]
    result = []
    for ctas in CTAS:
        us = call_us([partial(other.run, partial(op, ctas=ctas)) for other in others], count=3)
        rate = case.nbytes / us * 1e6
        params = dict(op=case.op, tokens=tokens, ctas=ctas, checksum=case.spec.checksum, convert=case.spec.convert)
        result.append(show(Figure("kv_move", params, us, "us", rate / limit, None, None, dict(gbps=rate / 1e9))))
    torch.cuda.empty_cache()
    return result


def reordered(call: KernelCall) -> KernelCall:
    """Return the call on other random pages of the same caches, none of which is in L2."""
    where = 1 if call.outputs else 2 if len(call.args) == 5 else 1
    pool = next(t for t in call.args if t is not None and t.dim() == 3).shape[1]
    args = list(call.args)
    args[where] = torch.randperm(pool, device="cuda")[: len(args[where])].to(torch.int32)
    return KernelCall(tuple(args), call.kwargs, call.outputs, call.updated)
