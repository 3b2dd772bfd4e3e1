"""The host's memory that tiers take as their worker starts."""

import logging

from contracts.errors import ConfigError
from worker.core.device_saver import copy_nbytes
from worker.core.fillers import read_nbytes
from worker.settings import WorkerSettings

GIB = 1 << 30
_log = logging.getLogger(__name__)


def require_memory(settings: WorkerSettings, record_nbytes: int, is_on_gpu: bool, available_nbytes: int) -> int:
    """Return the bytes that the tiers of these settings take at once.

    Below a GPU they are page-locked: a disk or store is read into buffers of its own, and each tier has some to copy
    from the GPU into. Raises ConfigError, which names the settings, if so much is not available.
    """
    given = {"kv_host_gib": settings.kv_host_gib, "kv_disk": settings.kv_disk, "kv_store": settings.kv_store}
    names = [name for name, value in given.items() if value]
    read = [name for name in names if name != "kv_host_gib"] if is_on_gpu else []
    each_nbytes = read_nbytes(record_nbytes) + copy_nbytes(record_nbytes)
    nbytes = int(settings.kv_host_gib * GIB) + len(read) * each_nbytes
    if is_on_gpu and settings.kv_host_gib:
        nbytes += copy_nbytes(record_nbytes)
    if nbytes <= available_nbytes:
        _log.info("%s: %.2f GiB of this machine's memory are taken at the start", ", ".join(names), nbytes / GIB)
        return nbytes
    taken = f"{' and '.join(read)} take {each_nbytes / GIB:.2f} GiB of page-locked memory each" if read else ""
    said = [f"kv_host_gib is {settings.kv_host_gib}"] if settings.kv_host_gib else []
    remedies = ["lower it" if not read else "lower kv_host_gib"] if settings.kv_host_gib else []
    remedies += [f"leave out {' or '.join(read)}"] if read else []
    facts = "; ".join([*said, *([taken] if taken else [])])
    raise ConfigError(f"{facts}; {available_nbytes / GIB:.1f} GiB are available: {', or '.join(remedies)}")
