"""The figure of a result file of bench.engine.gpu.

It shows decode steps by batch beside the byte limit and vLLM, and prompts.

    python -m bench.engine.plots bench/results/FILE.json --out docs/images/engine-gpu.png
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report.plots import LIMIT, OURS, PEER, Json, draw_file, grid, log_ticks, nothing

SIZE = (11.0, 4.8)
COLORS = (OURS, "#38a169", "#b83280", "#dd6b20")


def main() -> None:
    draw_file(__doc__, engine)


def engine(result: Json) -> Figure:
    rows = result["rows"]
    figure = Figure(figsize=SIZE, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    steps(left, [row for row in rows if row["name"] == "engine_decode_step"])
    prefills(right, [row for row in rows if row["name"] == "engine_prefill"])
    return figure


def steps(axes: Axes, rows: Sequence[Json]) -> None:
    """Draw a line for each format and a dashed one for its limit; label the first format with shares."""
    title = "Decode step, and its share of the byte limit"
    if not rows:
        return nothing(axes, title)
    for color, dtype in zip(COLORS, _dtypes(rows), strict=False):
        own = sorted((row for row in rows if row["params"]["dtype"] == dtype), key=_batch)
        batches = [_batch(row) for row in own]
        axes.plot(batches, [row["value"] for row in own], "o-", color=color, label=dtype)
        axes.plot(batches, [row["limit"] for row in own], "--", color=color, alpha=0.6, label=f"{dtype}, byte limit")
        for row in own if dtype == rows[0]["params"]["dtype"] else ():
            words = f"{row['limit'] / row['value']:.0%}"
            axes.annotate(words, (_batch(row), row["value"]), xytext=(-12, 7), textcoords="offset points", fontsize=7)
    if peers := {_batch(row): row["peer_value"] for row in sorted(rows, key=_batch) if row["peer_value"]}:
        axes.plot(list(peers), list(peers.values()), "x:", color=PEER, label=_peer(rows))
    grid(axes, title, "sequences in a step", "ms a step")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks := sorted({_batch(row) for row in rows}), [str(batch) for batch in ticks])
    log_ticks(axes.yaxis)
    axes.legend(fontsize=7)


def prefills(axes: Axes, rows: Sequence[Json]) -> None:
    """Draw three bars for each kind of prompt: ours, the limit, the peer."""
    if not rows:
        return nothing(axes, "Prompts")
    labels = [f"{row['params']['prompts']} x {row['params']['length']}\n{row['params']['dtype']}" for row in rows]
    bars = [("ours", OURS, [row["value"] for row in rows])]
    bars.append(("FLOP limit", LIMIT, [row["limit"] or 0.0 for row in rows]))
    if any(row["peer_value"] for row in rows):
        bars.append((_peer(rows), PEER, [row["peer_value"] or 0.0 for row in rows]))
    for number, (label, color, values) in enumerate(bars):
        places = [place + (number - 1) * 0.27 for place in range(len(rows))]
        drawn = axes.bar(places, [value / 1000 for value in values], 0.25, label=label, color=color)
        axes.bar_label(drawn, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(rows)), labels, fontsize=8, rotation=60 if len(rows) > 4 else 0)
    grid(axes, "Prompts", "", "thousand tokens/s")
    axes.margins(y=0.25)
    axes.legend(fontsize=7, loc="upper center")


def _dtypes(rows: Sequence[Json]) -> list[str]:
    return list(dict.fromkeys(row["params"]["dtype"] for row in rows))


def _batch(row: Json) -> int:
    return row["params"]["batch"]


def _peer(rows: Sequence[Json]) -> str:
    return next(row["peer"] for row in rows if row["peer_value"])


if __name__ == "__main__":
    main()
