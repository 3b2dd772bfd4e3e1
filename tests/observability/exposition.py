"""The names under which the services expose metrics, from their own code and without a process. Not a test."""

# pyright: reportArgumentType=false
# The twins of engine and node have their methods, not their classes.

import re
from collections.abc import Iterator

from contracts.ids import Incarnation, WorkerId
from coordinator.metrics import RedisTimes
from coordinator.metrics import render as coordinator_text
from coordinator.store.store import Counts
from gateway.dispatch.dispatcher import Dispatcher
from gateway.observability.metrics import Metrics
from kv_transfer.events import LevelStats, LinkStats
from tests.gateway.gateway_rig import GATEWAY, ListStore
from tests.nodes import node_info
from tests.path.ring import Ring, Side
from worker.core.status import StatusReporter
from worker.front.metrics import render as worker_text

SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "counter": ("",)}
_TYPE = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)


def families() -> dict[str, str]:
    """Name -> type, as Prometheus' text has them: counters end in _total."""
    found = {name: kind for text in texts() for name, kind in _TYPE.findall(text.decode())}
    return {name: kind for name, kind in found.items() if not name.endswith("_created")}


def samples() -> set[str]:
    return {f"{name}{suffix}" for name, kind in families().items() for suffix in SUFFIXES[kind]}


def texts() -> Iterator[bytes]:
    yield Metrics(Dispatcher(ListStore([]), GATEWAY, "s", "m"), "m", "0").text()
    yield coordinator_text([], Counts(), True, RedisTimes())
    for side in Ring().sides.values():
        yield _worker(side)


def _worker(side: Side) -> bytes:
    side.node.stats = lambda: [_link()]
    status = StatusReporter(WorkerId("d"), side.engine, side.node, side.ledger, side.roles).report()
    return worker_text(node_info(), status, True, {"jobs": 0, "cancels": 0}, 0.0)


def _link() -> LinkStats:
    levels = {"raw": LevelStats(1, 1, 0.0)}
    return LinkStats(WorkerId("d"), Incarnation("1"), True, "up", "ucx", "tcp/lo", 1, 1, 0.1, 0, 0, 1.0, levels)
