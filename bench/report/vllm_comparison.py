"""The tables of the page on vLLM.

`python -m bench.report.vllm_comparison` writes them from result files.
"""

from collections.abc import Callable, Sequence

from bench.report.marked_block import write_block
from bench.report.row_query import ROOT, RowQuery, digits, rows

MODULE = "bench.report.vllm_comparison"
PAGE = ROOT / "docs" / "design" / "vllm-comparison.md"

DATE = "2026-11-28"
ENGINES = {
    "GPU 0": f"{DATE}-engine-gpu-beside-vllm-h200",
    "GPU 0 again": f"{DATE}-engine-gpu-beside-vllm-again-h200",
    "GPU 1": f"{DATE}-engine-gpu-beside-vllm-other-card-h200",
}
BATCHES = (1, 8, 32, 64, 128, 256)
PROMPTS = {8192: "1 x 8192", 1024: "32 x 1024"}
SERVING, VLLM = f"{DATE}-serving-gpu-beside-vllm-2xh200", f"{DATE}-serving-vllm-2xh200"
SEED_1 = f"{DATE}-serving-gpu-beside-vllm-seed-1-2xh200"
SYSTEMS = {
    "Tandem pair": (SERVING, "pair"),
    "Tandem shared": (SERVING, "shared"),
    "Tandem replicas": (SERVING, "replicas"),
    "vLLM replicas": (VLLM, "vllm-replicas"),
    "vLLM pair": (VLLM, "vllm-pair"),
    "vLLM pair, blocks of 128": (VLLM, "vllm-pair-b128"),
}
AGAIN = {
    "Tandem pair, seed 1": (SEED_1, "pair"),
    "Tandem shared, seed 1": (SEED_1, "shared"),
    "vLLM replicas, seed 1": (VLLM, "vllm-replicas-seed-1"),
    "vLLM replicas, steps of 1024 tokens": (VLLM, "vllm-replicas-1024"),
}
LOADS = {
    "idle-1k": "1024/32, one at a time",
    "idle-8k": "8192/32, one at a time",
    "1k-20": "1024/256, 20/s",
    "1k-40": "1024/256, 40/s",
    "8k-4": "8192/128, 4/s",
    "8k-8": "8192/128, 8/s",
}
Cell = Callable[[str, str, str], str]
"""The function that returns the text of a cell by file, system and load."""


def tables() -> str:
    """Return all tables as Markdown, each under its heading."""
    parts = [
        ("### The engine alone, one card", engine_table()),
        ("### First token, ms: p50, p90, p99", by_load(percentiles("TTFT"))),
        ("### Gap between tokens, ms: p50, p90, p99", by_load(percentiles("ITL"))),
        ("### Goodput, requests/s, and its share of all requests", by_load(goodput)),
        ("### Another seed, and vLLM with smaller steps", again_table()),
    ]
    return "\n\n".join(f"{heading}\n\n{table}" for heading, table in parts)


def engine_table() -> str:
    """Return decode steps and prompts, Tandem's figure before vLLM's of the same card."""
    lines = [markdown_row(["", *(f"{run}: Tandem, vLLM" for run in ENGINES)]), rule(len(ENGINES) + 1)]
    for batch in BATCHES:
        both = [pair(RowQuery(file, "engine_decode_step", {"batch": batch})) for file in ENGINES.values()]
        lines.append(markdown_row([f"decode step, batch {batch}, ms", *both]))
    for length, words in PROMPTS.items():
        both = [pair(RowQuery(file, "engine_prefill", {"length": length})) for file in ENGINES.values()]
        lines.append(markdown_row([f"prompts {words}, tokens/s", *both]))
    return "\n".join(lines)


def by_load(cell: Cell) -> str:
    """Return a line for each load and a column for each system."""
    lines = [markdown_row(["load", *SYSTEMS]), rule(len(SYSTEMS) + 1)]
    for load, words in LOADS.items():
        lines.append(markdown_row([words, *(cell(*system, load) for system in SYSTEMS.values())]))
    return "\n".join(lines)


def again_table() -> str:
    """Return the runs with another seed or setting, a line for each of their loads."""
    lines = [markdown_row(["system", "load", "first token", "gap", "goodput"]), rule(5)]
    for system, key in AGAIN.items():
        for load in LOADS:
            if has_load(*key, load):
                cells = [cell(*key, load) for cell in (percentiles("TTFT"), percentiles("ITL"), goodput)]
                lines.append(markdown_row([system, LOADS[load], *cells]))
    return "\n".join(lines)


def percentiles(name: str) -> Cell:
    """Return what shows the three percentiles of a time."""

    def cell(file: str, system: str, load: str) -> str:
        if not has_load(file, system, load):
            return "-"
        found = (RowQuery(file, f"{name} p{share}", {"system": system, "load": load}) for share in (50, 90, 99))
        return ", ".join(digits(one.row()["value"]) for one in found)

    return cell


def goodput(file: str, system: str, load: str) -> str:
    """Return requests a second within the objective, and their share."""
    if not has_load(file, system, load):
        return "-"
    params = {"system": system, "load": load}
    rate = RowQuery(file, "goodput", params).row()["value"]
    return f"{digits(rate)}, {RowQuery(file, 'within the objective', params).row()['value']:.0%}"


def has_load(file: str, system: str, load: str) -> bool:
    """Return whether the system was measured under the load."""
    return any((row["params"].get("system"), row["params"].get("load")) == (system, load) for row in rows(file))


def pair(own: RowQuery) -> str:
    """Return a row's figure and its peer's."""
    row = own.row()
    return f"{digits(row['value'])}, {digits(row['peer_value'])}"


def markdown_row(cells: Sequence[str]) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def rule(num_columns: int) -> str:
    """Return the line below a table's head."""
    return "|" + "---|" * num_columns


if __name__ == "__main__":
    write_block(PAGE, MODULE, tables())
