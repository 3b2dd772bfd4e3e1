"""The table of KV on a slow network.

`python -m bench.report.slow_network_table` writes it from a result file.
"""

import json

from bench.report.marked_block import write_block
from bench.report.row_query import ROOT

MODULE = "bench.report.slow_network_table"
PAGE = ROOT / "docs/kv-codec.md"
RESULT = ROOT / "bench/results/2026-11-29-slow-network-amd-epyc.json"
CODECS = {"off": "off", "auto": "auto (lossless)", "8bit": "8bit", "4bit": "4bit"}
LINES = {
    "handoff at 100 Mbit/s: gap between token 0 and 1": "gap between token 0 and 1",
    "store behind 1 Gbit/s: first token": "first token from the store",
}
HEAD = f"| | {' | '.join(CODECS.values())} |\n|---|{'---|' * len(CODECS)}"


def main() -> None:
    write_block(PAGE, MODULE, table())


def table() -> str:
    """Return the table: seconds, and how many times those without compression."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    found = {(row["name"], row["params"]["codec"]): row for row in rows}
    lines = [
        f"| {words} | {' | '.join(_cell(found.get((name, codec))) for codec in CODECS)} |"
        for words, name in LINES.items()
    ]
    return "\n".join([HEAD, *lines])


def _cell(row: dict | None) -> str:
    if row is None:
        return "-"
    times = f" ({row['value'] / row['peer_value']:.2f} x)" if row["peer_value"] else ""
    return f"{row['value']:.2f} s{times}"


if __name__ == "__main__":
    main()
