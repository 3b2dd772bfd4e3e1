"""A few cases of the fuzzer, and that it finds what is wrong."""

import numpy as np
import pytest

from kernels.cpu.native import BatchStruct, ModelStruct, NativeKernels, load_kernels
from tests.kernels.fuzz_native import run_case
from tests.kernels.native_steps import check_step

pytestmark = pytest.mark.slow


@pytest.fixture
def kernels():
    yield (library := load_kernels())
    library.set_threads(2)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_case_equals_the_reference(kernels: NativeKernels, seed: int) -> None:
    run_case(kernels, seed)


def test_a_window_that_is_wrong_by_one_is_found(kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = kernels.forward

    def with_wider_windows(model: ModelStruct, batch: BatchStruct) -> None:
        for layer in model.layers[: model.num_layers]:
            layer.window += 1 if layer.window else 0
        forward(model, batch)

    monkeypatch.setattr(kernels, "forward", with_wider_windows)
    with pytest.raises(AssertionError, match="is wrong by"):
        for seed in range(20):
            check_step(kernels, np.random.default_rng(seed))
