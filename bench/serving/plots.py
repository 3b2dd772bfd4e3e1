"""The plots of the distribution of first tokens and gaps under each load, a line for each system."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.load.client import StreamResult
from bench.report.plots import log_ticks
from bench.serving.loads import Load

Drawn = dict[str, dict[str, list[StreamResult]]]
"""Answers by load and system."""

COLUMNS = 2
SIZE = (11.0, 11.0)
DPI = 110
MAX_POINTS = 600
Values = Callable[[Sequence[StreamResult]], list[float]]


def plot_serving(result: Path, loads: Sequence[Load], drawn: Drawn) -> list[Path]:
    """Write RESULT-ttft.png and RESULT-itl.png; return their paths."""
    kinds: dict[str, tuple[str, Values]] = {
        "ttft": ("time to first token, ms", lambda answers: [answer.ttft_s * 1e3 for answer in answers]),
        "itl": ("gap between tokens, ms", lambda answers: [gap * 1e3 for one in answers for gap in one.gaps_s]),
    }
    files = []
    for kind, (label, values_of) in kinds.items():
        file = result.with_name(f"{result.stem}-{kind}.png")
        tails(label, loads, drawn, values_of).savefig(file, dpi=DPI)
        files.append(file)
    return files


def tails(label: str, loads: Sequence[Load], drawn: Drawn, values_of: Values) -> Figure:
    """Draw a panel for each load with the share of values that are longer than each value."""
    figure = Figure(figsize=SIZE, layout="constrained")
    panels = figure.subplots(-(-len(loads) // COLUMNS), COLUMNS, squeeze=False).flat
    for load, axes in zip(loads, panels, strict=False):
        axes.set_title(f"{load.point}", fontsize=10)
        for system, answers in drawn.get(load.name, {}).items():
            _draw(axes, system, values_of(answers))
        _label(axes, label)
    return figure


def _draw(axes: Axes, system: str, values: list[float]) -> None:
    if values:
        axes.step(*zip(*tail(values), strict=True), where="post", label=system)


def tail(values: Sequence[float], max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return values, each with the percentage that is at least as long.

    Of many values, more are taken from the long end.
    """
    ordered = sorted(values, reverse=True)
    ranks = sorted({min(len(ordered), round(len(ordered) ** (i / max_points))) for i in range(max_points + 1)})
    return [(ordered[rank - 1], 100 * rank / len(ordered)) for rank in reversed(ranks)]


def _label(axes: Axes, label: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_ticks(axes.xaxis, axes.yaxis)
    axes.set_xlabel(label)
    axes.set_ylabel("% at least as long")
    axes.grid(alpha=0.3, which="both")
    if axes.lines:
        axes.legend(fontsize=7)
