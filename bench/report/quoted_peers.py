"""What vLLM 0.25.1 reached: figures that results and documents stand beside, measured by us no later than 2026-11-21
(the day was not noted) and typed in here. No result file of those runs is kept, so what is not here can't be looked up.

Llama-8B's shape, random weights, FP8 weights and KV with a bf16 head, default flags. The engine: one H200, its whole
step. Serving: two H200 with NVLink, over HTTP, by the same kind of client as ours; two plain replicas, or one prefill
and one decode instance by NixlConnector (pull).
"""

from dataclasses import dataclass

VLLM = "vLLM 0.25.1"
VLLM_ENGINE = f"{VLLM}, same kind of card, other run"
COLOCATED, PAIR = f"{VLLM}, two replicas (quoted)", f"{VLLM}, pair by NIXL (quoted)"

VLLM_STEP_MS = {1: 3.53, 8: 3.75, 32: 5.15, 64: 5.84, 128: 8.47, 256: 14.35}
"""Of a decode step by its batch, contexts of 1024."""
VLLM_PREFILL_RATES = {(1, 8192): 57277, (32, 1024): 68433}
"""Tokens a second of (so many prompts, of so many tokens)."""


@dataclass(frozen=True)
class Quoted:
    """Percentiles 50, 90 and 99 in ms."""

    ttft: tuple[float, float, float]
    itl: tuple[float, float, float]


@dataclass(frozen=True)
class Served:
    """Under one load."""

    colocated: Quoted
    pair: Quoted


SERVED = {
    "idle-1k": Served(Quoted((28.7, 39.6, 41.0), (3.47, 3.80, 4.11)), Quoted((56.6, 64.4, 73.6), (3.41, 3.76, 4.22))),
    "idle-8k": Served(
        Quoted((147.0, 151.0, 151.0), (3.65, 4.05, 4.64)), Quoted((303.0, 310.0, 592.0), (3.54, 3.87, 4.21))
    ),
    "8k-4": Served(
        Quoted((155.0, 172.0, 244.0), (3.83, 4.44, 27.6)), Quoted((397.0, 582.0, 923.0), (4.37, 6.62, 115.0))
    ),
    "8k-8": Served(
        Quoted((173.0, 309.0, 459.0), (4.92, 9.83, 116.0)), Quoted((1567.0, 2707.0, 3177.0), (11.9, 114.0, 123.0))
    ),
    "1k-20": Served(Quoted((39.5, 64.6, 92.8), (4.16, 5.53, 38.3)), Quoted((141.0, 185.0, 223.0), (5.04, 7.28, 34.7))),
    "1k-40": Served(
        Quoted((69.2, 104.0, 126.0), (5.31, 30.5, 41.5)), Quoted((288.0, 477.0, 782.0), (11.5, 22.0, 87.7))
    ),
}
"""By the name of a load of bench.serving.loads."""
