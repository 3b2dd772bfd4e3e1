"""From a URL to a store."""

from contracts.errors import ConfigError
from coordinator.memory_store import MemoryStore
from coordinator.redis_store import Observer, RedisStore, unobserved
from coordinator.settings import SCHEMES
from coordinator.store import Store


def connect(redis_url: str, pool: str, observe: Observer = unobserved) -> Store:
    """The store of `pool`; no connection is made yet. `memory://` is a store for this process alone.

    Raises ConfigError on any other scheme, or a pool's name that would break its keys.
    """
    if redis_url == "memory://":
        return MemoryStore()
    if not redis_url.startswith(SCHEMES):
        raise ConfigError(f"redis_url is '{redis_url}'; it must begin with {', '.join(SCHEMES)}")
    if not pool or any(mark in pool for mark in "{}"):
        raise ConfigError(f"pool is '{pool}'; it must be a name without braces")
    return RedisStore(redis_url, pool, observe=observe)
