"""From a URL to a store, and to its first answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from contracts.errors import ConfigError, RegistryError
from coordinator.settings import SCHEMES
from coordinator.store.redis_store import Observer, RedisStore, unobserved
from coordinator.store.store import Store

T = TypeVar("T")

START_PATIENCE_S, START_RETRY_S = 3.0, 0.2


def connect(redis_url: str, pool: str, observe: Observer = unobserved) -> Store:
    """Return the store of `pool`; no connection is made yet.

    Raises ConfigError on a scheme that is not Redis', or a pool's name that would break its keys.
    """
    if not redis_url.startswith(SCHEMES):
        raise ConfigError(f"redis_url is '{redis_url}'; it must begin with {', '.join(SCHEMES)}")
    if not pool or any(mark in pool for mark in "{}"):
        raise ConfigError(f"pool is '{pool}'; it must be a name without braces")
    return RedisStore(redis_url, pool, observe=observe)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Call a store at the start of a service, again and again while it does not answer.

    Redis may be late while all of a system starts at once: nobody's start, nor the model that was loaded meanwhile,
    should be lost for that. Raises Unavailable, of Redis after `START_PATIENCE_S`.
    """
    deadline_s = time.monotonic() + START_PATIENCE_S
    while True:
        try:
            return await call()
        except RegistryError:
            if time.monotonic() >= deadline_s:
                raise
        await asyncio.sleep(START_RETRY_S)
