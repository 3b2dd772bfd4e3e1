"""Records in Redis or Valkey, one server or a cluster, by redis-py's own clients."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import ClusterError, OutOfMemoryError, RedisClusterException, RedisError, ResponseError
from redis.retry import Retry

from contracts.errors import OutOfBlocks, Unavailable
from contracts.kv_store import BlockKey
from kv_transfer.chunks.block_record import VERSION

CALL_TIMEOUT_S = 0.5
"""The longest wait for a connection, and for each part of an answer, in seconds."""
_PREFIX = f"tandem:kv:v{VERSION}:".encode()
_CLUSTER = "+cluster"
Reply = TypeVar("Reply")


class RedisRecords:
    """The records of a Redis, which connects at the first call: see remote_store.RecordStore.

    Which of them go when it is full is for `maxmemory-policy` of the server to say, such as allkeys-lfu.
    """

    def __init__(self, url: str) -> None:
        """Raise ValueError for parameters of the URL that no connection has."""
        _check_parameters(url)
        self._url = url
        self._client: redis.Redis | RedisCluster | None = None

    def count_held(self, keys: Sequence[BlockKey]) -> int:
        def count(client: redis.Redis | RedisCluster) -> int:
            pipeline = client.pipeline(transaction=False)  # pyright: ignore[reportUnknownMemberType]
            for key in keys:
                pipeline.exists(_PREFIX + key)  # pyright: ignore[reportUnknownMemberType]
            found = pipeline.execute()
            return next((index for index, is_held in enumerate(found) if not is_held), len(found))

        return self._call(count)

    def get(self, keys: Sequence[BlockKey]) -> list[bytes | None]:
        def read(client: redis.Redis | RedisCluster) -> list[bytes | None]:
            pipeline = client.pipeline(transaction=False)  # pyright: ignore[reportUnknownMemberType]
            for key in keys:
                pipeline.get(_PREFIX + key)
            return pipeline.execute()

        return self._call(read)

    def put(self, key: BlockKey, record: memoryview) -> None:
        def write(client: redis.Redis | RedisCluster) -> None:
            try:
                client.set(_PREFIX + key, bytes(record), nx=True)
            except OutOfMemoryError as error:
                raise OutOfBlocks(
                    f"{error}; set maxmemory-policy, allkeys-lfu for one, to let old blocks go"
                ) from error
            except ClusterError:
                raise
            except ResponseError as error:  # a replica, or a user without the right: it can be read all the same
                raise OutOfBlocks(str(error)) from error

        self._call(write)

    def delete(self, keys: Sequence[BlockKey]) -> None:
        def remove(client: redis.Redis | RedisCluster) -> None:
            for key in keys:  # a cluster deletes several only of one slot
                client.unlink(_PREFIX + key)

        self._call(remove)

    def describe(self) -> str:
        """Return release and room of the server, or of a cluster's first; see RecordStore."""
        facts = self._call(lambda client: client.info())  # pyright: ignore[reportUnknownMemberType]
        first = next(iter(facts.values())) if _CLUSTER in self._url else facts
        name = "Valkey" if "valkey_version" in first else "Redis"
        release = first.get("valkey_version") or first["redis_version"]
        room, policy = int(first["maxmemory"]), first["maxmemory_policy"]
        words = f"{name} {release}, {first['used_memory_human']} used of {room / 2**30:.1f} GiB, {policy}"
        if room and policy != "noeviction":
            return words
        raise OutOfBlocks(
            f"{words}: set maxmemory, and maxmemory-policy allkeys-lfu for one, so that old blocks go when it is full"
        )

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _call(self, call: Callable[[redis.Redis | RedisCluster], Reply]) -> Reply:
        try:
            if self._client is None:
                self._client = _connect(self._url)
            return call(self._client)
        except (RedisError, RedisClusterException, OSError) as error:  # the second is no RedisError
            raise Unavailable(f"{type(error).__name__}: {error}") from error


def _check_parameters(url: str) -> None:
    """Make a connection that connects to nothing: redis-py looks at the parameters of a URL only then."""
    scheme, _, rest = url.partition("://")
    try:
        plain = redis.Redis.from_url(f"{scheme.removesuffix(_CLUSTER)}://{rest}")  # pyright: ignore[reportUnknownMemberType]
        plain.connection_pool.make_connection()
    except TypeError as error:
        raise ValueError(str(error)) from error


def _connect(url: str) -> redis.Redis | RedisCluster:
    """Return a client; that of a cluster asks it for its nodes."""
    scheme, _, rest = url.partition("://")
    limits = {
        "socket_timeout": CALL_TIMEOUT_S,
        "socket_connect_timeout": CALL_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),  # the tier decides when to try again
    }
    plain = f"{scheme.removesuffix(_CLUSTER)}://{rest}"
    if scheme.endswith(_CLUSTER):
        return RedisCluster.from_url(plain, **limits)
    return redis.Redis.from_url(plain, **limits)  # pyright: ignore[reportUnknownMemberType]
