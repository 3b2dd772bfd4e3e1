"""Run as a child process: one bfloat16 matmul, which may end it with SIGILL, then its speed beside float16 weights.

On virtual machines that show AMX flags but hide the tile palettes, oneDNN loads an illegal tile configuration and
the process dies. No flag tells; only trying does.
"""

import json
import time
from collections.abc import Callable

import torch

_ROWS, _IN, _OUT, _ROUNDS = 256, 576, 3072, 7


@torch.inference_mode()
def main() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        print(json.dumps({"bfloat16_speedup": 0.0}))
        return
    torch.set_num_threads(1)
    x, weight = torch.randn(_ROWS, _IN), torch.randn(_OUT, _IN)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), None)
    bfloat16_s = _best_s(lambda: torch.ops.mkldnn._linear_pointwise(x.bfloat16(), packed, None, "none", [], ""))
    print(json.dumps({"bfloat16_speedup": _float16_s(x, weight) / bfloat16_s}))


def _float16_s(x: torch.Tensor, weight: torch.Tensor) -> float:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return _best_s(lambda: torch.nn.functional.linear(x, weight))
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    return _best_s(lambda: torch.ops.quantized.linear_dynamic_fp16(x, packed))


def _best_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
