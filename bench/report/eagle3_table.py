"""The tables of what EAGLE3 heads accept.

`python -m bench.report.eagle3_table` writes them from result files.
"""

import json

from bench.report.marked_block import write_block
from bench.report.row_query import ROOT

MODULE = "bench.report.eagle3_table"
PAGE = ROOT / "docs/eagle3.md"
RESULT = ROOT / "bench/results/2026-11-29-eagle3-head-h200.json"
WIDTHS = ROOT / "bench/results/2026-11-29-eagle3-head-widths-h200.json"
LENGTHS = (1, 2, 3, 5)
HEAD = (
    "| text | k = 1 | k = 2 | k = 3 | k = 5 | n-gram, k = 3 | n-gram, k = 5 |\n|---|---|---|---|---|---|---|",
    "| head | MB in bfloat16 | {kinds} |\n|---|---|{rule}",
)


def main() -> None:
    write_block(PAGE, MODULE, tables())


def tables() -> str:
    """Return the table of the shipped head by kind of text, and that of four other heads."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    lines = [HEAD[0]]
    for kind in _kinds(rows):
        own = {row["params"]["k"]: row for row in rows if row["params"]["text"] == kind and row["peer_value"]}
        lengths = " | ".join(f"{own[k]['value']:.2f}" for k in LENGTHS)
        lines.append(f"| {kind} | {lengths} | {own[3]['peer_value']:.2f} | {own[5]['peer_value']:.2f} |")
    return "\n".join([*lines, "", *_widths()])


def _widths() -> list[str]:
    rows = json.loads(WIDTHS.read_text(encoding="utf-8"))["rows"]
    kinds = _kinds(rows)
    lines = [HEAD[1].format(kinds=" | ".join(kinds), rule="---|" * len(kinds))]
    for name in dict.fromkeys(row["params"]["drafter"] for row in rows if row["peer_value"]):
        found = {row["params"]["text"]: row["value"] for row in rows if _is(row, name, 3)}
        lengths = " | ".join(f"{found[kind]:.2f}" for kind in kinds)
        size, _, sharpness = name.removeprefix("head ").partition("-")
        width, vocab = map(int, size.split("x"))
        label = f"feed-forward {width}, {vocab} tokens" + ("" if float(sharpness) else ", soft labels alone")
        lines.append(f"| {label} | {_megabytes(width, vocab):.1f} | {lengths} |")
    return lines


def _is(row: dict, drafter: str, k: int) -> bool:
    return row["params"]["drafter"] == drafter and row["params"]["k"] == k


def _kinds(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["params"]["text"] for row in rows))


def _megabytes(width: int, vocab: int, hidden: int = 576, kv_width: int = 192) -> float:
    """Return the size of a head for the default model, norms left out."""
    weights = 3 * hidden * hidden + 2 * hidden * (hidden + 2 * kv_width) + hidden * hidden
    return 2 * (weights + 3 * hidden * width + hidden * vocab) / 1e6


if __name__ == "__main__":
    main()
