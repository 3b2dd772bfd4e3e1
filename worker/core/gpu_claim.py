"""The claim of a worker that takes all that is free of its GPUs.

A second worker that would do so is refused in words. Replicas of one service have the same settings, so each would take
the memory that the other one needs.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import torch

from contracts.errors import ConfigError
from engine.loader import resolve_device
from worker.settings import WorkerSettings

FOLDER = Path("/dev/shm")
"""The folder that workers of one host share, containers with a common IPC namespace too."""
_RW_FOR_ALL = 0o666


def claim_gpus(settings: WorkerSettings) -> list[int]:
    """Claim the GPUs of a worker whose KV cache takes all that is free there.

    Returns the open files that hold the claims until they are closed, or the process ends; none for a worker on the
    CPU, or with a cache of a stated size. Raises ConfigError if another worker has such a claim.
    """
    device = resolve_device(settings.device)
    if device == "cpu" or settings.kv_cache_mib:
        return []
    first = int(device.removeprefix("cuda:"))
    return claim(range(first, first + settings.tensor_parallel), _uuid_of)


def claim(indices: range, uuid_of: Callable[[int], str], folder: Path = FOLDER) -> list[int]:
    """Lock a file for each GPU, named by its UUID: indices differ between containers."""
    files: list[int] = []
    try:
        for index in indices:
            files.append(_lock(index, folder / f"tandem-gpu-{uuid_of(index)}.lock"))
    except ConfigError:
        for file in files:
            os.close(file)
        raise
    return files


def _lock(index: int, path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _RW_FOR_ALL)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ConfigError(
            f"another worker takes all that is free of cuda:{index}: give each worker a GPU of its own (device, "
            "TANDEM_DEVICE), or each of those that share one a size (kv_cache_mib, TANDEM_KV_CACHE_MIB)"
        ) from None
    return file


def _uuid_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
