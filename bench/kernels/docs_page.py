"""The command that makes a page of tables and plots from result files of bench.kernels.

    python -m bench.kernels.docs_page bench/results/A.json bench/results/B.json --out build/kernels

The oldest file comes first. A later row takes the place of an earlier one with the same name and parameters; a file may
name tables that it `replaces` as a whole.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Json = dict[str, Any]
TITLES = {
    "decode_step": "Decode step, Llama-8B, context 1088",
    "decode_step_without": "Decode step: each choice off by itself",
    "attn_decode": "Decode attention, e4m3 cache",
    "attn_prefill": "Prefill attention, e4m3 cache",
    "mla_attention": "MLA",
    "norm_gemm": "Norm and skinny product together",
    "gemm_fp8": "FP8 products of many tokens",
    "gemm_w4": "4-bit weights, bf16 activations",
    "moe_experts": "Mixture of experts, FP8",
    "sample": "Sampling",
    "elementwise": "Norm, SiLU, quantization",
    "compiled": "Fused by hand, and by torch.compile",
    "kv_move": "KV pack, unpack and checksums",
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("results", type=Path, nargs="+")
    options.add_argument("--out", type=Path, default=Path("build/kernels"), help="folder of the page and its plots")
    args = options.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    documents = [(path.name, json.loads(path.read_text())) for path in args.results]
    rows = merged([document for _, document in documents])
    sections = [section(name, rows[name], args.out) for name in TITLES if rows[name]]
    (args.out / "kernels.md").write_text("\n\n".join(["# Kernels", origin(documents), *sections]) + "\n")


def merged(documents: list[Json]) -> dict[str, list[Json]]:
    """Return the rows by table; a later row replaces an earlier one."""
    found: dict[tuple[str, str], Json] = {}
    for document in documents:
        replaced = document.get("replaces", [])
        found = {key: row for key, row in found.items() if key[0] not in replaced}
        found |= {(row["name"], json.dumps(row["params"], sort_keys=True)): row for row in document["rows"]}
    tables: dict[str, list[Json]] = defaultdict(list)
    for (name, _), row in found.items():
        tables[name].append(row)
    return tables


def origin(documents: list[tuple[str, Json]]) -> str:
    lines = ["Later files win, row by row:", ""]
    for name, document in documents:
        versions = ", ".join(f"{package} {version}" for package, version in document["versions"].items() if version)
        digest = f"; kernel source {document['config_digest']}" if document["config_digest"] else ""
        lines.append(f"- `{name}`: {document['hardware']}; {versions}{digest}; {document['command']}")
    return "\n".join(lines)


def section(name: str, rows: list[Json], folder: Path) -> str:
    plot(name, rows, folder)
    keys = list(rows[0]["params"])
    peer = any(row["peer"] for row in rows)
    header = [*keys, rows[0]["unit"], "of the limit", *(["peer", f"peer, {rows[0]['unit']}"] if peer else []), "notes"]
    lines = [
        f"## {TITLES[name]}",
        "",
        f"![{TITLES[name]}](kernels-{name}.png)",
        "",
        table_row(header),
        table_row(["---"] * len(header)),
    ]
    return "\n".join(lines + [table_row(cells(row, keys, peer)) for row in rows])


def cells(row: Json, keys: list[str], peer: bool) -> list[str]:
    limit = "" if row["limit"] is None else f"{row['limit']:.0%}"
    other = [row["peer"] or "", number(row["peer_value"])] if peer else []
    notes = "; ".join(f"{key} {number(value)}" for key, value in row["extra"].items())
    return [*(str(row["params"].get(key, "")) for key in keys), number(row["value"]), limit, *other, notes]


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def table_row(values: list[str]) -> str:
    return "| " + " | ".join(values) + " |"


def plot(name: str, rows: list[Json], folder: Path) -> None:
    """Draw one bar for each row with the peer's beside it, on a logarithmic axis."""
    labels = [" ".join(str(v) for v in row["params"].values()) for row in rows]
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.19 * len(rows)))
    place = range(len(rows))
    axes.barh([p - 0.2 for p in place], [row["value"] for row in rows], 0.4, label="ours", color="#2b6cb0")
    others = [
        (p, row["peer_value"], row["peer"]) for p, row in zip(place, rows, strict=True) if row["peer_value"] is not None
    ]
    if others:
        label = others[0][2] if len({o[2] for o in others}) == 1 else "best peer"
        axes.barh([p + 0.2 for p, _, _ in others], [value for _, value, _ in others], 0.4, label=label, color="#c9a227")
    axes.set_yticks(list(place), labels, fontsize=6)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(rows[0]["unit"])
    axes.set_title(TITLES[name], fontsize=9)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / f"kernels-{name}.png", dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    main()
