"""Which GPU each worker gets, on machines that are made up."""

import pytest

from contracts.errors import ConfigError
from tandem import gpus
from tandem.settings import UpSettings


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
