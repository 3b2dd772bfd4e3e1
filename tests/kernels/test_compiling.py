"""How often Triton compiles, counted by its own hook; for a GPU that need not be here."""

import time

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kernels.compiling import compiled_ahead
from kernels.specs import NormSpec
from kernels.triton.norm import add_rmsnorm_quant, norm_kernel

NORM = NormSpec(64, "none", deferred=True)


class AbsentHopper:
    """What Triton asks of a driver to compile."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Names of kernels, one for each time that one is compiled."""
    names = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", AbsentHopper())
    monkeypatch.setattr(norm_kernel, "device_caches", type(norm_kernel.device_caches)(norm_kernel.create_binder))

    def hook(*, fn, **_):
        names.append(fn.name)

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    return names


def norm(num_rows):
    x, gain, scale = torch.ones(num_rows, 64), torch.ones(64), torch.ones(num_rows)
    add_rmsnorm_quant(NORM, x, x.clone(), gain, 1e-5, x.clone(), scale, token_scale=scale, channel_scale=gain)


def test_a_kernel_is_compiled_once_for_all_numbers_of_rows(compiled):
    with compiled_ahead():
        for num_rows in (1, 2, 3, 16, 17, 48, 64):
            norm(num_rows)
    assert compiled == ["norm_kernel"]


def test_a_kernel_is_compiled_once_more_where_it_is_launched_otherwise(compiled):
    with compiled_ahead():
        norm(64)
        norm(65)  # fewer warps
        norm(128)
    assert compiled == ["norm_kernel"] * 2


def test_what_is_compiled_stays_so(compiled):
    for _ in range(2):
        with compiled_ahead():
            norm(5)
    assert compiled == ["norm_kernel"]


def test_each_kernel_is_told_of_and_how_many_there_are(compiled):
    told = []
    with compiled_ahead(lambda done, total: told.append((done, total))):
        norm(64)
        norm(65)
        assert not told
    assert told == [(1, 2), (2, 2)] and len(compiled) == 2


def test_launches_are_launches_again_afterwards(compiled):
    launch = triton.JITFunction.run
    with pytest.raises(KeyError), compiled_ahead():
        raise KeyError
    assert triton.JITFunction.run is launch


def test_one_thread_parses_at_a_time(compiled, monkeypatch):
    parse, now, most = triton.JITFunction.parse, 0, 0

    def slowly(kernel):
        nonlocal now, most
        now += 1
        most = max(most, now)
        time.sleep(0.02)
        tree = parse(kernel)
        now -= 1
        return tree

    monkeypatch.setattr(triton.JITFunction, "parse", slowly)
    with compiled_ahead():
        norm(64)
        norm(128)
    assert (compiled, most) == (["norm_kernel"] * 2, 1)
    assert triton.JITFunction.parse is slowly
