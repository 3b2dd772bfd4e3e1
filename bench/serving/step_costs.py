"""The seconds of a step on an H200, between those that were measured."""

import json
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from bench.report.result import RESULTS
from engine.scheduler.batch import Batch

MIXED = "2026-11-26-engine-gpu-mixed-ending-h200"
ALONE = "2026-11-28-engine-gpu-beside-vllm-h200"
SERVED_MORE_S = 0.0012
"""What a served worker adds to a step of prompts beside answers."""


@dataclass(frozen=True)
class ServedHost:
    """What a served worker's host takes at least for a step of prompts beside answers."""

    least_s: float
    per_answer_s: float


BOUND_EACH_LAYER = ServedHost(0.0058, 2e-5)
"""When each layer's launches of attention were bound anew: chosen, with SERVED_MORE_S, so that the simulated single
worker has the times of bench/results/2026-11-29-serving-gpu-adaptive-h200.md."""
BOUND_ONCE = ServedHost(0.0036, 1.2e-5)
"""Since they are bound once a batch: the same, times what the host's share of a step fell to in one run, 0.62 of it
(bench/results/2026-11-29-engine-gpu-mixed-step-parts-h200.md). No served worker was measured since."""
READ_BYTES_PER_S, KV_BYTES_PER_TOKEN = 4.45e12, 65_536


class StepCosts:
    """The seconds of a step on an H200, of Llama-8B's shape in FP8."""

    def __init__(self, host: ServedHost = BOUND_ONCE) -> None:
        self._host = host
        alone = {
            (row["name"], row["params"].get("batch") or row["params"].get("length")): row["value"]
            for row in rows_in(ALONE)
        }
        self._decode = sorted((batch, ms / 1e3) for (name, batch), ms in alone.items() if name == "engine_decode_step")
        short, long = 1 / alone["engine_prefill", 1024], 1 / alone["engine_prefill", 8192]
        self._per_context = (long - short) / (4096 - 512)
        self._per_token = short - 512 * self._per_context
        mixed: dict[int, list[tuple[float, float]]] = {}
        for row in rows_in(MIXED):
            params = row["params"]
            if row["name"] == "engine_mixed_gap" and "asks for" not in params:
                num_answers = params["answers"]
                added_s = row["value"] / 1e3 - _between(self._decode, num_answers)
                mixed.setdefault(num_answers, [(0, 0.0)]).append((params["chunk"] - num_answers, added_s))
        self._added = sorted(mixed.items())

    def step_s(self, batch: Batch) -> float:
        """Return how long a batch takes; rows are padded to multiples of 64, and contexts are read."""
        decodes = [chunk for chunk in batch.chunks if chunk.is_decode]
        prompts = [chunk for chunk in batch.chunks if not chunk.is_decode]
        num_rows = sum(chunk.num_tokens for chunk in prompts)
        attended = sum(chunk.num_tokens * (chunk.first_token + chunk.num_tokens / 2) for chunk in prompts)
        if not decodes:
            padded = math.ceil(num_rows / 64) * 64
            return max(self._decode[0][1], padded * self._per_token + attended * self._per_context)
        context = sum(chunk.end for chunk in decodes)
        read_s = (context - 1030 * len(decodes)) * KV_BYTES_PER_TOKEN / READ_BYTES_PER_S
        alone_s = _between(self._decode, len(decodes)) + read_s
        if not prompts:
            return alone_s
        rows = math.ceil((num_rows + len(decodes)) / 64) * 64 - len(decodes)
        (few, small), (many, large) = self._added[0], self._added[-1]
        share = min(1.0, max(0.0, (len(decodes) - few) / (many - few)))
        added_s = (1 - share) * _between(small, rows) + share * _between(large, rows)
        device_s = alone_s + max(0.0, added_s + (attended - 4096 * num_rows) * self._per_context)
        return max(device_s, self._host.least_s + self._host.per_answer_s * len(decodes)) + SERVED_MORE_S


def _between(points: list[tuple[float, float]], x: float) -> float:
    """Return what lies between the points at x, and on the line of the last two beyond them."""
    index = min(max(1, bisect_right(points, (x, math.inf))), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def rows_in(name: str) -> list[dict[str, Any]]:
    """Return the rows of a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
