"""`tandem ps` against run folders and a service that answers, or does not."""

import argparse
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from tandem.commands import ps
from tandem.commands.top import view
from tandem.commands.top_snapshot import Page, look
from tandem.local.run_dir import RunDir

pytestmark = pytest.mark.slow


class Service(BaseHTTPRequestHandler):
    status = 200
    lacks = ""
    health: ClassVar[dict] = {}

    def do_GET(self) -> None:
        if self.path == "/ready":
            self.send_response(503 if self.lacks else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"status": self.lacks or "ready"}, separators=(",", ":")).encode())
            return
        self.send_response(self.status if self.path in ("/health", "/metrics") else 404)
        if self.path == "/metrics":
            self.send_header("Content-Length", "1000")  # and then it dies
        self.end_headers()
        if self.path == "/health":
            self.wfile.write(json.dumps(self.health).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test says what matters."""


@pytest.fixture
def service() -> Iterator[str]:
    Service.status, Service.lacks, Service.health = 200, "", {}
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def process(url: str | None, state: str = "ready") -> dict:
    row = {"role": "prefill", "id": "prefill-0", "pid": 10, "core_pid": 11}
    return row | {"url": url, "state": state, "log": "/x/prefill-0.log"}


@pytest.fixture
def home(tmp_path: Path, service: str) -> Iterator[Path]:
    with RunDir(tmp_path, 8000) as run_dir:
        run_dir.write_state({"port": 8000, "supervisor": ps.identify(os.getpid()), "processes": [process(service)]})
        yield tmp_path


def test_a_row_has_what_was_promised(home: Path, service: str) -> None:
    (row,) = ps.list_processes(home)
    assert row == {"port": 8000} | process(service)
    assert set(row) == set(ps.COLUMNS)


def test_a_service_that_is_not_well_is_said_so(home: Path) -> None:
    Service.status = 503
    assert [row["state"] for row in ps.list_processes(home)] == ["unhealthy"]


@pytest.mark.parametrize(("lacks", "state"), [("draining", "draining"), ("not in the registry", "ready")])
def test_a_worker_that_drains_is_said_so(home: Path, lacks: str, state: str) -> None:
    Service.lacks = lacks
    assert [row["state"] for row in ps.list_processes(home)] == [state]
    shown = Console(width=100, record=True, file=io.StringIO())
    shown.print(view(look(home, None), look(home, None), 100))
    assert f"prefill-0   {state}" in shown.export_text()


@pytest.mark.parametrize(("num_left", "state"), [(2, "turning"), (0, "ready")])
def test_a_worker_has_the_role_that_it_says(home: Path, num_left: int, state: str) -> None:
    Service.health = {"role": "decode", "num_of_former_role": num_left}
    assert [(row["role"], row["state"]) for row in ps.list_processes(home)] == [("decode", state)]


@pytest.mark.parametrize("state", ["starting", "dead", "waiting"])
def test_a_service_that_is_not_ready_is_not_asked(state: str) -> None:
    assert ps.observe(process("http://127.0.0.1:9", state))["state"] == state


def test_a_service_without_a_page_is_as_the_supervisor_says() -> None:
    assert ps.observe(process("unix:///x/redis.sock"))["state"] == "ready"


def test_nobody_there_is_unhealthy() -> None:
    assert ps.observe(process("http://127.0.0.1:9"))["state"] == "unhealthy"


def test_a_system_whose_supervisor_is_gone_is_left_out(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as gone:
        identity = ps.identify(gone.pid)
        assert ps.is_alive(identity)
        gone.kill()
        os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
        assert not ps.is_alive(identity), "a zombie: nobody has collected it yet"
    assert not ps.is_alive(identity)
    assert not ps.is_alive(ps.identify(os.getpid()) | {"created_s": 0.0})
    with RunDir(tmp_path, 8000) as run_dir:
        run_dir.write_state({"port": 8000, "supervisor": identity, "processes": [process(None)]})
        assert list(ps.list_processes(tmp_path)) == []


@pytest.mark.parametrize("text", ["", "{", "\0\0\0\0"])
def test_a_state_that_a_crash_of_the_machine_has_left_half_written_hides_no_other(
    home: Path, service: str, text: str
) -> None:
    (home / "7999").mkdir()
    (home / "7999" / "state.json").write_text(text)
    assert [row["port"] for row in ps.list_processes(home)] == [8000]


def test_top_goes_on_past_a_service_that_dies_while_it_answers(home: Path) -> None:
    seen = look(home, None)
    assert [row["state"] for row in seen.rows] == ["ready"]
    assert seen.pages == {10: Page()}


def test_json_for_scripts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ps.run(argparse.Namespace(json=True, port=None), home) == 0
    assert json.loads(capsys.readouterr().out)[0]["id"] == "prefill-0"
    ps.run(argparse.Namespace(json=True, port=9999), home)
    assert json.loads(capsys.readouterr().out) == []


def test_a_table_for_people(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ps.run(argparse.Namespace(json=False, port=None), home)
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == list(ps.COLUMNS)
    assert line.split()[1:3] == ["prefill", "prefill-0"]


def test_nothing_on_a_port_says_which_ports_have_something(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ps.run(argparse.Namespace(json=False, port=9), home)
    words = "nothing runs on port 9; what runs is on 8000"
    assert capsys.readouterr().out == f"{words}\n"
    shown = Console(width=100, record=True, file=io.StringIO())
    shown.print(view(look(home, 9), look(home, 9), 100))
    assert shown.export_text() == f"{words}\n"


def test_nothing_running_says_how_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ps.run(argparse.Namespace(json=False, port=None), tmp_path)
    assert "tandem up" in capsys.readouterr().out
