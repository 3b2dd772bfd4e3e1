"""The tier that several workers share: a store of somebody else's behind one small interface.

redis://HOST:PORT/DB, rediss://         one server of Redis or Valkey
redis+cluster://HOST:PORT, rediss+...   a cluster, by any of its nodes
file:///FOLDER                          a folder that all workers see
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from contracts.errors import ConfigError, OutOfBlocks, Unavailable
from contracts.held_prefixes import HeldPrefixes
from contracts.kv_store import BlockKey, BlockWorth
from kv_transfer.tiers.circuit_breaker import CircuitBreaker
from kv_transfer.tiers.shared_folder import SharedFolder
from kv_transfer.tiers.store_url import wrong_store_url
from kv_transfer.tiers.tier_stats import TierStats

BATCH = 8
"""The blocks that one call moves."""
_LOOKUP_BATCH = 256
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class RecordStore(Protocol):
    """The calls that a tier needs of a store. They raise Unavailable."""

    def count_held(self, keys: Sequence[BlockKey]) -> int:
        """Return how many of `keys` it holds, counted from the first without a gap."""
        ...

    def get(self, keys: Sequence[BlockKey]) -> list[bytes | None]: ...

    def put(self, key: BlockKey, record: memoryview) -> None:
        """Keep a record. Raises OutOfBlocks if the store is full or read only."""
        ...

    def delete(self, keys: Sequence[BlockKey]) -> None: ...

    def describe(self) -> str:
        """Return what kind of store answers, its release and its room.

        Raises OutOfBlocks if it keeps nothing new, or would keep nothing once it is full; says what to do.
        """
        ...

    def close(self) -> None: ...


class RemoteStoreTier:
    """The records in a store that others write as well; it evicts by its own rules.

    A store that fails is left alone for a while, see CircuitBreaker: no request waits for it then. `block_size`: tokens
    of a block, for `held`.
    """

    name = "store"
    is_local = False

    def __init__(
        self, store: RecordStore, where: str, clock: Callable[[], float] = time.monotonic, block_size: int = 0
    ) -> None:
        self.held = HeldPrefixes(block_size, is_shared=True)
        self._store, self._where = store, where
        self._breaker = CircuitBreaker(clock, self._on_change)
        self._stats = TierStats()
        self._lock = threading.Lock()
        self._is_full = self._is_closed = False
        self._has_answered = self._is_told = False

    @property
    def is_on(self) -> bool:
        return self._breaker.is_closed and not self._is_closed

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        if not keys:
            return 0
        held = 0
        for start in range(0, len(keys), _LOOKUP_BATCH):
            batch = keys[start : start + _LOOKUP_BATCH]
            count = self._call(lambda batch=batch: self._store.count_held(batch)) or 0
            held += count
            if count < len(batch):
                break
        return held

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[int]:
        sizes: list[int] = []
        with self._stats.load() as loading:
            for start in range(0, len(keys), BATCH):
                batch = keys[start : start + BATCH]
                records = self._call(lambda batch=batch: self._store.get(batch)) or []
                sizes += _copy(records, into[start : start + BATCH])
                if len(sizes) < start + len(batch):
                    break
            loading.found(sizes, len(keys))
        return sizes

    def store(self, key: BlockKey, record: memoryview, worth: BlockWorth) -> bool:
        """Keep a record; see KVStore. The store's own rules decide what goes for it."""

        def put() -> bool:
            self._store.put(key, record)
            return True

        try:
            is_kept = self._call(put) is not None
        except OutOfBlocks as error:
            self._stats.refused["full"] += 1
            if not self._is_full:
                _log.warning("KV store %s (kv_store) keeps nothing new: %s", self._where, error)
            self._is_full = True
            return False
        if is_kept:
            self._is_full = False
            self.held.add(key, worth.num_blocks)
            self._stats.stored(len(record))
        return is_kept

    def evict(self, keys: Iterable[BlockKey]) -> None:
        those = list(keys)
        for key in those:
            self.held.remove(key)
        self._call(lambda: self._store.delete(those))

    def stats(self) -> dict[str, float]:
        report = self._stats.report(0, 0) | {"on": float(self.is_on)}
        del report["blocks"], report["bytes"]  # the store's own business
        return report

    def close(self) -> None:
        self._is_closed = True
        self._store.close()

    def _call(self, call: Callable[[], Result]) -> Result | None:
        """Return what a call returns, or None if it was not made or failed."""
        with self._lock:
            if self._is_closed or not self._breaker.may_call():
                self._stats.refused["off"] += 1
                return None
        try:
            result = call()
        except Unavailable as error:
            with self._lock:
                self._stats.refused["unavailable"] += 1
                self._tell_first(str(error))
                self._breaker.failed(str(error))
            return None
        with self._lock:
            self._has_answered = True
            self._breaker.succeeded()
        return result

    def _tell_first(self, reason: str) -> None:
        """Log the first failure of a store that never answered."""
        if not (self._has_answered or self._is_told):
            _log.warning("KV store %s (kv_store) does not answer: %s; is its URL right?", self._where, reason)
        self._is_told = True

    def _on_change(self, is_on: bool, reason: str) -> None:
        if is_on:
            _log.info("KV store %s is used again", self._where)
        else:
            _log.warning("KV store %s (kv_store) is off: %s; it is tried again from time to time", self._where, reason)


def open_remote_store(url: str, block_size: int = 0) -> RemoteStoreTier:
    """Return the tier of a store; no connection is made yet. Raises ConfigError for a URL that names none."""
    return RemoteStoreTier(open_record_store(url), _without_password(url), block_size=block_size)


def open_record_store(url: str) -> RecordStore:
    """Return the store itself. Raises ConfigError for a URL that names none."""
    if wrong := wrong_store_url(url):
        raise ConfigError(f"kv_store can't be used: {wrong}")
    if (parts := urlsplit(url)).scheme == "file":
        return SharedFolder(Path(parts.path))
    from kv_transfer.tiers.redis_records import RedisRecords  # late: half a second, which most workers are spared

    try:
        return RedisRecords(url)
    except ValueError as error:
        raise ConfigError(f"kv_store is {_without_password(url)}; its parameters can't be used: {error}") from error


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def _copy(records: Sequence[bytes | None], into: Sequence[memoryview]) -> list[int]:
    """Copy records up to the first that is missing, or too large to be one of ours."""
    sizes: list[int] = []
    for record, buffer in zip(records, into, strict=False):
        if record is None or len(record) > len(buffer):
            break
        buffer[: len(record)] = record
        sizes.append(len(record))
    return sizes
