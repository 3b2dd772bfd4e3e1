"""What is drawn of a sweep: read back from the figures, not from pixels; and that the files are pictures."""

from pathlib import Path

import pytest

from bench.load.client import StreamResult
from bench.load.generator import Lengths, Measured, Point
from bench.load.plots import frontier, pareto, plot, spread


def measured(users: int, gap_s: float, num_in: int = 1024) -> Measured:
    answers = [StreamResult(0.1 * (1 + i), [gap_s, gap_s], 0.1 * (1 + i) + 2 * gap_s, 3) for i in range(4)]
    return Measured(Point(Lengths(num_in, 3), users, None, 4), answers, wall_s=4 / users)


def test_the_frontier_leaves_out_who_is_beaten_in_both():
    assert frontier([(1, 9), (2, 5), (2, 4), (3, 5), (0.5, 9), (4, 1)]) == [(1, 9), (3, 5), (4, 1)]
    assert frontier([(1, 1)]) == [(1, 1)] and frontier([]) == []


def test_every_load_is_a_point_and_every_pair_of_lengths_a_line():
    some = [measured(1, 0.01), measured(4, 0.02), measured(4, 0.05), measured(1, 0.01, num_in=128)]
    axes = pareto(some, num_gpus=2).axes[0]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["1k/3", "128/3"]
    assert [text.get_text() for text in axes.texts] == ["1 user", "4 users", "4 users", "1 user"]
    best = [tuple(point) for point in axes.lines[0].get_xydata()]  # type: ignore[union-attr]
    assert best == [pytest.approx((50.0, 4 * 1027 / 2)), pytest.approx((100.0, 1027 / 2))]
    assert axes.get_ylabel() == "input and output tokens/s per GPU"
    assert "server" in pareto(some, num_gpus=0).axes[0].get_ylabel()


def test_a_spread_ends_at_all_of_them():
    (line,) = spread("ms", {"a": [3.0, 1.0, 2.0]}).axes[0].lines
    assert list(line.get_xdata()) == [1.0, 2.0, 3.0]  # type: ignore[arg-type]
    assert list(line.get_ydata()) == pytest.approx([100 / 3, 200 / 3, 100])  # type: ignore[arg-type]


def test_all_plots_are_pictures_even_of_nothing(tmp_path: Path):
    failed = Measured(Point(Lengths(8, 3), 1, None, 1), [StreamResult(reason="silent")], wall_s=1.0)
    for some in ([measured(1, 0.01), failed], []):
        files = plot(tmp_path, some, 0)
        assert [file.name for file in files] == ["ttft.png", "itl.png", "pareto.png"]
        assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
