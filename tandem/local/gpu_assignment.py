"""The assignment of GPUs to the workers of `tandem up`, and the check that they hold the weights."""

import ctypes
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from checkpoint import Checkpoint, ModelConfig
from contracts.errors import ConfigError
from engine.cuda.model.format_choice import resolve_device_dtype
from engine.cuda.model.memory_footprint import least_weights_nbytes
from engine.device import gpu_index
from tandem.local.settings import UpSettings

COUNTS = ("prefill", "decode", "mixed")
CC_MAJOR, CC_MINOR = 75, 76
"""The values of COMPUTE_CAPABILITY_MAJOR and _MINOR in CUdevice_attribute."""


@dataclass(frozen=True)
class Gpu:
    """A GPU. `nbytes`: all of its memory, in use or not; `cc`: compute capability, 90 for 9.0."""

    nbytes: int
    cc: int


def fit_devices(settings: UpSettings, environ: Mapping[str, str]) -> UpSettings:
    """Return the settings with a single mixed worker if the GPUs suffice for one only.

    Numbers of workers that are set stay. Raises ConfigError for a device that does not exist, and for workers that
    would each take all of one GPU's memory.
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
    """Return the first GPU of each worker, assigned in turn. Raises ConfigError."""
    devices, size = device_list(settings.device), settings.tensor_parallel
    firsts = devices[: len(devices) // size * size : size]
    return [firsts[index % len(firsts)] for index in range(num_workers)]


def device_list(device: str) -> list[str]:
    """Return the devices that a setting names; `cuda` names every visible GPU. Raises ConfigError."""
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
    """Return the number of GPUs that CUDA sees, without torch, which takes seconds to import."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def look_at(index: int) -> Gpu:
    """Return the GPU of this index below `count_gpus()`. Raises ConfigError if the driver fails."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, nbytes, major, minor = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
    for status in (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), index),
        driver.cuDeviceTotalMem_v2(ctypes.byref(nbytes), device),
        driver.cuDeviceGetAttribute(ctypes.byref(major), CC_MAJOR, device),
        driver.cuDeviceGetAttribute(ctypes.byref(minor), CC_MINOR, device),
    ):
        if status:
            raise ConfigError(f"the NVIDIA driver does not tell what cuda:{index} is: error {status}; see nvidia-smi")
    return Gpu(nbytes.value, 10 * major.value + minor.value)


def require_room(settings: UpSettings, checkpoint: Checkpoint) -> None:
    """Check dtype and size of the weights against the GPUs.

    Raises ConfigError for a dtype that GPUs do not have, and for weights that alone take more than all memory of the
    GPUs that are to hold them. Anything else that does not fit is reported by a worker once it has loaded them.
    """
    if settings.device == "cpu":
        return
    size = settings.tensor_parallel
    num_workers = settings.prefill + settings.decode + settings.mixed
    for first, count in Counter(worker_devices(settings, num_workers)).items():
        index = gpu_index(first) or 0
        gpus = [look_at(number) for number in range(index, index + size)]
        dtype, most = resolve_device_dtype(settings.dtype, checkpoint, gpus[0].cc), max(gpu.nbytes for gpu in gpus)
        least = count * least_weights_nbytes(checkpoint, dtype, size)
        if least > most:
            owners, fewer = (f" for {count} workers", "start fewer, ") if count > 1 else ("", "")
            words = f"the weights of {checkpoint.name}{owners} take at least {least / 2**30:.1f} GiB of {first}"
            todo = f"{fewer}{what_holds(checkpoint, dtype, most // count)}"
            raise ConfigError(f"{words} as {dtype}, and it has {most / 2**30:.1f}: {todo}")


def what_holds(checkpoint: Checkpoint, dtype: str, nbytes: int) -> str:
    """Return the advice for weights that take more than a GPU's `nbytes`."""
    sizes = (n for n in range(2, checkpoint.config.num_heads + 1) if _is_shared_by(n, checkpoint.config))
    size = next((size for size in sizes if least_weights_nbytes(checkpoint, dtype, size) <= nbytes), None)
    shared = "" if size is None else f"set tensor_parallel to {size} or more, or "
    return f"{shared}take a smaller dtype or model"


def _is_shared_by(num_gpus: int, config: ModelConfig) -> bool:
    from engine.model_loader.tensor_parallel_shards import (  # late: torch takes seconds to import
        Shard,
        shard_config,
    )

    try:
        shard_config(config, Shard(0, num_gpus))
    except ConfigError:
        return False
    return True
