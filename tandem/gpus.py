"""Which GPU each worker of `tandem up` runs on."""

import ctypes
from collections.abc import Mapping

from contracts.errors import ConfigError
from tandem.settings import UpSettings

COUNTS = ("prefill", "decode", "mixed")


def fit_devices(settings: UpSettings, environ: Mapping[str, str]) -> UpSettings:
    """On one GPU a single mixed worker, unless the numbers of workers are set. Raises ConfigError for a device that is
    not there, and for workers that would each take all of one GPU's memory.
    """
    devices = device_list(settings.device)
    if devices == ["cpu"]:
        return settings
    if len(devices) == 1 and not settings.model_fields_set.intersection(COUNTS):
        return settings.model_copy(update={"prefill": 0, "decode": 0, "mixed": 1})
    num_workers = settings.prefill + settings.decode + settings.mixed
    if num_workers > len(devices) and not int(environ.get("TANDEM_KV_CACHE_MIB") or 0):
        raise ConfigError(
            f"{num_workers} workers on {len(devices)} GPUs: each would take all the memory that is free; "
            "set TANDEM_KV_CACHE_MIB, or start fewer"
        )
    return settings


def worker_devices(settings: UpSettings, num_workers: int) -> list[str]:
    """In turn. Raises ConfigError."""
    devices = device_list(settings.device)
    return [devices[index % len(devices)] for index in range(num_workers)]


def device_list(device: str) -> list[str]:
    """`cuda` stands for every GPU that is visible. Raises ConfigError."""
    if device == "cpu":
        return ["cpu"]
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ConfigError(f"device is '{device}': it must be cpu, cuda or cuda:N (set by --device or TANDEM_DEVICE)")
    count = count_gpus()
    if count == 0:
        raise ConfigError(
            f"device is '{device}', but the NVIDIA driver shows no GPU here; "
            "see nvidia-smi and CUDA_VISIBLE_DEVICES, or set device to cpu"
        )
    if not index:
        return [f"cuda:{number}" for number in range(count)]
    if int(index) >= count:
        raise ConfigError(f"device is '{device}'; the GPUs here are cuda:0 to cuda:{count - 1}")
    return [device]


def count_gpus() -> int:
    """As CUDA sees them; without torch, which takes seconds to import."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
