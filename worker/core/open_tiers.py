"""The tiers that settings ask for."""

from collections.abc import Callable, Sequence

import numpy as np

from contracts.errors import ConfigError
from contracts.kv_store import KVStore
from contracts.layout import KVLayout
from engine.cuda.kv.tier_pages import TierPages
from engine.engine import Engine
from kv_transfer.chunks.block_record import max_record_nbytes
from kv_transfer.codecs.level import allowed_levels
from kv_transfer.tiers.disk import DiskTier
from kv_transfer.tiers.host_memory import HostMemoryTier
from kv_transfer.tiers.remote_store import open_remote_store
from process.memory_limit import available_nbytes
from worker.core.host_pages import HostPages
from worker.core.kv_tiers import KVTiers
from worker.core.tier_memory import GIB, require_memory
from worker.settings import WorkerSettings

MAX_NAMELESS = 64
"""The workers of one role without an id of their own, such as replicas of a container, that keep KV in one place: each
takes the first folder of its role that no other writes to, so a later one finds what an earlier one kept."""


def open_tiers(
    settings: WorkerSettings, engine: Engine, tokens_per_s: Callable[[], float], wake: Callable[[], None]
) -> KVTiers:
    """Return the tiers that settings ask for, the fastest first; they ask for one at least.

    Raises ConfigError, which names the setting, for one that can't be.
    """
    pages = pages_of(engine)
    record_nbytes, is_on_gpu = max_record_nbytes(engine.layout), isinstance(pages, TierPages)
    require_memory(settings, record_nbytes, is_on_gpu, available_nbytes())
    tiers: list[KVStore] = []
    if settings.kv_host_gib:
        tiers.append(_host_tier(settings.kv_host_gib, engine.layout, pages))
    if settings.kv_disk:
        name = settings.worker_id.lstrip(".")
        folder, num_folders = settings.kv_disk / (name or settings.role), 1 if name else MAX_NAMELESS
        nbytes, layout_id = int(settings.kv_disk_gib * GIB), engine.layout.shared_id.hex()
        block_size = engine.layout.block_size
        _require_room("kv_disk_gib", settings.kv_disk_gib, record_nbytes)
        tiers.append(
            DiskTier(folder, layout_id, nbytes, num_folders=num_folders, block_size=block_size, is_direct=is_on_gpu)
        )
    if settings.kv_store:
        tiers.append(open_remote_store(settings.kv_store, engine.layout.block_size))
    levels = allowed_levels(settings.kv_codec)
    return KVTiers(tiers, engine.layout, pages, engine.pool.generations, tokens_per_s, wake, levels=levels)


def pages_of(engine: Engine) -> HostPages | TierPages:
    pool = engine.transfer_pool
    if isinstance(pool, Sequence | np.ndarray):
        return HostPages(pool if isinstance(pool, Sequence) else [pool])
    return TierPages(pool)


def _host_tier(gib: float, layout: KVLayout, pages: HostPages | TierPages) -> HostMemoryTier:
    slot_nbytes = max_record_nbytes(layout)
    _require_room("kv_host_gib", gib, slot_nbytes)
    allocate = pages.pinned if isinstance(pages, TierPages) else None
    return HostMemoryTier(int(gib * GIB), slot_nbytes, allocate, block_size=layout.block_size)


def _require_room(setting: str, gib: float, record_nbytes: int) -> None:
    if int(gib * GIB) < record_nbytes:
        raise ConfigError(f"{setting} is {gib}; one block takes {record_nbytes / GIB:.6f} GiB: raise it")
