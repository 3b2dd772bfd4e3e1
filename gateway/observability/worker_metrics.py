"""What workers tell the registry, as metrics: together under vLLM's names, by worker under ours.

One scrape of the gateway has what dashboards and endpoint pickers want of a server, whatever ports its workers have.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from contracts.ids import Incarnation, WorkerId
from contracts.node import STEP_TOKENS, NodeInfo, NodeLoad
from gateway.dispatch.dispatcher import Dispatcher

Process = tuple[WorkerId, Incarnation]
MAX_FORMER = 4096
"""Processes of workers whose last counts are kept: one that comes back is not counted anew."""
_LABELS = ("model_name", "engine")


class SumOverWorkers:
    """Counters of workers as one each, from which one that leaves or starts anew takes nothing away."""

    def __init__(self, num_counters: int) -> None:
        self.totals = [0] * num_counters
        self._former: dict[Process, Sequence[int]] = {}

    def add(self, process: Process, counts: Sequence[int]) -> None:
        """Take the counts of a process as they are now."""
        before = self._former.pop(process, None) or [0] * len(counts)
        for at, (now, then) in enumerate(zip(counts, before, strict=True)):
            self.totals[at] += max(0, now - then)
        self._former[process] = counts
        if len(self._former) > MAX_FORMER:
            del self._former[next(iter(self._former))]


class WorkerMetrics(Collector):
    """The workers of one gateway's pool, as the registry listed them last."""

    def __init__(self, dispatch: Dispatcher, model: str, now_s: Callable[[], float] = time.time) -> None:
        self._dispatch, self._model, self._now_s = dispatch, model, now_s
        self._sum = SumOverWorkers(2 + len(STEP_TOKENS) + 1)

    def collect(self) -> Iterator[Metric]:
        loads = self._dispatch.workers.loads
        for info, load in loads:
            steps = load.steps or (0,) * (len(STEP_TOKENS) + 1)
            self._sum.add((info.worker_id, info.incarnation), (load.num_preemptions, load.num_step_tokens, *steps))
        preemptions, num_tokens, *steps = self._sum.totals
        yield self._usage(loads)
        yield self._cache_config(loads)
        yield self._waiting(loads)
        yield self._counter("num_preemptions", "answers that gave their pages up", preemptions)
        yield self._steps(steps, num_tokens)
        yield self._lora_requests()
        yield from _by_worker(loads)

    def _lora_requests(self) -> Metric:
        """Which LoRA adapters run and wait, in labels beside the time, as vLLM has it.

        All that are loaded may run at once.
        """
        names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "LoRA adapters of answers in progress", labels=names)
        adapters = self._dispatch.workers.adapters
        if adapters:
            running, waiting = self._dispatch.adapters_in_flight()
            family.add_metric((str(len(adapters)), ",".join(waiting), ",".join(running)), self._now_s())
        return family

    def _usage(self, loads: Sequence[tuple[NodeInfo, NodeLoad]]) -> Metric:
        words = "of the KV caches of all workers, held by requests: 0 to 1"
        family = GaugeMetricFamily("vllm:kv_cache_usage_perc", words, labels=_LABELS)
        family.add_metric((self._model, "0"), _used(loads))
        return family

    def _cache_config(self, loads: Sequence[tuple[NodeInfo, NodeLoad]]) -> Metric:
        """A series for each size of a block that there is, which is one but while a pool changes over."""
        labels = (*_LABELS, "block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching")
        family = GaugeMetricFamily("vllm:cache_config_info", "the KV caches of all workers", labels=labels)
        tokens: dict[int, int] = {}
        for info, _ in loads:
            if info.layout is not None:
                size = info.layout.block_size
                tokens[size] = tokens.get(size, 0) + info.capacity_tokens
        for size, count in sorted(tokens.items()):
            family.add_metric((self._model, "0", str(size), str(count // size), str(count), "True"), 1)
        return family

    def _waiting(self, loads: Sequence[tuple[NodeInfo, NodeLoad]]) -> Metric:
        """`capacity`: for room at a worker; `deferred`: for their prompt, which is computed or handed over."""
        words = "answers without a first token, by what they wait for"
        family = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", words, labels=(*_LABELS, "reason"))
        waiting = self._dispatch.num_inflight - self._dispatch.num_answering
        capacity = min(waiting, sum(load.num_waiting for _, load in loads))
        family.add_metric((self._model, "0", "capacity"), capacity)
        family.add_metric((self._model, "0", "deferred"), waiting - capacity)
        return family

    def _counter(self, name: str, words: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", words, labels=_LABELS)
        family.add_metric((self._model, "0"), value)
        return family

    def _steps(self, steps: Sequence[int], num_tokens: int) -> Metric:
        bounds = [*(f"{bound:.1f}" for bound in STEP_TOKENS), "+Inf"]
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "tokens of an engine step", labels=_LABELS)
        family.add_metric((self._model, "0"), list(zip(bounds, accumulate(steps), strict=True)), num_tokens)
        return family


def _used(loads: Sequence[tuple[NodeInfo, NodeLoad]]) -> float:
    capacity = sum(info.capacity_tokens for info, _ in loads)
    free = sum(min(load.free_tokens, info.capacity_tokens) for info, load in loads)
    return 1 - free / capacity if capacity else 0.0


def _by_worker(loads: Sequence[tuple[NodeInfo, NodeLoad]]) -> Iterator[Metric]:
    gauges = {
        "kv_cache_usage": ("of its KV cache, held by requests: 0 to 1", lambda info, load: _used([(info, load)])),
        "running": ("sequences that it computes", lambda _, load: load.num_running),
        "waiting": ("sequences that wait there", lambda _, load: load.num_waiting),
    }
    labels = ("worker", "role")
    for name, (words, value) in gauges.items():
        family = GaugeMetricFamily(f"tandem_gateway_worker_{name}", words, labels=labels)
        for info, load in loads:
            family.add_metric((info.worker_id, info.role.value), value(info, load))
        yield family
    counter = CounterMetricFamily("tandem_gateway_worker_preemptions", "answers that gave pages up", labels=labels)
    for info, load in loads:
        counter.add_metric((info.worker_id, info.role.value), load.num_preemptions)
    yield counter
