"""Which number format `auto` takes, by what the CPU can and how the weights lie in their file."""

import pytest
import torch

from engine.cpu.format_choice import _fastest
from engine.model_loader.checkpoint_weights import TensorSlice
from kernels.cpu.isa import CpuIsa


class Source:
    """Weights on an int4 grid, or not."""

    interleaved, quantized = False, None

    def __init__(self, is_int4: bool) -> None:
        steps = torch.arange(32).remainder(16).float().repeat(16, 1)
        self._weight = steps if is_int4 else torch.randn(16, 32)

    def tensor(self, name: str, cut: TensorSlice | None = None) -> torch.Tensor:
        return self._weight


@pytest.mark.parametrize(
    ("is_fast", "has_fbgemm", "capability", "is_int4", "dtype"),
    [
        (True, True, "AVX512", True, "mixed4"),
        (True, True, "AVX512", False, "mixed16"),
        (True, True, "AVX2", True, "mixed16"),
        (False, True, "AVX512", True, "int4"),
        (False, True, "AVX512", False, "float16"),
        (False, True, "AVX2", True, "float16"),
        (False, False, "DEFAULT", True, "float32"),
    ],
)
def test_auto_takes_what_is_fast_here(monkeypatch, is_fast, has_fbgemm, capability, is_int4, dtype):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr("engine.cpu.format_choice.is_bfloat16_fast", lambda isa: is_fast)
    assert _fastest(CpuIsa(None, True), has_fbgemm, Source(is_int4)) == dtype
