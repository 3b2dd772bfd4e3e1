"""`tandem bench serve` as it is typed, against a server that answers, or misbehaves, as told."""

import argparse
import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.load.generator import Lengths
from contracts.errors import ConfigError
from tandem.commands import bench_serve
from tests.bench.completions import Server, served
from tests.waiting import async_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0
SMALL = ("--lengths", "8/4", "--concurrency", "1", "--requests", "4")


@dataclass(frozen=True)
class Done:
    code: int
    stdout: str
    stderr: str


async def start(server: Server, *options: str, **environment: str) -> Process:
    command = [sys.executable, "-m", "tandem", "bench", "serve", "--url", server.url, *options]
    env = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")} | environment
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env, stdout=PIPE, stderr=PIPE)


async def end(process: Process) -> Done:
    stdout, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode is not None
    return Done(process.returncode, stdout.decode(), stderr.decode())


async def bench(server: Server, *options: str, **environment: str) -> Done:
    return await end(await start(server, *options, **environment))


def cells(done: Done, name: str) -> list[str]:
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{name} ")]
    return line.removeprefix(name).split()


async def test_a_sweep_is_a_table_a_result_file_and_plots(tmp_path: Path) -> None:
    async with served("bare_end") as server:
        options = ("--lengths", "8/4,16/4", "--concurrency", "1,2", "--requests", "4", "--out", str(tmp_path / "new"))
        done = await bench(server, *options, TANDEM_API_KEY="sesame,other")
    assert (done.code, done.stderr.count("\n")) == (0, 4)
    assert "8/4, 2 users: 4 requests, 0 failed\n" in done.stderr
    titles = [line for line in done.stdout.splitlines() if "tokens in and out" in line]
    assert [title.split()[0] for title in titles] == ["8/4", "16/4"]
    assert done.stdout.count("E2E p99, s") == 2 and done.stdout.count("1 user  2 users") == 2
    result = json.loads((tmp_path / "new" / "result.json").read_text())
    assert result["what"] == "serve" and result["config"]["model"] == "m"
    assert result["config"]["server_version"] == "1.2.3"
    assert result["config"]["system_fingerprints"] == ["tandem-1.2.3-synthetic-2"]
    assert "tandem-1.2.3-synthetic-2: how many drafted tokens count was set, not found\n" in done.stdout
    named = {(row["name"], row["params"]["lengths"], row["params"]["users"]): row["value"] for row in result["rows"]}
    assert named["requests", "16/4", 2] == 4 and named["TTFT p50", "8/4", 1] > 0
    written = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert written == ["itl.png", "pareto.png", "result.json", "result.md", "ttft.png"]
    assert all("Authorization: Bearer sesame\r\n" in head for head in server.heads)


@pytest.mark.parametrize("options", [(), ("--model", "m")])
async def test_where_a_key_is_wanted_the_variables_are_named(options: tuple[str, ...]) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as listening:
        server = Server([], {}, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        done = await bench(server, *SMALL, *options, "--no-plots")
    assert done.code == 1
    assert done.stderr.splitlines()[-1].endswith("; set TANDEM_API_KEY or OPENAI_API_KEY to the server's key")


async def test_failures_are_told_by_reason_and_the_rest_is_measured(tmp_path: Path) -> None:
    async with served("good", "refused", "no_json", "refused", "good") as server:
        done = await bench(server, *SMALL, "--no-plots", "--out", str(tmp_path))
    assert done.code == 0
    assert cells(done, "requests") == ["4"] and cells(done, "failed") == ["3"]
    assert '8/4, 1 user: 2 x HTTP 429: 429 {"error": {"message": "too much work"}}\n' in done.stdout
    assert "8/4, 1 user: 1 x garbage: JSONDecodeError: Expecting property name" in done.stdout


async def test_a_server_that_answers_nobody_leaves_no_folder(tmp_path: Path) -> None:
    async with served("unfinished") as server:
        done = await bench(server, *SMALL, "--no-plots", "--out", str(tmp_path / "new"))
    assert (done.code, done.stdout) == (1, "")
    words = "tandem bench serve: none of 1 requests to warm up was answered; the first: the stream ended without a"
    assert done.stderr.splitlines()[-1].startswith(words)
    assert not (tmp_path / "new").exists()


async def test_a_folder_that_was_there_before_stays(tmp_path: Path) -> None:
    async with served("unfinished") as server:
        done = await bench(server, *SMALL, "--no-plots", "--out", str(tmp_path))
    assert done.code == 1 and tmp_path.is_dir()


async def test_a_server_that_is_lost_on_the_way_leaves_what_was_measured_before(tmp_path: Path) -> None:
    async with served(*["good"] * 5, "refused") as server:
        done = await bench(server, *SMALL, "--concurrency", "1,2", "--no-plots", "--out", str(tmp_path))
    assert done.code == 0 and "; what was measured before:\n" in done.stderr
    assert cells(done, "requests") == ["4", "0"] and cells(done, "TTFT p50, ms")[1] == "-"


async def test_ctrl_c_shows_what_was_measured_so_far(tmp_path: Path) -> None:
    async with served("good", "good", "good", "hanging") as server:
        process = await start(server, *SMALL, "--no-plots", "--out", str(tmp_path))
        await async_until(lambda: len(server.bodies) >= 4, DEADLINE_S)
        process.send_signal(signal.SIGINT)
        done = await end(process)
    assert done.code == 0 and done.stderr.endswith("stopped; what was measured so far:\n")
    assert cells(done, "requests") == ["2"]
    assert (tmp_path / "result.json").exists()


async def test_arrivals_at_a_rate_and_throughput_per_gpu(tmp_path: Path) -> None:
    async with served("good") as server:
        options = ("--lengths", "8/4", "--rate", "50", "--requests", "5", "--gpus", "2", "--no-plots")
        done = await bench(server, *options, "--out", str(tmp_path))
    assert done.code == 0 and "50/s" in done.stdout
    whole, each = (float(cells(done, f"input and output{end}, tokens/s")[0]) for end in ("", " per GPU"))
    assert whole == pytest.approx(2 * each, rel=0.02)


async def test_more_than_the_context_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async with served("good") as server:
        done = await bench(server, "--lengths", "128/128,3k/2k", "--no-plots", "--out", str(tmp_path / "new"))
    assert done.code == 1 and server.bodies == []
    assert "3k/2k takes 5120 tokens, and m has a context of 4096" in done.stderr


async def test_a_server_that_is_none_is_told(tmp_path: Path) -> None:
    async with served("good", card={"odd": 1}) as server:
        done = await bench(server, "--no-plots", "--out", str(tmp_path / "new"))
        assert (done.code, done.stderr.count("\n")) == (1, 1) and "name it with --model" in done.stderr
    done = await bench(server, "--no-plots", "--out", str(tmp_path / "new"))
    assert (done.code, done.stderr.count("\n")) == (1, 1) and "nobody answers at" in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        *(("--lengths", text) for text in ("1k", "0/1", "8/4,")),
        *(("--concurrency", text) for text in ("0", "x", "1,,2")),
        *(("--rate", text) for text in ("0", "inf", "x")),
        ("--rate", "1", "--concurrency", "1"),
        ("--requests", "-1"),
    ],
)
def test_a_wrong_load_is_refused_as_argparse_does(wrong: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(*wrong)
    assert wrong[0] in capsys.readouterr().err


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    return parser.parse_args(arguments)


def test_as_many_requests_as_each_point_needs() -> None:
    points = list(bench_serve.points_of(parsed("--lengths", "1k/8k,100/2k", "--concurrency", "1,16")))
    assert [(str(point), point.num_requests) for point in points] == [
        ("1k/8k, 1 user", 10),
        ("1k/8k, 16 users", 160),
        ("100/2k, 1 user", 10),
        ("100/2k, 16 users", 160),
    ]
    points = list(bench_serve.points_of(parsed("--rate", "0.1,2")))
    assert [(str(point), point.num_requests) for point in points] == [("128/128, 0.1/s", 10), ("128/128, 2/s", 120)]
    assert points[0].lengths == Lengths(128, 128)


def test_without_matplotlib_it_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"matplotlib.* -m pip install matplotlib`, or measure with --no-plots"):
        bench_serve.run(parsed("--url", "http://127.0.0.1:9"), tmp_path)


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="name another folder with --out"):
        bench_serve.run(parsed("--url", "http://127.0.0.1:9", "--out", str(tmp_path / "file" / "new")), tmp_path)


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (3, "3"), (1234.5, "1234"), (99.94, "99.9"), (1.234, "1.23"), (0.0, "0.00")]
)
def test_figures(value: float | None, shown: str) -> None:
    assert bench_serve.figure(value) == shown
