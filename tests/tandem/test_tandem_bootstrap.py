"""What the bootstrap decides, and how it fetches, with a package index of its own. (CI starts from a bare system.)"""

import fcntl
import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools import bootstrap, lock

WHEEL = b"not really a wheel"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder with locks, and an environment that looks finished but for its stamp."""
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    (tmp_path / "requirements").mkdir()
    for name in ("run", "torch", "dev"):
        (tmp_path / "requirements" / f"{name}.lock").write_text(f"{name}==1.0\n")
    (tmp_path / "pyproject.toml").touch()
    for name, path in {
        "ROOT": tmp_path,
        "VENV": venv,
        "PYTHON": venv / "bin" / "python",
        "STAMP": venv / bootstrap.STAMP.name,
        "UNFINISHED": venv / bootstrap.UNFINISHED.name,
        "LOCKS": tmp_path / "requirements",
    }.items():
        monkeypatch.setattr(bootstrap, name, path)
    return tmp_path


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What would have been installed; the stamp is written as after a success."""
    calls: list[dict] = []

    def install(want: dict, have: dict) -> None:
        calls.append(want)
        bootstrap.STAMP.write_text(bootstrap.json.dumps(want))

    monkeypatch.setattr(bootstrap, "install", install)
    return calls


def test_nothing_is_done_twice(project: Path, installs: list[dict]) -> None:
    bootstrap.prepare(["run", "torch"], "")
    bootstrap.prepare(["run", "torch"], "")
    assert len(installs) == 1


def test_a_changed_lock_installs_again(project: Path, installs: list[dict]) -> None:
    bootstrap.prepare(["run", "torch"], "")
    (project / "requirements" / "run.lock").write_text("run==2.0\n")
    bootstrap.prepare(["run", "torch"], "")
    assert [want["run"] for want in installs] == [
        hashlib.sha256(f"run=={v}\n".encode()).hexdigest() for v in (1.0, 2.0)
    ]


def test_groups_add_up_and_stay(project: Path, installs: list[dict]) -> None:
    bootstrap.prepare(["run", "torch", "dev"], "")
    bootstrap.prepare(["run", "torch"], "")
    assert len(installs) == 1
    (project / "requirements" / "dev.lock").write_text("dev==2.0\n")
    bootstrap.prepare(["run", "torch"], "")
    assert "dev" in installs[1]


def test_the_torch_index_is_remembered(project: Path, installs: list[dict]) -> None:
    bootstrap.prepare(["run", "torch"], "http://cpu.example/whl")
    bootstrap.prepare(["run", "torch"], "")
    assert [want["torch_index"] for want in installs] == ["http://cpu.example/whl"]
    bootstrap.prepare(["run", "torch"], "http://other.example/whl")
    assert installs[1]["torch_index"] == "http://other.example/whl"


def test_an_unfinished_environment_is_done_anew(project: Path, installs: list[dict]) -> None:
    bootstrap.prepare(["run", "torch"], "")
    bootstrap.UNFINISHED.touch()
    assert bootstrap.installed() == {}
    bootstrap.prepare(["run", "torch"], "")
    assert len(installs) == 2


def test_an_interpreter_that_is_gone_is_noticed(project: Path, installs: list[dict]) -> None:
    bootstrap.prepare(["run", "torch"], "")
    bootstrap.PYTHON.unlink()
    assert bootstrap.installed() == {}


def test_what_was_half_installed_is_emptied(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap.UNFINISHED.touch()
    (bootstrap.VENV / "lib").mkdir()
    ran: list[list] = []
    monkeypatch.setattr(bootstrap, "run", lambda command, failure, environment=None: ran.append(command))
    monkeypatch.setattr(bootstrap, "install_pip", lambda: None)
    bootstrap.make_venv({})
    assert [path.name for path in bootstrap.VENV.iterdir()] == [bootstrap.UNFINISHED.name]
    assert ran[0][1:4] == ["-m", "venv", "--without-pip"]


def test_emptying_that_is_interrupted_is_still_unfinished(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap.UNFINISHED.touch()
    listing = sorted(bootstrap.VENV.iterdir(), key=lambda path: path != bootstrap.UNFINISHED)
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(listing))
    monkeypatch.setattr(bootstrap.shutil, "rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bootstrap.empty(bootstrap.VENV)
    assert bootstrap.UNFINISHED.exists()


def interrupt(path: Path) -> None:
    raise KeyboardInterrupt


def test_what_was_installed_is_compiled_even_where_that_is_forbidden(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    probe = "import pathlib, sys; pathlib.Path('said').write_text(str(sys.flags.dont_write_bytecode))"
    monkeypatch.setattr(bootstrap, "PROBE", probe)
    monkeypatch.setattr(bootstrap, "PYTHON", sys.executable)
    monkeypatch.setattr(bootstrap, "make_venv", lambda have: None)
    monkeypatch.setattr(bootstrap, "pip", lambda *arguments: None)
    bootstrap.install(bootstrap.target(["run", "torch"], "", {}), {})
    assert (project / "said").read_text() == "0"


def test_with_another_index_torch_and_its_cuda_come_from_nowhere_else(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "requirements" / "torch.lock").write_text("nvidia-cublas==13\ntorch==2.13.0 ; linux \\\n")
    pips: list[tuple[str, ...]] = []
    monkeypatch.setattr(bootstrap, "make_venv", lambda have: None)
    monkeypatch.setattr(bootstrap, "pip", lambda *arguments: pips.append(arguments))
    monkeypatch.setattr(bootstrap, "run", lambda command, failure, environment=None: None)
    want = bootstrap.target(["run", "torch"], "http://cpu.example/whl", {})
    bootstrap.install(want, {})
    assert not any("torch.lock" in argument for argument in pips[0])
    assert pips[1][-4:] == ("--index-url", "http://cpu.example/whl", "--force-reinstall", "torch==2.13.0")
    assert bootstrap.installed() == want


@pytest.mark.parametrize(("has_compiler", "fetches"), [(True, False), (False, True)])
def test_a_compiler_is_fetched_only_where_the_native_kernels_cannot_be_built(
    project: Path, monkeypatch: pytest.MonkeyPatch, has_compiler: bool, fetches: bool
) -> None:
    calls = project / "calls"
    interpreter = project / ".venv" / "bin" / "python"
    lines = (
        "#!/bin/sh",
        f'echo "${{PYTHONPATH:--}} $@" >> {calls}',
        f'[ "$3" != --quiet ] || exit {0 if has_compiler else 1}',
    )
    interpreter.write_text("\n".join(lines) + "\n")
    interpreter.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", "")
    bootstrap.build_kernels()
    said = calls.read_text().splitlines()
    assert [line.split()[2] for line in said[:2]] == ["kernels.cpu.build", "pip"][: len(said)]
    assert any("compiler.lock" in line for line in said) == fetches
    if fetches:  # built with the folder that the compiler is in, which is gone afterwards
        folder = said[-1].split()[0]
        assert said[-1].endswith("-m kernels.cpu.build") and not Path(folder).exists()


def test_nobody_waits_for_ever(project: Path, installs: list[dict], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "TURN_TIMEOUT_S", 0)
    bootstrap.prepare(["run"], "")
    other = os.open(bootstrap.VENV, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(bootstrap.Refusal, match="another process has kept"):
        bootstrap.prepare(["run"], "")
    os.close(other)
    bootstrap.prepare(["run"], "")
    assert len(installs) == 1


def test_an_unknown_group_is_named(project: Path) -> None:
    with pytest.raises(bootstrap.Refusal, match="no such group of dependencies: nonsense"):
        bootstrap.prepare(["run", "nonsense"], "")


def test_too_small_a_disk_is_refused_with_figures(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bootstrap.NEEDED_GB, "cuda", 10**9)
    with pytest.raises(bootstrap.Refusal, match="GB of disk are needed"):
        bootstrap.require_space("cuda", {})


def test_an_old_python_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 2))
    with pytest.raises(bootstrap.Refusal, match=r"this is 3\.9; name another"):
        bootstrap.require_python()


class Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        link = f'<a href="../../files/{bootstrap.PIP_WHEEL}#sha256=abc">{bootstrap.PIP_WHEEL}</a>'
        pages = {"/simple/pip/": link.encode(), f"/files/{bootstrap.PIP_WHEEL}": WHEEL, "/empty/pip/": b"<html>"}
        self.send_response(200 if self.path in pages else 404)
        self.end_headers()
        self.wfile.write(pages.get(self.path, b""))

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test says what matters."""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("PIP_INDEX_URL", f"{url}/simple")
        yield url
        server.shutdown()


def test_pip_is_fetched_from_the_index_by_its_digest(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "PIP_SHA256", hashlib.sha256(WHEEL).hexdigest())
    assert bootstrap.fetch_pip() == WHEEL


def test_another_pip_than_the_pinned_one_is_refused(index: str) -> None:
    with pytest.raises(bootstrap.Refusal, match="its digest differs"):
        bootstrap.fetch_pip()


def test_an_index_without_pip_is_refused(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{index}/empty")
    with pytest.raises(bootstrap.Refusal, match="the package index has no pip-"):
        bootstrap.fetch_pip()


def test_no_index_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(bootstrap.Refusal, match=r"the package index can't be reached: .*refused"):
        bootstrap.fetch_pip()


def test_lock_entries_keep_their_digests_together() -> None:
    old, new = (
        "numpy==2.4 ; a \\\n    --hash=sha256:1\n",
        "numpy==2.5 ; b \\\n    --hash=sha256:2 \\\n    --hash=sha256:3\n",
    )
    text = f"{old}{new}torch==1\n"
    entries = lock.parse(text)
    assert [len(entry.splitlines()) for entry in entries["numpy"]] == [2, 3]
    assert "".join(entries["numpy"] + entries["torch"]) == text


def test_every_locked_package_has_a_digest() -> None:
    for name in ("run", "torch", "gpu", "otel", "dev"):
        entries = lock.parse((lock.OUT / f"{name}.lock").read_text())
        assert entries
        assert all("--hash=sha256:" in line for lines in entries.values() for line in lines)
