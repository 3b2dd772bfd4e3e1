"""A result file says what was measured, on what, how to repeat it; its page says the same."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.report import result
from bench.report.result import ResultRow, checkout, config_digest, hardware, page, write_result

ROWS = [
    ResultRow("copy", 30.0, "GB/s", {"tokens": 128}, limit=40.0, peer="memcpy", peer_value=20.0),
    ResultRow("plain", 1.5, "ms"),
]
CONFIG = {"model": "tiny", "rounds": 3}


@pytest.fixture
def written(tmp_path):
    file = write_result(tmp_path / "deep" / "run.json", "demo", ROWS, CONFIG)
    return file, json.loads(file.read_text())


def test_the_file_has_what_a_reader_needs_to_repeat_it(written):
    _, document = written
    assert {"what", "time", "hardware", "versions", "commit", "command", "config", "config_digest", "rows"} == set(
        document
    )
    assert document["what"] == "demo"
    assert document["config_digest"] == config_digest(CONFIG)
    assert document["rows"][0] == {
        "name": "copy",
        "value": 30.0,
        "unit": "GB/s",
        "params": {"tokens": 128},
        "limit": 40.0,
        "peer": "memcpy",
        "peer_value": 20.0,
    }
    assert document["versions"]["torch"]
    assert document["hardware"]["cores"] >= 1


def test_the_page_stands_beside_it_and_shows_limit_and_peer(written):
    file, document = written
    text = file.with_suffix(".md").read_text()
    assert text == page(document)
    assert "| copy | tokens 128 | 30 GB/s | 75% of 40 | memcpy: 20 | 1.50 |" in text
    assert "| plain |  | 1.5 ms |  |  |  |" in text
    assert document["commit"] in text and document["command"] in text


def test_a_time_that_is_twice_the_least_reaches_half_of_its_limit(tmp_path):
    rows = [ResultRow("step", 4.0, "ms", limit=2.0), ResultRow("ended well", 0, "answers", limit=2)]
    text = write_result(tmp_path / "run.json", "demo", rows, {}).with_suffix(".md").read_text()
    assert "| step |  | 4 ms | 50% of 2 |" in text and "| ended well |  | 0 answers | 0% of 2 |" in text


def test_without_a_path_the_name_tells_day_what_and_hardware(tmp_path, monkeypatch):
    monkeypatch.setattr(result, "RESULTS", tmp_path)
    file = write_result(None, "demo", ROWS, CONFIG)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-demo-[a-z0-9-]+\.json", file.name)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Intel(R) Xeon(R) Platinum 8581C CPU @ 2.10GHz", "intel-xeon-platinum-8581c-2-10ghz"),
        ("AMD EPYC 9V74 80-Core Processor", "amd-epyc-9v74-80-core"),
        ("a" * 60, "a" * 40),
    ],
)
def test_hardware_in_a_file_name(name, slug):
    assert result._slug(name) == slug


def test_the_digest_depends_on_values_not_on_order():
    assert config_digest({"a": 1, "b": 2}) == config_digest({"b": 2, "a": 1})
    assert config_digest({"a": 1}) != config_digest({"a": 2})
    assert re.fullmatch(r"[0-9a-f]{16}", config_digest({}))


def test_the_commit_says_when_tracked_files_differ(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], check=True, cwd=tmp_path)

    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    assert not result.commit_of().endswith("+")
    (tmp_path / "file").write_text("2")
    assert result.commit_of().endswith("+")


def test_outside_of_a_checkout_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert result.commit_of() == "unknown"


def test_without_git_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert result.commit_of() == "unknown"


def test_hardware_names_the_cpu():
    assert hardware()["cpu"] and hardware()["memory_gib"] > 0


def test_make_bench_refuses_a_benchmark_that_does_not_exist():
    done = subprocess.run([sys.executable, "-m", "bench", "engin"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no benchmark is called engin" in done.stderr and "engine" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_checkout_is_its_whole_path_wherever_a_child_runs(tmp_path: Path, monkeypatch):
    (tmp_path / "old").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(argparse.ArgumentTypeError, match="old is no checkout of this project"):
        checkout("old")
    (tmp_path / "old" / "pyproject.toml").touch()
    assert checkout("old") == checkout("../" + tmp_path.name + "/old") == (tmp_path / "old").resolve()
