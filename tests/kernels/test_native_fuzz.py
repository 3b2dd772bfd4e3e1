"""A few cases of the fuzzer, and that it finds what is wrong."""

from dataclasses import replace

import numpy as np
import pytest

from kernels.cpu.native import BatchStruct, ModelStruct, NativeKernels, load_kernels
from tests.kernels import native_steps
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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [0, 33])
def test_attention_over_rounded_pages_at_the_best_level(
    kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch, seed: int, window: int
) -> None:
    plain = native_steps.random_shape
    monkeypatch.setattr(
        native_steps, "random_shape", lambda rng: replace(plain(rng), window=window, is_exact=True, is_kv_exact=False)
    )
    assert kernels.set_level(kernels.best_level) == kernels.best_level  # where tiles work, only such pages take them
    check_step(kernels, np.random.default_rng(seed))


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
