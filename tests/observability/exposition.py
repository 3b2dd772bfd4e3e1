"""The names under which the services expose metrics, from their own code and without a process. Not a test."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# The twins of engine and node have their methods, not their classes.

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from contracts.ids import Incarnation, WorkerId
from contracts.layout import KVGroup, KVLayout
from coordinator.metrics import RedisTimes
from coordinator.metrics import render as coordinator_text
from coordinator.store.store import Counts
from engine.cache.group_page_table import GroupPageTable
from engine.cache.kv_groups import KVGroups
from gateway.dispatch.dispatcher import Dispatcher
from gateway.observability.metrics import Metrics
from kv_transfer.events import LevelStats, LinkStats
from kv_transfer.tiers.disk import DiskTier
from kv_transfer.tiers.host_memory import HostMemoryTier
from kv_transfer.tiers.remote_store import open_remote_store
from tests.gateway.gateway_rig import GATEWAY, ListStore
from tests.kv_transfer.tiers.block_samples import LAYOUT, RECORD_NBYTES
from tests.nodes import node_info
from tests.path.ring import Ring, Side
from worker.core.host_pages import HostPages
from worker.core.kv_tiers import KVTiers
from worker.core.peer_prefixes import PeerPrefixes
from worker.core.status import StatusReporter
from worker.front.metrics import render as worker_text
from worker.handoff.migration_source import MigrationSource

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
    me = WorkerId("d")
    facts = me, side.engine, side.node, side.ledger
    side.engine.prefix_exports = None  # which the twin lacks, and nobody asks here
    window = KVGroup(layers=(0,), num_kv_heads=1, head_dim=4, block_size=4, dtype="float32", kind="window", span=4)
    side.engine.groups = KVGroups(KVLayout(model="m", block_size=4, groups=(window,)), [GroupPageTable(1, 1)])
    peers = PeerPrefixes(*facts, side.roles, lambda: 0.0)
    reporter = StatusReporter(*facts, [*side.roles, MigrationSource(*facts), peers])
    with _tiers() as reporter.tiers:
        status = reporter.report()
    return worker_text(node_info(), status, True, {"jobs": 0, "cancels": 0}, 0.0)


@contextmanager
def _tiers() -> Iterator[KVTiers]:
    """Open one tier of each kind."""
    pages = np.zeros((LAYOUT.only_group.num_planes, 1, LAYOUT.block_nbytes // LAYOUT.only_group.num_planes), np.uint8)
    with TemporaryDirectory() as folder:
        disk = DiskTier(Path(folder, "disk"), LAYOUT.shared_id.hex(), 1 << 20)
        host, store = HostMemoryTier(1 << 20, RECORD_NBYTES), open_remote_store(f"file://{folder}")
        host._stats.refused.update(full=0, unavailable=0)  # which a tier shows once it has refused for these reasons
        tiers = KVTiers([host, disk, store], LAYOUT, HostPages([pages]), [0], lambda: 1000.0, lambda: None)
        try:
            yield tiers
        finally:
            tiers.close()


def _link() -> LinkStats:
    levels = {"raw": LevelStats(1, 1, 0.0)}
    return LinkStats(WorkerId("d"), Incarnation("1"), True, "up", "ucx", "tcp/lo", 1, 1, 0.1, 0, 0, 1.0, levels)
