"""The core's status as Prometheus text."""

import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from contracts.node import NodeInfo
from process.listener import PAUSES
from worker.messages import CoreStatus, LinkStatus

_TIER = re.compile(r"kv_(host|disk|store|peer)_(.+)")
"""The core's name of what one tier counts: see worker.core.kv_tiers."""
_PLACE = re.compile(r"accepted_tokens_(\d+)")
"""The core's name of how many drafted tokens in this place of a draft were right."""


class StatusCollector(Collector):
    """A collector that reads the metrics off the status: there is one account, so nothing drifts apart."""

    def __init__(
        self, info: NodeInfo, status: CoreStatus | None, is_well: bool, taken: Mapping[str, int], started_at_s: float
    ) -> None:
        self._info = info
        self._status = status
        self._is_well = is_well
        self._taken = taken
        self._started_at_s = started_at_s

    def collect(self) -> Iterator[Metric]:
        words = "1 while the engine core lives and turns"
        up = GaugeMetricFamily("tandem_worker_up", words, labels=["worker", "role", "model"])
        up.add_metric([self._info.worker_id, self._info.role, self._info.model], float(self._is_well))
        yield up
        # No labels: the next process at the same address changes the value, and may have another worker id.
        words = "when this worker was ready, in seconds since 1970"
        yield GaugeMetricFamily("tandem_worker_start_time_seconds", words, self._started_at_s)
        yield _counter("accept_pauses", "times that new connections waited for file descriptors", PAUSES.num)
        for name, count in self._taken.items():
            yield _counter(f"{name}_taken", f"{name} that came over HTTP", count)
        if self._status is None:
            return
        yield _counter("steps", "engine steps", self._status.num_steps)
        yield from _tiers(self._status)
        for name, value in sorted(self._status.counters.items()):
            if _TIER.match(name) or _PLACE.match(name):
                continue
            yield _counter(name, f"{name.replace('_', ' ')} since the worker started", value)
        for name, value in sorted(self._status.gauges.items()):
            if _TIER.match(name):
                continue
            yield GaugeMetricFamily(f"tandem_worker_{name}", f"{name.replace('_', ' ')} now", value)
        yield from _links(self._status.links)
        yield from _drafts(self._info, self._status)
        yield from _vllm(self._info, self._status)


def render(
    info: NodeInfo, status: CoreStatus | None, is_well: bool, taken: Mapping[str, int], started_at_s: float
) -> bytes:
    """Return the page of metrics.

    `is_well`: as `/health` reports. `taken`: how many messages of each kind the front has taken.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(info, status, is_well, taken, started_at_s))
    return generate_latest(registry)


def _counter(name: str, words: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"tandem_worker_{name}", words, value)


def _tiers(status: CoreStatus) -> Iterator[Metric]:
    """Yield what each tier below the KV cache counts and holds, the tier as a label."""
    for values, family_of in ((status.counters, CounterMetricFamily), (status.gauges, GaugeMetricFamily)):
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for match, value in ((_TIER.match(name), value) for name, value in sorted(values.items())):
            if match is not None:
                tier, name = match.groups()
                words = f"{name.replace('_', ' ')} of a tier below the KV cache"
                family = families.setdefault(name, family_of(f"tandem_worker_kv_tier_{name}", words, labels=["tier"]))
                family.add_metric([tier], value)
        yield from families.values()


def _vllm(info: NodeInfo, status: CoreStatus) -> Iterator[Metric]:
    """Yield under vLLM's metric names what only a worker knows; the gateway has the others."""
    labels, own = ["model_name", "engine"], [info.model, info.worker_id]
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # today's name, and the one of older dashboards
        used = GaugeMetricFamily(f"vllm:{name}", "of the KV cache, held by requests: 0 to 1", labels=labels)
        if capacity := status.gauges.get("capacity_tokens"):
            used.add_metric(own, 1 - status.gauges["free_tokens"] / capacity)
        yield used
    preempted = CounterMetricFamily("vllm:num_preemptions", "answers that gave their pages up", labels=labels)
    preempted.add_metric(own, status.counters.get("preemptions", 0.0))
    yield preempted


def _drafts(info: NodeInfo, status: CoreStatus) -> Iterator[Metric]:
    """Yield how many drafted tokens were right, by their place, under our name and vLLM's."""
    places = {match.group(1): value for name, value in sorted(status.counters.items()) if (match := _PLACE.match(name))}
    num_accepted = sum(places.values())
    labels, own = ["model_name", "engine"], [info.model, info.worker_id]
    by_place = CounterMetricFamily(
        "tandem_worker_accepted_tokens", "drafted tokens that were right", labels=["position"]
    )
    vllm_by_place = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "drafted tokens that were right", labels=[*labels, "position"]
    )
    for place, value in places.items():
        by_place.add_metric([place], value)
        vllm_by_place.add_metric([*own, place], value)
    yield by_place
    yield vllm_by_place
    for name, words, value in (
        ("num_drafts", "drafts that were verified", status.counters.get("drafts", 0.0)),
        ("num_draft_tokens", "tokens of these", status.counters.get("draft_tokens", 0.0)),
        ("num_accepted_tokens", "drafted tokens that were right", num_accepted),
    ):
        family = CounterMetricFamily(f"vllm:spec_decode_{name}", words, labels=labels)
        family.add_metric(own, value)
        yield family


def _links(links: list[LinkStatus]) -> Iterator[Metric]:
    """Yield a series for each peer and direction; `transport` is the one in use."""
    labels = ["peer", "direction", "transport", "state"]
    for name in sorted({name for link in links for name in link.counters}):
        family = CounterMetricFamily(
            f"tandem_link_{name}", f"{name.replace('_', ' ')} of the handoff link", labels=labels
        )
        for link in links:
            direction = "out" if link.outgoing else "in"
            family.add_metric([link.peer, direction, link.transport, link.state], link.counters[name])
        yield family
    rates = GaugeMetricFamily("tandem_link_nbytes_per_second", "of handoffs that finished lately", labels=labels)
    for link in links:
        if link.outgoing:
            rates.add_metric([link.peer, "out", link.transport, link.state], link.nbytes_per_s)
    yield rates
    yield from _levels(links)


def _levels(links: list[LinkStatus]) -> Iterator[Metric]:
    """Yield what each level of compression did on the links that may compress."""
    labels = ["peer", "direction", "level"]
    words = {
        "codec_nbytes": "KV at this level, before compression",
        "codec_wire_nbytes": "KV at this level, as it was sent",
        "codec_seconds": "encoding, where direction is out, or decoding",
    }
    families = {name: CounterMetricFamily(f"tandem_link_{name}", text, labels=labels) for name, text in words.items()}
    for link in links:
        direction = "out" if link.outgoing else "in"
        for name, level in link.levels.items():
            values = (level.nbytes, level.wire_nbytes, level.seconds)
            for family, value in zip(families.values(), values, strict=True):
                family.add_metric([link.peer, direction, name], value)
    yield from families.values()
