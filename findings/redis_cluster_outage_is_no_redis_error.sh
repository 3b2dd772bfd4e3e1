#!/usr/bin/env bash
# Expected: redis-py's exceptions derive from RedisError, so `except RedisError` covers a store that is away, whether it
#   is one server or a cluster.
# Seen: a client of one server raises ConnectionError, a RedisError. A client of a cluster none of whose nodes answers
#   raises RedisClusterException, which derives from Exception alone and passes such a handler.
# Packages: redis 8.1.0 (PyPI).
# Why it matters to who serves models: caches of KV and routers' registries keep a Redis or Valkey server at first and a
#   cluster later, behind one `except RedisError` that turns a dead store into a miss. With the cluster the same outage
#   ends the request or the worker's thread. Catch both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps redis==8.1.0
"$folder/venv/bin/python" - <<'PYTHON'
import socket
from collections.abc import Callable

import redis
from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException, RedisError


def outage(connect: Callable[[int], object]) -> Exception:
    """Return what a client raises at a port of this machine that nobody listens on."""
    with socket.socket() as unused:  # bound, not listening: each connection is refused
        unused.bind(("127.0.0.1", 0))
        try:
            connect(unused.getsockname()[1])
        except Exception as error:
            return error
    raise AssertionError("somebody listens there")


one = outage(lambda port: redis.Redis(host="127.0.0.1", port=port).ping())
cluster = outage(lambda port: RedisCluster(host="127.0.0.1", port=port))
print("redis", redis.__version__)
for name, error in (("one server", one), ("a cluster", cluster)):
    print(f"{name}: {type(error).__name__}, caught by `except RedisError`: {isinstance(error, RedisError)}")
assert isinstance(one, RedisError), "one server's outage is no RedisError now"
assert type(cluster) is RedisClusterException and not isinstance(cluster, RedisError), "clusters behave otherwise now"
PYTHON
