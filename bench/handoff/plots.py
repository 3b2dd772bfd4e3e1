"""The figure of a result file of bench.handoff.gpu, as far as its rows go.

It shows the parts of a handoff, first tokens, the gap after token 0, and the bandwidth of scattered pages.

    python -m bench.handoff.plots bench/results/FILE.json --out docs/images/handoff-gpu.png
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report.plots import LIMIT, OURS, PEER, Json, draw_file, grid, log_ticks, nothing

SIZE = (11.0, 8.0)
PARTS = {
    "handoff_prefill_told": ("prefill has told of the last chunk", "#90cdf4"),
    "handoff_decode_heard": ("decode has heard", "#4299e1"),
    "handoff_decode_landed": ("pages are there, checksums right", OURS),
    "handoff_decode_commit": ("Commit", "#1a365d"),
}
"""The stages that end each part of a handoff, in order, with label and colour."""
AIM = "#c53030"
AIMS_MS = {"idle": 0.5, "load": 1.0}
GAP_AIM_MS = 1.0


def main() -> None:
    draw_file(__doc__, handoff)


def handoff(result: Json) -> Figure:
    """Draw the four plots; the aims are those for `nvlink`, the first choice of `auto`."""
    rows, has_aims = result["rows"], result["config"].get("transfer", "auto") in ("auto", "nvlink")
    figure = Figure(figsize=SIZE, layout="constrained")
    (above_left, above_right), (left, right) = figure.subplots(2, 2)
    parts(above_left, rows, has_aims)
    first_tokens(above_right, rows)
    gaps(left, rows, has_aims)
    bandwidth(right, rows)
    return figure


def parts(axes: Axes, rows: Sequence[Json], has_aims: bool) -> None:
    """Draw the parts of a handoff as differences of medians, which are all counted from one moment."""
    title, commits = "From the last chunk computed to Commit, medians", _named(rows, "handoff_decode_commit")
    if not commits:
        return nothing(axes, title)
    places = [row["params"]["at"] for row in commits]
    ends = dict.fromkeys(places, 0.0)
    for name, (label, color) in PARTS.items():
        found = {row["params"]["at"]: row["value"] for row in _named(rows, name)}
        more = [max(0.0, found.get(at, 0.0) - ends[at]) for at in places]
        bars = axes.barh(places, more, 0.6, left=[ends[at] for at in places], color=color, label=label)
        ends = {at: ends[at] + each for at, each in zip(places, more, strict=True)}
    axes.bar_label(bars, [f"{ms:.2f}" for ms in ends.values()], padding=3, fontsize=7)
    marks = axes.plot([row["params"]["p99"] for row in commits], places, "k|", ms=9, label="Commit, p99")
    if has_aims:
        aims = [AIMS_MS[at.partition(" ")[0]] for at in places]
        marks += axes.plot(aims, places, "x", color=AIM, label="aim of the median")
    axes.invert_yaxis()
    axes.legend(handles=[*axes.containers, *marks], fontsize=7)
    grid(axes, title, "ms", "prompt's tokens")


def first_tokens(axes: Axes, rows: Sequence[Json]) -> None:
    found = {who: _by_length(rows, f"handoff_ttft_{who}") for who in ("pair", "colocated")}
    lengths = [length for length in found["pair"] if length in found["colocated"]]
    if not lengths:
        return nothing(axes, "First token, idle")
    for number, (who, color, label) in enumerate((("pair", OURS, "pair"), ("colocated", PEER, "colocated worker"))):
        places = [place + (number - 0.5) * 0.4 for place in range(len(lengths))]
        bars = axes.bar(places, [found[who][length] for length in lengths], 0.38, color=color, label=label)
        axes.bar_label(bars, fmt="%.4g", fontsize=7)
    axes.set_yscale("log")
    axes.margins(y=0.15)
    log_ticks(axes.yaxis)
    axes.legend(fontsize=7)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    grid(axes, "First token, idle", "prompt's tokens", "ms")


def gaps(axes: Axes, rows: Sequence[Json], has_aims: bool) -> None:
    """Draw a decode step of the same answers, and how much later token 1 comes than that."""
    steps = {f"idle {length}": ms for length, ms in _by_length(rows, "handoff_decode_step").items()}
    steps |= {f"load {length}": ms for length, ms in _by_length(rows, "handoff_step_beside_handoffs").items()}
    found = {_place(row): row["value"] for row in _named(rows, "handoff_token_gap") if _place(row) in steps}
    places, title = list(found), "Token 0 to token 1, medians"
    if not places:
        return nothing(axes, title)
    axes.bar(places, [steps[place] for place in places], 0.6, color=LIMIT, label="a decode step")
    rest = [found[place] - steps[place] for place in places]
    bars = axes.bar(places, rest, 0.6, bottom=[steps[place] for place in places], color=OURS, label="the rest")
    axes.bar_label(bars, [f"{ms:.2f}" for ms in rest], label_type="center", fontsize=7, color="white")
    if has_aims and (idle := [place for place in places if place.startswith("idle")]):
        axes.plot(idle, [steps[place] + GAP_AIM_MS for place in idle], "x", color=AIM, label="aim, idle")
    axes.margins(y=0.12)
    axes.legend(fontsize=7)
    grid(axes, title, "prompt's tokens", "ms")


def bandwidth(axes: Axes, rows: Sequence[Json]) -> None:
    """Draw the bandwidth of one copy after the other by size, from the rows of `raw` over nvlink."""
    title, pulls = "Scattered pages from GPU to GPU", _named(rows, "handoff_pull")
    if not pulls:
        return nothing(axes, title)
    for checks, style, label in ((False, "o-", "without checksums"), (True, "s--", "with checksums")):
        own = [row for row in pulls if row["params"]["checksum"] is checks]
        axes.plot([row["params"]["MiB"] for row in own], [row["value"] for row in own], style, color=OURS, label=label)
    sizes = sorted({row["params"]["MiB"] for row in pulls})
    axes.axhline(pulls[0]["limit"], ls=":", color=LIMIT, label="NVLink")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    grid(axes, title, "MiB", "GB/s")


def _named(rows: Sequence[Json], name: str) -> list[Json]:
    return [row for row in rows if row["name"] == name]


def _by_length(rows: Sequence[Json], name: str) -> dict[int, float]:
    return {row["params"]["length"]: row["value"] for row in _named(rows, name)}


def _place(row: Json) -> str:
    """Return the name of the load, as `at` has it in the stages: only gaps under load have a batch."""
    return f"{'load' if 'batch' in row['params'] else 'idle'} {row['params']['length']}"


if __name__ == "__main__":
    main()
