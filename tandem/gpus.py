"""Which GPU each worker of `tandem up` runs on."""

import ctypes
from collections.abc import Mapping

from contracts.device import gpu_index
from contracts.errors import ConfigError
from tandem.settings import UpSettings

COUNTS = ("prefill", "decode", "mixed")


def fit_devices(settings: UpSettings, environ: Mapping[str, str]) -> UpSettings:
    """Where the GPUs are enough for one worker, a single mixed one, unless the numbers of workers are set. Raises
    ConfigError for a device that is not there, and for workers that would each take all of one GPU's memory.
    """
    devices, size = device_list(settings.device), settings.tensor_parallel
    if devices == ["cpu"] and size == 1:
        return settings
    if len(devices) < size or devices == ["cpu"]:
        raise ConfigError(f"tensor_parallel is {size}, but device '{settings.device}' names {_count(devices)}")
    num_places = len(devices) // size
    if num_places == 1 and not settings.model_fields_set.intersection(COUNTS):
        return settings.model_copy(update={"prefill": 0, "decode": 0, "mixed": 1})
    num_workers = settings.prefill + settings.decode + settings.mixed
    if num_workers > num_places and not _kv_cache_mib(environ):
        each = f" of {size} GPUs" if size > 1 else ""
        raise ConfigError(
            f"{num_workers} workers{each} on {len(devices)} GPUs: each would take all the memory that is free; "
            "set TANDEM_KV_CACHE_MIB, or start fewer"
        )
    return settings


def _kv_cache_mib(environ: Mapping[str, str]) -> int:
    given = environ.get("TANDEM_KV_CACHE_MIB") or "0"
    try:
        return int(given)
    except ValueError as error:
        raise ConfigError(
            f"kv_cache_mib is '{given}': it must be a whole number (set by TANDEM_KV_CACHE_MIB)"
        ) from error


def _count(devices: list[str]) -> str:
    return "no GPU" if devices == ["cpu"] else f"{len(devices)} GPUs"


def worker_devices(settings: UpSettings, num_workers: int) -> list[str]:
    """In turn, of each the first that it runs on. Raises ConfigError."""
    devices, size = device_list(settings.device), settings.tensor_parallel
    firsts = devices[: len(devices) // size * size : size]
    return [firsts[index % len(firsts)] for index in range(num_workers)]


def device_list(device: str) -> list[str]:
    """`cuda` stands for every GPU that is visible. Raises ConfigError."""
    if device == "cpu":
        return ["cpu"]
    index, count = gpu_index(device, "cpu"), count_gpus()
    if count == 0:
        raise ConfigError(
            f"device is '{device}', but the NVIDIA driver shows no GPU here; "
            "see nvidia-smi and CUDA_VISIBLE_DEVICES, or set device to cpu"
        )
    if index is None:
        return [f"cuda:{number}" for number in range(count)]
    if index >= count:
        raise ConfigError(f"device is '{device}'; the GPUs here are cuda:0 to cuda:{count - 1}")
    return [f"cuda:{index}"]


def count_gpus() -> int:
    """As CUDA sees them; without torch, which takes seconds to import."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
