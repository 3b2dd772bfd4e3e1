"""Which GPU each worker gets, on machines that are made up."""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest

from bench.models.random_model import LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B, random_checkpoint
from checkpoint import ModelConfig
from contracts.errors import ConfigError
from engine.cuda.model.memory_footprint import least_weights_nbytes
from tandem.local import gpu_assignment as gpus
from tandem.local.preflight import preflight
from tandem.local.settings import UpSettings
from tests.e2e.tiny import save_tiny


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    return lambda count: monkeypatch.setattr(gpus, "count_gpus", lambda: count)


def fit(**settings: object) -> UpSettings:
    return gpus.fit_devices(UpSettings.model_validate(settings), {})


def counts(settings: UpSettings) -> tuple[int, int, int]:
    return settings.prefill, settings.decode, settings.mixed


def test_one_gpu_has_one_mixed_worker(machine) -> None:
    machine(1)
    assert counts(fit(device="cuda")) == (0, 0, 1)
    machine(4)
    assert counts(fit(device="cuda:3")) == (0, 0, 1)


def test_two_gpus_have_a_worker_each(machine) -> None:
    machine(2)
    settings = fit(device="cuda")
    assert counts(settings) == (1, 1, 0)
    assert gpus.worker_devices(settings, 2) == ["cuda:0", "cuda:1"]


def test_more_workers_than_gpus_need_a_share_of_memory(machine) -> None:
    machine(1)
    with pytest.raises(ConfigError, match="set TANDEM_KV_CACHE_MIB, or start fewer"):
        fit(device="cuda", prefill=1)
    settings = UpSettings(device="cuda", prefill=1, decode=2)
    assert gpus.fit_devices(settings, {"TANDEM_KV_CACHE_MIB": "1024"}) is settings
    assert gpus.worker_devices(settings, 3) == ["cuda:0"] * 3


def test_a_share_of_memory_that_is_no_number_is_named(machine) -> None:
    machine(1)
    settings = UpSettings(device="cuda", prefill=1)
    with pytest.raises(ConfigError, match="'4g': it must be a whole number"):
        gpus.fit_devices(settings, {"TANDEM_KV_CACHE_MIB": "4g"})


def test_workers_of_several_gpus_are_counted_by_groups(machine) -> None:
    machine(2)
    one = fit(device="cuda", tensor_parallel=2)
    assert counts(one) == (0, 0, 1)
    assert gpus.worker_devices(one, 1) == ["cuda:0"]
    machine(5)
    pair = fit(device="cuda", tensor_parallel=2)
    assert counts(pair) == (1, 1, 0)
    assert gpus.worker_devices(pair, 2) == ["cuda:0", "cuda:2"]
    with pytest.raises(ConfigError, match="3 workers of 2 GPUs on 5 GPUs"):
        fit(device="cuda", tensor_parallel=2, mixed=1)


@pytest.mark.parametrize(("device", "named"), [("cuda", "2 GPUs"), ("cuda:1", "1 GPUs"), ("cpu", "no GPU")])
def test_too_few_gpus_for_one_worker_are_refused(machine, device: str, named: str) -> None:
    machine(2)
    with pytest.raises(ConfigError, match=f"tensor_parallel is 4, but device '{device}' names {named}"):
        fit(device=device, tensor_parallel=4)


@pytest.mark.parametrize(
    ("device", "count", "words"),
    [
        ("cuda", 0, "shows no GPU"),
        ("cuda:2", 2, "cuda:0 to cuda:1"),
        ("tpu", 1, "'tpu' is not supported; supported are cpu, cuda and cuda:N"),
        ("cuda:x", 1, "'cuda:x' is not supported"),
        ("cuda:", 1, "'cuda:' is not supported"),
    ],
)
def test_a_device_that_is_not_there_is_named(machine, device: str, count: int, words: str) -> None:
    machine(count)
    with pytest.raises(ConfigError, match=words):
        fit(device=device)


def test_the_cpu_needs_no_look_at_gpus(machine) -> None:
    machine(0)
    assert counts(fit()) == (1, 1, 0)
    assert gpus.worker_devices(UpSettings(), 2) == ["cpu", "cpu"]


GIB = 2**30
H100 = gpus.Gpu(80 * GIB, 90)
BIASED_70B = replace(LLAMA_70B, qkv_bias=True)
"""A shape with biases like a Qwen2's, which `auto` holds in bfloat16."""
LLAMA_13B = replace(LLAMA_8B, hidden_size=5120, intermediate_size=13824, num_layers=40, num_heads=40, num_kv_heads=40)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, machine):
    def put(*cards: gpus.Gpu) -> None:
        machine(len(cards))
        monkeypatch.setattr(gpus, "look_at", lambda index: cards[index])

    return put


def require_room(config: ModelConfig, kv_cache_mib: str = "", **settings: object) -> None:
    chosen = UpSettings.model_validate({"device": "cuda"} | settings)
    gpus.require_room(gpus.fit_devices(chosen, {"TANDEM_KV_CACHE_MIB": kv_cache_mib}), random_checkpoint("big", config))


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        (
            LLAMA_70B,
            {"dtype": "bfloat16"},
            "the weights of big take at least 131.4 GiB of cuda:0 as bfloat16, and it has 80.0: "
            "set tensor_parallel to 2 or more, or take a smaller dtype or model",
        ),
        (BIASED_70B, {}, "131.4 GiB of cuda:0 as bfloat16"),
        (LLAMA_70B, {"dtype": "float32", "tensor_parallel": 2}, "133.4 GiB of cuda:0 .*: set tensor_parallel to 4"),
        (
            LLAMA_70B,
            {"device": "cuda:1", "dtype": "float8", "mixed": 1},
            "3 workers take .* of cuda:1 .* start fewer, set",
        ),
        (replace(LLAMA_70B, num_kv_heads=1), {"dtype": "bfloat16"}, r"has 80\.0: set tensor_parallel to 2 or more"),
        (
            replace(LLAMA_70B, num_heads=1, num_kv_heads=1),
            {"dtype": "bfloat16"},
            r"has 80\.0: take a smaller dtype or model$",
        ),
        (QWEN3_30B_A3B, {"dtype": "float32"}, "113.7 GiB"),
        (LLAMA_8B, {"dtype": "int8"}, "the dtype 'int8' is not supported on a GPU"),
    ],
)
def test_weights_that_no_gpu_here_can_hold_are_told_before_they_are_read(cards, config, settings, words) -> None:
    cards(H100, H100)
    with pytest.raises(ConfigError, match=words):
        require_room(config, kv_cache_mib="1024", **settings)


def test_a_number_of_gpus_that_could_not_share_the_model_is_not_advised() -> None:
    """Five have equal parts of its 40 heads, but not of its 13824 columns."""
    checkpoint = random_checkpoint("big", LLAMA_13B)
    nbytes = least_weights_nbytes(checkpoint, "bfloat16", 5)
    assert gpus.what_holds(checkpoint, "bfloat16", nbytes).startswith("set tensor_parallel to 8 or more")


def test_a_start_looks_before_it_begins(cards, tmp_path: Path) -> None:
    cards(gpus.Gpu(100_000, 90))
    settings = UpSettings(device="cuda:0", model=str(save_tiny(tmp_path)), prefill=0, decode=0, mixed=1)
    with pytest.raises(ConfigError, match=r"GiB of cuda:0 as bfloat16, .*: take a smaller dtype or model"):
        preflight(settings)
    cards(H100)
    preflight(settings)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LLAMA_70B, {}),
        (LLAMA_70B, {"dtype": "bfloat16", "tensor_parallel": 2}),
        (LLAMA_8B, {"prefill": 4, "decode": 4, "dtype": "bfloat16"}),
        (LLAMA_70B, {"device": "cpu", "dtype": "float32"}),
    ],
)
def test_what_may_fit_is_let_through(cards, config, settings) -> None:
    cards(H100, H100)
    require_room(config, kv_cache_mib="1024", **settings)


def test_of_unlike_gpus_the_larger_is_taken_for_what_each_has(cards) -> None:
    """The parts of experts need not be equal: nothing that fits is refused."""
    cards(gpus.Gpu(40 * GIB, 90), H100)
    require_room(LLAMA_70B, dtype="bfloat16", tensor_parallel=2)


class Driver:
    """libcuda of a machine with one H100."""

    def __init__(self, status: int = 0) -> None:
        self._status = status

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device, index: int) -> int:
        device._obj.value = 7
        return self._status

    def cuDeviceTotalMem_v2(self, nbytes, device: ctypes.c_int) -> int:
        nbytes._obj.value = H100.nbytes
        return 0 if device.value == 7 else 101

    def cuDeviceGetAttribute(self, value, attribute: int, device: ctypes.c_int) -> int:
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0


def test_the_driver_tells_what_a_gpu_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: Driver())
    assert gpus.look_at(0) == H100
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: Driver(101))
    with pytest.raises(ConfigError, match="does not tell what cuda:3 is: error 101"):
        gpus.look_at(3)
