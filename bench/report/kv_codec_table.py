"""The table of the KV codecs' levels.

`python -m bench.report.kv_codec_table` writes it from a result file.
"""

import json

from bench.report.marked_block import write_block
from bench.report.row_query import ROOT
from kv_transfer.codecs.level import LEVELS

MODULE = "bench.report.kv_codec_table"
PAGE = ROOT / "docs/kv-codec.md"
RESULT = ROOT / "bench/results/2026-11-29-kv-codec-amd-epyc.json"
HEAD = (
    "| level | times smaller: float32, bf16, e4m3 | bits a value | encode, decode (float32) "
    "| KL divergence, mean and p99 | greedy tokens equal | needles found |\n|---|---|---|---|---|---|---|"
)


def main() -> None:
    write_block(PAGE, MODULE, table())


def table() -> str:
    """Return the table, a line for each level."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]

    def value(name: str, level: str, dtype: str | None = None) -> float:
        params = {"level": level} | ({"dtype": dtype} if dtype else {})
        return next(row["value"] for row in rows if row["name"] == name and row["params"] == params)

    lines = []
    for level in LEVELS:
        ratios = ", ".join(f"{value('ratio', level, dtype):.2f}" for dtype in ("float32", "bfloat16", "float8_e4m3fn"))
        rates = ", ".join(f"{value(end, level, 'float32'):.2f}" for end in ("encode", "decode"))
        losses = ", ".join(f"{value(name, level):.2g}" for name in ("KL divergence", "KL divergence, 99th percentile"))
        equal, needles = value("greedy tokens equal, teacher-forced", level), value("needles found", level)
        bits = value("bits a value", level, "float32")
        lines.append(f"| {level} | {ratios} | {bits:.1f} | {rates} GB/s | {losses} | {equal:.1%} | {needles:.0%} |")
    return "\n".join([HEAD, *lines])


if __name__ == "__main__":
    main()
