"""Disks and stores of KV that are slow, full, cut off, broken or gone for a while."""

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

import redis.asyncio as redis

from bench.serving.kept_kv import STORE_HOST, KeptKV
from bench.system.faulty_disk import BROKEN, READ_ONLY, DiskState

HOLDS_S = (0.2, 1.0, 4.0)
DELAYS_S = (0.02, 0.2, 1.0)
"""The delays of one call of the file system; a block takes about ten."""
STORE_MBIT = (0.5, 5.0)


async def freeze_store(kept: KeptKV, rng: random.Random) -> bool:
    pid = kept.places.store.pid
    if pid is None:
        return False
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(rng.choice(HOLDS_S))
    os.kill(pid, signal.SIGCONT)
    return True


async def empty_store(kept: KeptKV, rng: random.Random) -> bool:
    """Kill the store, and start it again empty after a while without one."""
    await asyncio.to_thread(kept.places.store.stop)
    await asyncio.sleep(rng.choice(HOLDS_S))
    kept.places.store.start()
    return True


async def fill_store(kept: KeptKV, rng: random.Random) -> bool:
    """Let the store refuse what is new for a while, as one does that is full and evicts nothing."""
    with suppress(redis.RedisError):
        async with redis.Redis.from_url(kept.places.store.url, socket_timeout=5) as client:
            await client.config_set("maxmemory-policy", "noeviction")
            await client.config_set("maxmemory", "1mb")
            await asyncio.sleep(rng.choice(HOLDS_S))
            await client.config_set("maxmemory-policy", "allkeys-lfu")
            await client.config_set("maxmemory", "512mb")
            return True
    return False


async def cut_off_store(kept: KeptKV, rng: random.Random) -> bool:
    """Let packets to and from the store get lost; False without a network."""
    if (network := kept.services.network) is None:
        return False
    with network.cut_off(STORE_HOST):
        await asyncio.sleep(rng.choice(HOLDS_S))
    return True


async def slow_store(kept: KeptKV, rng: random.Random) -> bool:
    """Put the store behind a slow network; False without one."""
    if (network := kept.services.network) is None:
        return False
    with network.slow(STORE_HOST, rng.choice(STORE_MBIT)):
        await asyncio.sleep(rng.choice(HOLDS_S))
    return True


async def take_folder_away(kept: KeptKV, rng: random.Random) -> bool:
    """Move a worker's folder away for a while, as a disk does that is unmounted."""
    if not (folders := sorted(path for path in kept.places.disk.glob("*/") if path.suffix != ".away")):
        return False
    folder = rng.choice(folders)
    away = folder.with_suffix(".away")
    folder.rename(away)
    await asyncio.sleep(rng.choice(HOLDS_S))
    if folder.exists():  # the worker was started again meanwhile and made a new one
        shutil.rmtree(away)
    else:
        away.rename(folder)
    return True


async def fill_disk(kept: KeptKV, rng: random.Random) -> bool:
    """Fill the disk up for a while; False where it has no limit of its own: see `limited_disk`."""
    disk = kept.places.disk
    if not os.path.ismount(disk):
        return False
    filler = disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            await asyncio.sleep(0)
    await asyncio.sleep(rng.choice(HOLDS_S))
    filler.unlink()
    return True


async def pull_out_disk(kept: KeptKV, rng: random.Random) -> bool:
    """Let the disk be gone for a while, with the files that are open; False where it can't fail."""
    if (faulty := kept.places.faulty) is None:
        return False
    await asyncio.to_thread(faulty.pull_out)
    await asyncio.sleep(rng.choice(HOLDS_S))
    await asyncio.to_thread(faulty.plug_in)
    return True


def _disk_that(state: Callable[[random.Random], DiskState]) -> "Outage":
    async def make(kept: KeptKV, rng: random.Random) -> bool:
        if kept.places.faulty is None:
            return False
        with kept.places.faulty.during(state(rng)):
            await asyncio.sleep(rng.choice(HOLDS_S))
        return True

    return make


Outage = Callable[[KeptKV, random.Random], Awaitable[bool]]
"""Makes a fault and waits for its end; returns whether it could be made here."""
OUTAGES: dict[str, Outage] = {
    "store frozen": freeze_store,
    "store restarted empty": empty_store,
    "store full": fill_store,
    "store cut off": cut_off_store,
    "store slow": slow_store,
    "folder taken away": take_folder_away,
    "disk full": fill_disk,
    "disk gone": pull_out_disk,
    "disk slow": _disk_that(lambda rng: DiskState(delay_s=rng.choice(DELAYS_S))),
    "disk hangs": _disk_that(lambda rng: DiskState(hangs=True)),
    "disk broken": _disk_that(lambda rng: DiskState(error=BROKEN)),
    "disk read only": _disk_that(lambda rng: DiskState(write_error=READ_ONLY)),
}
