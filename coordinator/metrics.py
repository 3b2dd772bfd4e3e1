"""The figures that Prometheus reads: workers, credits, requests, refusals, and how fast Redis is."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.request_states import ENDS, LIVE
from coordinator.store.store import Counts, WorkerView
from process.listener import PAUSES

CREDITS = ("pending_tokens", "num_prefills", "reserved_tokens", "num_decodes")
BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
COUNTERS = {
    "placed": "requests placed",
    "overloaded": "placements refused: no credit",
    "unavailable": "placements refused: no live worker",
    "too_long": "placements refused: longer than any worker takes",
    "illegal": "reports refused: not in the table of states",
    "late": "reports passed over: another worker's had overtaken them",
    "stale": "reports refused: of an old epoch",
    "unknown": "reports refused: no such request",
    "reaped": "requests ended because their gateway was gone",
    "role_changes": "changes of a worker's role",
    "buried": "workers that died: found dead, or they told that their core did",
}


class RedisTimes:
    """How long calls to Redis take; `observe` is for RedisStore."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name, words = "tandem_coordinator_redis_seconds", "duration of calls to Redis"
        self._histogram = Histogram(name, words, ["call"], buckets=BUCKETS_S, registry=self.registry)

    def observe(self, call: str, seconds: float) -> None:
        self._histogram.labels(call).observe(seconds)


def render(workers: list[WorkerView], counts: Counts | None, is_leader: bool, times: RedisTimes) -> bytes:
    """Prometheus text. Without `counts` (no Redis to work with) `tandem_coordinator_redis_up` is 0."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StateCollector(workers, counts, is_leader))
    return generate_latest(registry) + generate_latest(times.registry)


class StateCollector(Collector):
    """A snapshot as metrics."""

    def __init__(self, workers: list[WorkerView], counts: Counts | None, is_leader: bool) -> None:
        self._workers, self._counts, self._is_leader = workers, counts, is_leader

    def collect(self) -> Iterator[Metric]:
        yield _gauge("redis_up", "1 while Redis answers and takes writes", {(): float(self._counts is not None)})
        yield _gauge("leader", "1 if this process reaps", {(): float(self._is_leader)})
        words = "times that new connections waited for file descriptors"
        yield CounterMetricFamily("tandem_coordinator_accept_pauses", words, PAUSES.num)
        if self._counts is not None:
            yield from self._of_workers()
            yield from self._of_requests(self._counts)

    def _of_workers(self) -> Iterator[Metric]:
        kinds = Counter((worker.node.info.role.value, _state(worker)) for worker in self._workers)
        yield _gauge("workers", "known workers", kinds, "role", "state")
        for name in CREDITS:
            held = {(worker.node.info.worker_id,): getattr(worker, name) for worker in self._workers}
            yield _gauge(f"credit_{name}", f"credits taken: {name}", held, "worker")

    def _of_requests(self, counts: Counts) -> Iterator[Metric]:
        live = {(state.value,): counts.states.get(state.value, 0) for state in LIVE}
        yield _gauge("requests", "live requests", live, "state")
        ended = CounterMetricFamily("tandem_coordinator_ended", "requests ended", labels=["state"])
        for state in sorted(ENDS):  # none is left out: no rate sees a count that begins with its first request
            ended.add_metric([state.value], counts.ended.get(state.value, 0))
        yield ended
        for name, words in COUNTERS.items():
            yield CounterMetricFamily(f"tandem_coordinator_{name}", words, getattr(counts, name))


def _state(worker: WorkerView) -> str:
    if not worker.node.alive:
        return "dead"
    return "draining" if worker.node.load.draining else "alive"


def _gauge(name: str, words: str, values: Mapping[Any, float], *labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"tandem_coordinator_{name}", words, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family
