"""The plots of a load sweep: the distribution of TTFT and ITL, and throughput against interactivity."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.load.generator import Measured, interactivity, throughput

SIZE = (8.0, 5.0)
DPI = 120


def plot(folder: Path, measured: Sequence[Measured], num_gpus: int) -> list[Path]:
    """Write ttft.png, itl.png and pareto.png as far as there is something to draw; return their paths."""
    answered = [one for one in measured if one.good]
    ttfts = {str(one.point): [answer.ttft_s * 1e3 for answer in one.good] for one in answered}
    itls = {str(one.point): [gap_s * 1e3 for answer in one.good for gap_s in answer.gaps_s] for one in answered}
    drawn = {
        "ttft.png": spread("time to first token, ms", ttfts),
        "itl.png": spread("time between tokens, ms", {name: gaps for name, gaps in itls.items() if gaps}),
        "pareto.png": pareto(answered, num_gpus),
    }
    for name, figure in drawn.items():
        figure.savefig(folder / name, dpi=DPI)
    return [folder / name for name in drawn]


def spread(label: str, samples: dict[str, list[float]]) -> Figure:
    """Draw for each point the share of its samples below each value."""
    figure, axes = _figure(label, "share of all, %")
    for name, values in samples.items():
        shares = [100 * (i + 1) / len(values) for i in range(len(values))]
        axes.step(sorted(values), shares, where="post", label=name)
    if samples:
        axes.set_xscale("log")
        axes.set_xlim(left=max(min(map(min, samples.values())), min(map(median, samples.values())) / 10))
        axes.legend(fontsize=8)
    axes.set_yticks([0, 25, 50, 75, 90, 99], ["0", "25", "50", "75", "90", "99"])
    axes.set_ylim(0, 101)
    return figure


def pareto(measured: Sequence[Measured], num_gpus: int) -> Figure:
    """Draw a line for each pair of lengths through the points that no other beats, as InferenceMAX does."""
    where = "GPU" if num_gpus else "server"
    figure, axes = _figure("interactivity, tokens/s/user", f"input and output tokens/s per {where}")
    lines: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for one in measured:
        if (rate := interactivity(one.good)) is not None:
            lines[str(one.point.lengths)].append((rate, throughput(one) / (num_gpus or 1), one.point.load))
    for name, points in lines.items():
        _draw_line(axes, name, points)
    if lines:
        axes.legend(title="tokens in/out", fontsize=8, title_fontsize=8)
    axes.margins(0.1)  # room for the names of the points
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return figure


def _draw_line(axes: Axes, name: str, points: list[tuple[float, float, str]]) -> None:
    best = frontier([(x, y) for x, y, _ in points])
    (line,) = axes.plot(*zip(*best, strict=True), marker="o", label=name)
    beaten = [(x, y) for x, y, _ in points if (x, y) not in best]
    if beaten:
        axes.plot(*zip(*beaten, strict=True), "o", color=line.get_color(), fillstyle="none")
    for x, y, load in points:
        axes.annotate(load, (x, y), textcoords="offset points", xytext=(6, 4), fontsize=7)


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other equals or passes in both, the fastest for one user last."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(set(points), reverse=True):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best[::-1]


def _figure(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    return figure, axes
