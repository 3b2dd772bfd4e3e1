"""The parts that the plots of result files share."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

DPI = 110
_SUBS = {20: (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0), 500: (1.0, 2.0, 5.0), float("inf"): (1.0,)}
OURS, PEER, LIMIT = "#2b6cb0", "#c9a227", "gray"
Json = dict[str, Any]


def draw_file(doc: str | None, draw: Callable[[Json], Figure]) -> None:
    """Run the command `python -m bench.FOLDER.plots FILE [--out PNG]`.

    `draw` is given the whole result.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="a result file (JSON)")
    parser.add_argument("--out", type=Path, default=None, metavar="PNG", help="by default beside the result file")
    args = parser.parse_args()
    file = args.out or args.result.with_suffix(".png")
    result = json.loads(args.result.read_text(encoding="utf-8"))
    figure = draw(result)
    figure.suptitle(f"{args.result.name}, commit {result['commit']}", fontsize=8, color="gray")
    figure.savefig(file, dpi=DPI)
    print(file)


def log_ticks(*axes: Axis) -> None:
    """Put plain numbers along logarithmic axes, more of them where few decades are in view."""
    for axis in axes:
        low, high = axis.get_view_interval()
        subs = next(subs for most, subs in _SUBS.items() if high / low < most)
        axis.set_major_locator(LogLocator(subs=subs, numticks=40))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def nothing(axes: Axes, title: str) -> None:
    """Say in the axes that the file has no rows for them."""
    axes.set_title(title, fontsize=10)
    axes.set_axis_off()
    axes.text(0.5, 0.5, "not in this file", ha="center", color="gray", transform=axes.transAxes)


def grid(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
