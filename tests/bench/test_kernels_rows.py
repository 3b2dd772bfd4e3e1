"""Bytes and operations behind every fraction of a limit, and the page that is made from result files."""

import json

import pytest

from bench.kernels import decode_step as bench
from bench.kernels import docs_page as page
from bench.kernels.figure import Figure, show
from kernels import cases as c
from kernels import specs as s


@pytest.mark.parametrize(
    ("case", "nbytes", "flops"),
    [
        (c.attn_case(s.AttnSpec(32, 8, 128), [1000, 24]), 2 * 1024 * 8 * 128, 0),
        (c.attn_case(s.AttnSpec(32, 8, 128, kv="bf16"), [10]), 2 * 10 * 8 * 128 * 2, 0),
        (c.attn_case(s.AttnSpec(64, 8, 64, window=128), [5000]), 2 * 129 * 8 * 64, 0),
        (c.prefill_case(s.AttnSpec(2, 1, 64), [(3, 3)]), 0, 4 * (1 + 2 + 3) * 2 * 64),
        (c.prefill_case(s.AttnSpec(2, 1, 64), [(2, 10)]), 0, 4 * (9 + 10) * 2 * 64),
        (c.gemm_case(s.GemmSpec(64, 128), 3), 64 * 128 + 3 * (128 + 2 * 64), 2 * 3 * 64 * 128),
        (c.gate_up_case(s.GateUpSpec(512, 128), 2), 512 * 128 + 2 * (128 + 256), 2 * 2 * 512 * 128),
        (c.w4_case(s.W4Spec(64, 256), 1), 64 * 256 / 2 + 64 * 2 * 4 + 2 * (64 + 256), 2 * 64 * 256),
        (c.experts_case(s.MoESpec(8, 2, 64, 32), 1), 2 * 3 * 32 * 64, 6 * 2 * 32 * 64),
        (c.experts_case(s.MoESpec(8, 2, 64, 32, weights="mxfp4"), 99), 8 * 3 * 32 * 64 * 17 / 32, 6 * 198 * 32 * 64),
        (c.mla_case(s.MLASpec(4), [(1, 10), (2, 5)]), 15 * 576 * 2, 0),
        (c.move_case("kv_pack", s.MoveSpec(2, 4096), 3, 8), 2 * 3 * 2 * 4096, 0),
        (c.sample_case(s.SampleSpec(100), 3), 3 * 100 * 4, 0),
    ],
    ids=lambda value: getattr(value, "op", ""),
)
def test_the_least_a_case_must_move_and_multiply(case, nbytes, flops):
    assert (case.nbytes, case.flops) == (nbytes, flops)


def test_a_step_reads_the_models_weights_once_and_the_cache_once():
    """7.5 GB of weights at 4.45 TB/s, and 71 MB of cache for each sequence of 1088 tokens."""
    assert bench.floor_ms(1) == pytest.approx((7_504_658_432 + 71_303_168) / 4.45e9, rel=1e-3)
    assert bench.floor_ms(2) - bench.floor_ms(1) == pytest.approx(32 * 2 * 8 * 128 * 1088 / 4.45e9)


def document(*rows, **more):
    head = dict(hardware="H", versions={"torch": "2", "triton": ""}, config_digest="d", command="c")
    return dict(head, rows=[dict(name=n, params=p, value=v) for n, p, v in rows], **more)


def test_later_rows_win_and_a_file_may_replace_a_table():
    old = document(("a", {"x": 1}, 1.0), ("a", {"x": 2}, 2.0), ("b", {}, 3.0))
    assert [r["value"] for r in page.merged([old, document(("a", {"x": 2}, 9.0))])["a"]] == [1.0, 9.0]
    tables = page.merged([old, document(("a", {"x": 5}, 7.0), replaces=["a"])])
    assert [r["value"] for r in tables["a"]] == [7.0] and len(tables["b"]) == 1


def test_the_page_names_each_file_with_what_it_ran_on():
    text = page.origin([("one.json", document()), ("two.json", document())])
    assert "`one.json`: H; torch 2; kernel source d; c" in text and "two.json" in text


def test_the_page_has_a_table_and_a_plot_for_each_operation(tmp_path, monkeypatch):
    row = dict(name="sample", params=dict(batch=8), value=3.0, unit="us", limit=0.5, peer="torch", peer_value=9.0)
    (tmp_path / "r.json").write_text(json.dumps(document() | dict(rows=[dict(row, extra={"error": 0.25})])))
    monkeypatch.setattr("sys.argv", ["page", str(tmp_path / "r.json"), "--out", str(tmp_path / "out")])
    page.main()
    assert "| 8 | 3 | 50% | torch | 9 | error 0.25 |" in (tmp_path / "out" / "kernels.md").read_text()
    assert (tmp_path / "out" / "kernels-sample.png").stat().st_size > 1000


def test_a_row_prints_its_fraction_and_its_peer(capsys):
    row = show(Figure("sample", dict(batch=8), 3.0, "us", 0.5, "torch", 9.0, dict(error=0.1)))
    assert " ".join(capsys.readouterr().out.split()) == "sample batch=8 3 us 50% of limit | torch 9 {'error': 0.1}"
    assert row.value == 3.0
