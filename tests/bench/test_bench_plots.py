"""What is drawn of result files that are kept: read back from the figures, not from pixels. And files are pictures."""

import json
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.engine import plots as engine_plots
from bench.handoff import plots as handoff_plots
from bench.load.client import StreamResult
from bench.report.plots import log_ticks
from bench.serving.loads import LOADS
from bench.serving.plots import tails

RESULTS = Path(__file__).parents[2] / "bench" / "results"
ENGINE = RESULTS / "2026-11-28-engine-gpu-beside-vllm-h200.json"
HANDOFF = RESULTS / "2026-11-28-handoff-gpu-one-commit-2xh200.json"
KILLS = RESULTS / "2026-11-28-handoff-gpu-kills-ucx-2xh200.json"


def read(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def lines(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    return {str(line.get_label()): [(x, y) for x, y in line.get_xydata()] for line in axes.lines}  # type: ignore[union-attr]


def heights(axes: Axes) -> list[list[float]]:
    """Return the heights of each group of bars."""
    return [[bar.get_height() for bar in bars] for bars in axes.containers]  # type: ignore[attr-defined]


def words(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_decode_steps_stand_between_their_limit_and_the_peer():
    left, right = engine_plots.engine(read(ENGINE)).axes
    ours, limit, peer = lines(left).values()
    assert list(lines(left))[:2] == ["float8", "float8, byte limit"] and "vLLM" in list(lines(left))[2]
    assert [batch for batch, _ in ours] == [1, 8, 32, 64, 128, 256]
    assert all(low[1] < own[1] < high[1] for low, own, high in zip(limit, ours, peer, strict=True))
    assert words(left)[0] == "80%" and ours[-1][1] == pytest.approx(9.313, abs=0.001)
    assert heights(right) == [pytest.approx(some, abs=0.05) for some in ([65.4, 77.9], [86.3, 97.7], [53.0, 64.6])]


def test_a_part_of_a_handoff_is_what_came_since_the_one_before():
    parts, first, gaps, bandwidth = handoff_plots.handoff(read(HANDOFF)).axes
    ends = [[bar.get_x() + bar.get_width() for bar in bars] for bars in parts.containers]  # type: ignore[attr-defined]
    assert ends[-1] == pytest.approx([0.4089, 0.3794, 0.3643, 0.6608, 0.5755])  # as the rows of Commit are
    assert ends[0] == pytest.approx([0.1536, 0.1254, 0.1535, 0.1811, 0.1759])
    assert heights(first) == [pytest.approx(some, abs=0.1) for some in ([6.87, 14.4, 124.1], [5.36, 13.8, 123.5])]
    assert words(gaps) == ["0.67", "0.74", "0.69", "4.42", "4.12"]
    assert lines(bandwidth)["without checksums"][3] == (512, pytest.approx(284.8, abs=0.1))


def test_another_transport_has_no_aims_of_nvlink():
    result = read(HANDOFF)
    result["config"]["transfer"] = "ucx"
    parts, _, gaps, _ = handoff_plots.handoff(result).axes
    assert list(lines(parts)) == ["Commit, p99"] and not lines(gaps)


@pytest.mark.parametrize(
    ("draw", "result"), [(engine_plots.engine, {"rows": []}), (handoff_plots.handoff, read(KILLS))]
)
def test_what_a_file_has_no_rows_of_is_said(draw, result):
    assert all(words(axes) == ["not in this file"] for axes in draw(result | {"config": {}}).axes)


@pytest.mark.parametrize(("module", "file"), [(engine_plots, ENGINE), (handoff_plots, HANDOFF)])
def test_a_file_becomes_a_picture(module, file, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "picture.png"
    monkeypatch.setattr("sys.argv", ["plots", str(file), "--out", str(out)])
    module.main()
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("low", "high", "some"), [(2.1, 4.4, {"3", "4"}), (9, 1500, {"10", "1000"}), (3, 90, {"5"})])
def test_a_scale_has_numbers_however_short_it_is(low: float, high: float, some: set[str]):
    axes = Figure().subplots()
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    log_ticks(axes.xaxis)
    shown = {label.get_text() for label in axes.get_xticklabels()}
    assert some <= shown and len(shown) < 20


def test_every_panel_of_a_serving_plot_has_numbers():
    answers = [StreamResult(0.02 + 0.0001 * i, [0.003], 0.03, 2) for i in range(9)]
    drawn = {load.name: {"pair": answers} for load in LOADS}
    figure = tails("ms", LOADS, drawn, lambda some: [gap * 1e3 for one in some for gap in one.gaps_s])
    for axes in figure.axes:
        low, high = axes.get_xlim()
        assert [tick for tick in axes.get_xticks() if low <= tick <= high]
