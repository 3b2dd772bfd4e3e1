"""The README's table of measurements.

`python -m bench.report.readme_table` writes it from result files. Each line names the row of its own figure. Its peer
is the one that the row carries, or the row of a file that was taken in the same session on the same machine; without
one the cell stays empty.
"""

from dataclasses import dataclass

from bench.report.marked_block import write_block
from bench.report.row_query import ROOT, RowQuery, digits

MODULE = "bench.report.readme_table"
README = ROOT / "README.md"
HEAD = "| what | machine | Tandem | peer | the peer's figure |\n|---|---|---|---|---|"

CPU_ENGINE = "2026-11-23-engine-amd-epyc-avx512"
TRANSFER = "2026-11-21-transfer-intel-xeon"
GPU_ENGINE = "2026-11-28-engine-gpu-beside-vllm-h200"
SERVING = "2026-11-28-serving-gpu-beside-vllm-2xh200"
VLLM = "2026-11-28-serving-vllm-2xh200"


@dataclass(frozen=True)
class Line:
    """One line of the table.

    `peer` is the peer's name, `peer_row` its row unless `own` carries the figure.
    """

    what: str
    machine: str
    own: RowQuery
    peer: str = ""
    peer_row: RowQuery | None = None


LINES = (
    Line("answer of one stream, engine alone", "2 cores, AMD EPYC", RowQuery(CPU_ENGINE, "decode, 1 stream"),
         "transformers, bf16"),
    Line("prompt of 1024 tokens, engine alone", "2 cores, AMD EPYC", RowQuery(CPU_ENGINE, "prefill"),
         "transformers, bf16"),
    Line("KV of 4096 tokens through shared memory", "2 cores, Intel Xeon",
         RowQuery(TRANSFER, "shm rate", {"tokens": 4096}), "memcpy"),
    Line("decode step of 64 answers, engine alone", "one H200",
         RowQuery(GPU_ENGINE, "engine_decode_step", {"batch": 64}), "vLLM 0.26"),
    Line("prompt of 8192 tokens, engine alone", "one H200",
         RowQuery(GPU_ENGINE, "engine_prefill", {"length": 8192}), "vLLM 0.26"),
    Line("first token, median, shared", "two H200",
         RowQuery(SERVING, "TTFT p50", {"system": "shared", "load": "8k-8"}), "vLLM 0.26, two replicas"),
    Line("requests within the objective, shared", "two H200",
         RowQuery(SERVING, "goodput", {"system": "shared", "load": "8k-8"}), "vLLM 0.26, two replicas"),
    Line("gap between tokens, p99, pair", "two H200",
         RowQuery(SERVING, "ITL p99", {"system": "pair", "load": "8k-8"}), "vLLM 0.26, pair",
         RowQuery(VLLM, "ITL p99", {"system": "vllm-pair", "load": "8k-8"})),
    Line("first token, median, pair", "two H200",
         RowQuery(SERVING, "TTFT p50", {"system": "pair", "load": "8k-8"}), "vLLM 0.26, two replicas"),
    Line("start to ready, kernels compiled, two replicas", "two H200",
         RowQuery(SERVING, "start to ready", {"system": "replicas"}), "vLLM 0.26, two replicas",
         RowQuery(VLLM, "start to ready", {"system": "vllm-replicas", "when": "compiled before"})),
)  # fmt: skip


def table() -> str:
    """Return the table as Markdown."""
    return "\n".join([HEAD, *(_row(line) for line in LINES)])


def _row(line: Line) -> str:
    own = line.own.row()
    peer = own["peer_value"] if line.peer_row is None else line.peer_row.row()["value"]
    other = f"{digits(peer)} {own['unit']}" if line.peer else ""
    return f"| {line.what} | {line.machine} | {digits(own['value'])} {own['unit']} | {line.peer} | {other} |"


if __name__ == "__main__":
    write_block(README, MODULE, table())
