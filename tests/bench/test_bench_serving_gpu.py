"""The two-GPU serving benchmark: its arithmetic on answers made up by hand, and the whole of it on a CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

from bench.load.client import StreamResult
from bench.load.generator import Measured
from bench.models.model_folder import TINY, write_folder
from bench.serving import gpu as serving_gpu
from bench.serving.loads import LOADS, is_good, load_rows
from bench.serving.plots import plot_serving, tail
from bench.system.local_system import running
from bench.system.resource_usage import mean_rows, pids, samples_of, stages_of, work_rows

pytestmark = pytest.mark.slow

LOAD = next(load for load in LOADS if load.name == "8k-8")


def answer(ttft_s: float, *gaps_s: float) -> StreamResult:
    return StreamResult(ttft_s, list(gaps_s), ttft_s + sum(gaps_s), len(gaps_s) + 1)


def test_an_answer_is_good_by_its_first_token_and_its_mean_gap():
    assert is_good(LOAD, answer(0.5, 0.002, 0.017))
    assert not is_good(LOAD, answer(0.501, 0.002, 0.002))
    assert not is_good(LOAD, answer(0.1, 0.002, 0.019))
    assert is_good(LOAD, answer(0.1))


def test_goodput_counts_the_failed_and_the_late():
    answers = [answer(0.1, 0.003, 0.030), answer(0.1, 0.003), answer(0.9, 0.003), StreamResult(reason="silent")]
    rows = {row.name: row for row in load_rows("pair", LOAD, Measured(LOAD.point, answers, wall_s=2.0))}
    assert rows["within the objective"].value == 0.25
    assert rows["goodput"].value == 0.5
    assert rows["tokens an event"].value == 1
    assert rows["ITL longest"].value == pytest.approx(30.0)
    assert rows["failed"].value == 1
    assert all(row.peer is None for row in rows.values())
    assert all(row.params["system"] == "pair" and row.params["load"] == "8k-8" for row in rows.values())


def test_nothing_answered_is_rows_without_figures():
    rows = load_rows("pair", LOAD, Measured(LOAD.point, [StreamResult(reason="silent")], wall_s=2.0))
    assert {row.name: row.value for row in rows} == {"requests": 1, "failed": 1, "failed: silent": 1}


def test_a_shrunk_load_keeps_its_rate():
    small = LOAD.shrunk(32)
    assert (str(small.point), small.point.num_requests) == ("256/4, 8/s", 4)


BEFORE = """\
# TYPE tandem_gateway_stage_seconds histogram
tandem_gateway_stage_seconds_bucket{stage="queue",le="0.1"} 2.0
tandem_gateway_stage_seconds_count{stage="queue"} 2.0
tandem_gateway_stage_seconds_sum{stage="queue"} 1.0
# TYPE tandem_worker_prefill_tokens counter
tandem_worker_prefill_tokens_total 100.0
"""
AFTER = """\
# TYPE tandem_gateway_stage_seconds histogram
tandem_gateway_stage_seconds_count{stage="queue"} 6.0
tandem_gateway_stage_seconds_sum{stage="queue"} 1.2
tandem_gateway_stage_seconds_count{stage="prefill"} 1.0
tandem_gateway_stage_seconds_sum{stage="prefill"} 0.5
# TYPE tandem_gateway_exposed_seconds histogram
tandem_gateway_exposed_seconds_count 0.0
tandem_gateway_exposed_seconds_sum 0.0
# TYPE tandem_worker_prefill_tokens counter
tandem_worker_prefill_tokens_total 356.0
"""


def test_means_and_work_are_those_of_the_load_alone():
    before, after = samples_of(BEFORE), samples_of(AFTER)
    means = {row.name: (row.value, row.params["of"]) for row in mean_rows(before, after)}
    assert means == {"mean queue": (pytest.approx(50.0), 4), "mean prefill": (500.0, 1)}
    (work,) = work_rows("prefill-0", before, after)
    assert (work.name, work.value, work.unit, work.params) == (
        "prefill tokens",
        256.0,
        "tokens",
        {"worker": "prefill-0"},
    )


def test_a_start_is_told_by_the_engines_last_line():
    log = (
        "12:00 worker INFO worker.front.core_process: starting, load: 32 of 32 (100 %)\n"
        "12:01 core INFO engine.cuda.loader: llama-8b ready: float8 on NVIDIA H200, context of 131072 tokens, 32575 KV "
        "blocks; weights 5.1 s, compile 18.3 s, warm up 0.7 s\n"
        "12:02 worker INFO worker.main: prefill-0 serves llama-8b at http://127.0.0.1:1\n"
    )
    assert stages_of(log) == {"weights": 5.1, "compile": 18.3, "warm up": 0.7}
    assert stages_of("12:00 worker INFO worker.front.core_process: starting, load: 32 of 32 (100 %)\n") == {}


def test_a_worker_has_two_processes():
    nodes = [{"id": "gateway", "pid": 1}, {"id": "decode-0", "pid": 2, "core_pid": 3}]
    assert pids(nodes) == {"gateway": 1, "decode-0": 2, "decode-0 core": 3}


def test_a_tail_begins_with_all_and_ends_with_the_longest():
    points = tail([3.0, 1.0, 2.0, 4.0])
    assert points[0] == (1.0, 100.0) and points[-1] == (4.0, 25.0)
    many = tail([float(i) for i in range(10_000)], max_points=50)
    assert len(many) <= 51 and many[-1] == (9999.0, 0.01)


def test_plots_are_pictures_even_of_nothing(tmp_path: Path):
    drawn = {"8k-8": {"pair": [answer(0.1, 0.002)] * 9, "replicas": []}}
    files = plot_serving(tmp_path / "result.json", LOADS, drawn)
    assert [file.name for file in files] == ["result-ttft.png", "result-itl.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_a_pair_is_measured_and_every_load_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_folder(tmp_path / "tiny", TINY, torch.device("cpu"))
    out = tmp_path / "result.json"
    command = ["bench.serving.gpu", "--model", str(tmp_path / "tiny"), "--device", "cpu", "--systems", "pair"]
    monkeypatch.setattr(sys, "argv", [*command, "--shrink", "128", "--loads", "idle-1k", "8k-8", "--out", str(out)])
    monkeypatch.setenv("TANDEM_KV_CACHE_MIB", "64")
    assert serving_gpu.main() == 0
    rows = [row for row in json.loads(out.read_text())["rows"] if row["params"]["system"] == "pair"]
    failed = {row["params"]["load"]: row["value"] for row in rows if row["name"] == "failed"}
    landed = {row["params"]["load"]: row["value"] for row in rows if row["name"] == "kv handoffs received committed"}
    assert failed == {"idle-1k": 0, "8k-8": 0}
    assert landed.keys() == failed.keys()
    pauses = {row["params"]["by"]: row["value"] for row in rows if row["name"] == "longest collection"}
    assert pauses.keys() == {"gateway", "prefill-0", "decode-0"} and pauses["gateway"] > 0
    assert [row["value"] for row in rows if row["name"] == "pool clean afterwards"] == [1, 1]
    assert all((tmp_path / f"result-{kind}.png").exists() for kind in ("ttft", "itl"))


def test_servers_that_run_are_measured_alike_without_our_own_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, out = str(tmp_path / "tiny"), tmp_path / "result.json"
    write_folder(tmp_path / "tiny", TINY, torch.device("cpu"))
    command = ["bench.serving.gpu", "--model", model, "--shrink", "128", "--loads", "8k-8", "--out", str(out)]
    with running("--model", model, "--device", "cpu", TANDEM_KV_CACHE_MIB="64") as up:
        urls = [
            "--url",
            f"one={up.url}",
            "--url",
            f"gone=http://127.0.0.1:9,{up.url}",
            "--url",
            f"two={up.url},{up.url}",
        ]
        monkeypatch.setattr(sys, "argv", [*command, *urls])
        assert serving_gpu.main() == 1
    result = json.loads(out.read_text())
    rows = result["rows"]
    failed = {(row["params"]["system"], row["params"]["load"]): row["value"] for row in rows if row["name"] == "failed"}
    assert failed == {(system, "8k-8"): 0 for system in ("one", "two")}
    assert {"TTFT p50", "ITL p99", "goodput", "tokens an event"} <= {row["name"] for row in rows}
    assert not [row for row in rows if row["name"].startswith(("start", "mean ", "pool ", "processor "))]
    servers = result["config"]["servers"]
    assert servers.keys() == {"one", "two"} and servers["one"]["model"] == "tiny" and servers["one"]["version"]
    assert result["config"]["systems"] == [] and (tmp_path / "result-itl.png").exists()


def test_a_name_is_given_to_one_system_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    urls = ["--url", "pair=http://127.0.0.1:9", "--systems", "pair"]
    monkeypatch.setattr(sys, "argv", ["bench.serving.gpu", "--model", "m", *urls])
    with pytest.raises(SystemExit):
        serving_gpu.main()
    assert "two systems have one name: pair, pair" in capsys.readouterr().err
