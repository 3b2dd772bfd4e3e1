"""What the gateway counts, as Prometheus text; generation_run counts an answer as it goes and ends."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.migration_policy import MigrationReason
from gateway.dispatch.dispatcher import Dispatcher
from gateway.error_codes import KNOWN
from gateway.generation.time_account import non_overlapped_transfer_s, stage_seconds
from gateway.observability.tenant_metrics import TenantMetrics
from gateway.observability.vllm_metrics import VllmMetrics
from gateway.observability.worker_metrics import WorkerMetrics
from gateway.tenants.tenant_accounts import TenantAccount
from process.garbage_collector import COLLECTIONS
from process.listener import PAUSES

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SHORT_SECONDS = (0.0005, 0.001, 0.002, *_SECONDS)


class Metrics:
    """The counts, gauges and histograms of one gateway. Times are in seconds."""

    def __init__(
        self,
        dispatch: Dispatcher,
        model: str,
        version: str,
        max_model_len: int = 100_000,
        tenants: Iterable[TenantAccount] = (),
    ) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("tandem_gateway_requests", "requests by outcome", ["code"], registry=registry)
        for code in KNOWN:  # from 0 on: no rate sees a count that begins with its first request
            self.requests.labels(code)
        self.prompt_tokens = Counter("tandem_gateway_prompt_tokens", "prompt tokens", registry=registry)
        self.cached_tokens = Counter("tandem_gateway_cached_tokens", "prompt tokens from a cache", registry=registry)
        self.tokens = Counter("tandem_gateway_completion_tokens", "accepted answer tokens", registry=registry)
        self.ttft = Histogram("tandem_gateway_ttft_seconds", "to the first token", buckets=_SECONDS, registry=registry)
        self.itl = Histogram("tandem_gateway_itl_seconds", "mean gap of a request", buckets=_SECONDS, registry=registry)
        self.e2e = Histogram("tandem_gateway_e2e_seconds", "to the end", buckets=_SECONDS, registry=registry)
        timed = {"buckets": _SHORT_SECONDS, "registry": registry}
        self.stages = Histogram("tandem_gateway_stage_seconds", "as the workers tell", ["stage"], **timed)
        self.non_overlapped_transfer = Histogram("tandem_gateway_exposed_seconds", "handoff beyond token 0", **timed)
        Info("tandem_gateway_build", "what runs", registry=registry).info({"version": version, "model": model})
        inflight = Gauge("tandem_gateway_inflight", "answers in progress", registry=registry)
        inflight.set_function(lambda: dispatch.num_inflight)
        registry.register(_Counts(dispatch))
        registry.register(WorkerMetrics(dispatch, model))
        registry.register(TenantMetrics(tenants))
        self.vllm = VllmMetrics(registry, dispatch, model, max_model_len)
        labels = ("handler", "method", "status")
        self.http_requests = Counter("http_requests", "HTTP requests by status class", labels, registry=registry)

    def account(self, told: Mapping[str, float]) -> None:
        """Count what the workers of one answer told of its time."""
        for stage, seconds in stage_seconds(told).items():
            self.stages.labels(stage).observe(seconds)
        if (seconds := non_overlapped_transfer_s(told)) is not None:
            self.non_overlapped_transfer.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Counts(Collector):
    """What dispatch counts itself, and Python's garbage collector."""

    def __init__(self, dispatch: Dispatcher) -> None:
        self._dispatch = dispatch

    def collect(self) -> Iterator[Metric]:
        for name in ("unknown", "stale", "duplicates", "cancels", "losses", "replays"):
            count = getattr(self._dispatch, f"num_{name}")
            yield CounterMetricFamily(f"tandem_gateway_{name}", f"{name} since the start", value=count)
        migrations = CounterMetricFamily(
            "tandem_gateway_migrations", "answers that were to move to another worker", labels=["outcome", "reason"]
        )
        for outcome, reason in product(("committed", "failed"), MigrationReason):
            migrations.add_metric([outcome, reason], self._dispatch.migrations.counts[outcome, reason])
        yield migrations
        for name, value in (("collections", COLLECTIONS.num), ("collection_seconds", COLLECTIONS.seconds)):
            yield CounterMetricFamily(f"tandem_gateway_{name}", "of the garbage collector", value=value)
        words = "times that new connections waited for file descriptors"
        yield CounterMetricFamily("tandem_gateway_accept_pauses", words, value=PAUSES.num)
        longest = "the garbage collector's longest"
        yield GaugeMetricFamily("tandem_gateway_longest_collection_seconds", longest, value=COLLECTIONS.longest_s)
