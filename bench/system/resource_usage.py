"""The metrics of a system's services before and after a load: where time went and what each did."""

import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.report.result import ResultRow
from bench.system.local_system import System
from process.local_http import open_local

Samples = Mapping[tuple[str, str], float]
"""Values by metric and the value of its label, if it has one."""

_MEANS = {"tandem_gateway_stage_seconds": "stage", "tandem_gateway_exposed_seconds": "exposed"}
_WORK = (
    "prefill_tokens",
    "decode_tokens",
    "preemptions",
    "kv_handoffs_received_committed",
    "handoffs_aborted",
    "chunks_bad",
)
_SAID_S = 0.5  # a core reports its counters ten times a second, so the last of a load come after its end
_STAGE = re.compile(r"([a-z][a-z ]*) (\d+\.\d) s(?:, |$)")


class SystemCounters:
    """The metrics of one system; `rows()` returns what happened since the last call or since the start."""

    def __init__(self, system: System) -> None:
        self._system, self._nodes = system, system.nodes()
        self._last = self._take()

    def rows(self, wall_s: float) -> list[ResultRow]:
        time.sleep(_SAID_S)
        (gateway, workers, cpu_s), self._last = self._last, self._take()
        now_gateway, now_workers, now_cpu_s = self._last
        rows = mean_rows(gateway, now_gateway)
        for worker, samples in now_workers.items():
            rows += work_rows(worker, workers[worker], samples)
        rows += pause_rows({"gateway": now_gateway} | now_workers)
        spans_s = {name: now_cpu_s[name] - before_s for name, before_s in cpu_s.items()}
        return rows + [
            ResultRow("processor cores used", span_s / wall_s, "cores", {"by": n}) for n, span_s in spans_s.items()
        ]

    def _take(self) -> tuple[Samples, dict[str, Samples], dict[str, float]]:
        workers = [node for node in self._nodes if node["role"] in ("prefill", "decode", "mixed")]
        return (
            read(self._system.url),
            {node["id"]: read(node["url"]) for node in workers},
            {name: cpu_s(pid) for name, pid in pids(self._nodes).items()},
        )


def read(url: str) -> Samples:
    with open_local(f"{url}/metrics", timeout_s=10) as response:
        return samples_of(response.read().decode())


def samples_of(text: str) -> Samples:
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("tandem_") and not sample.name.endswith("_bucket")
    }


def mean_rows(before: Samples, after: Samples) -> list[ResultRow]:
    """Return the means of what was observed in between, in ms."""
    rows = []
    for (name, label), value in after.items():
        metric = name.removesuffix("_sum")
        if metric not in _MEANS or metric == name:
            continue
        count = after[f"{metric}_count", label] - before.get((f"{metric}_count", label), 0.0)
        if count:
            mean_s = (value - before.get((name, label), 0.0)) / count
            rows.append(ResultRow(f"mean {label or _MEANS[metric]}", mean_s * 1e3, "ms", {"of": int(count)}))
    return rows


def work_rows(worker: str, before: Samples, after: Samples) -> list[ResultRow]:
    rows = []
    for what in _WORK:
        key = f"tandem_worker_{what}_total", ""
        if done := after.get(key, 0.0) - before.get(key, 0.0):
            unit = "tokens" if what.endswith("tokens") else "times"
            rows.append(ResultRow(what.replace("_", " "), done, unit, {"worker": worker}))
    return rows


def pause_rows(samples: Mapping[str, Samples]) -> list[ResultRow]:
    """Return the longest garbage collection of the gateway and of each worker since it was ready."""
    longest_s = {
        by: value
        for by, found in samples.items()
        for (name, _), value in found.items()
        if name.endswith("_longest_collection_seconds")
    }
    return [ResultRow("longest collection", seconds * 1e3, "ms", {"by": by}) for by, seconds in longest_s.items()]


def pids(nodes: Sequence[Mapping]) -> dict[str, int]:
    fronts = {node["id"]: node["pid"] for node in nodes}
    return fronts | {f"{node['id']} core": node["core_pid"] for node in nodes if node.get("core_pid")}


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process; 0 if it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def start_rows(system: System, took_s: float) -> list[ResultRow]:
    """Return the time from the command to the gateway's readiness, and the stages of each engine's start.

    The rest is processes, imports, memory and the gateway.
    """
    rows = [ResultRow("start to ready", took_s, "s")]
    for worker in system.workers():
        stages = stages_of(Path(worker["log"]).read_text(encoding="utf-8", errors="replace"))
        params = {"worker": worker["id"]}
        rows += [ResultRow(f"start: {stage}", seconds, "s", params) for stage, seconds in stages.items()]
        if stages:
            rows.append(ResultRow("start: all else", took_s - sum(stages.values()), "s", params))
    return rows


def stages_of(log: str) -> dict[str, float]:
    """Return the stages in the line with which the engine says that it is ready; none without such a line."""
    ready = [line for line in log.splitlines() if " ready: " in line and ";" in line]
    return {stage: float(s) for stage, s in _STAGE.findall(ready[-1].rpartition("; ")[2])} if ready else {}


def memory_rows(system: System) -> list[ResultRow]:
    """Return the KV cache of each worker, and what is taken of each GPU, if there are any."""
    rows = []
    for worker in system.workers():
        tokens = read(worker["url"])["tandem_worker_capacity_tokens", ""]
        rows.append(ResultRow("KV cache", tokens, "tokens", {"worker": worker["id"]}))
    for index, used, total in _gpus():
        rows.append(ResultRow("GPU memory taken", used / 1024, "GiB", {"gpu": index}, limit=total / 1024))
    return rows


def gpu_names() -> list[str]:
    return [name for (name,) in _asked("name")]


def _gpus() -> list[tuple[int, float, float]]:
    """Return index, MiB taken and MiB in all of each GPU."""
    return [(int(index), float(used), float(total)) for index, used, total in _asked("index,memory.used,memory.total")]


def _asked(columns: str) -> list[list[str]]:
    """Return a row for each GPU; none without the driver's tool."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    return [line.split(", ") for line in said.splitlines()]
