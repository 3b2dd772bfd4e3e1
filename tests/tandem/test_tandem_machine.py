"""Ports, run folders, settings: what `tandem up` finds out before it starts anything."""

import json
import os
import socket
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from tandem.local.ports import claim_port, describe_holder
from tandem.local.run_dir import RunDir, require_free, state_home
from tandem.local.settings import UpSettings


def test_a_taken_port_names_its_holder_and_the_variable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} is taken by .*\(pid {os.getpid()}\); set PORT"):
            claim_port("127.0.0.1", port)


def test_port_0_is_a_free_one() -> None:
    port = claim_port("127.0.0.1", 0)
    assert port > 0
    assert describe_holder(port) is None
    assert claim_port("127.0.0.1", port) == port


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.1:0"):
        claim_port("192.0.2.1", 0)


def test_state_home_follows_xdg() -> None:
    assert state_home({"HOME": "/home/ann"}) == Path("/home/ann/.local/state/tandem")
    assert state_home({"HOME": "/home/ann", "XDG_STATE_HOME": "/var/state"}) == Path("/var/state/tandem")
    assert state_home({"HOME": "/home/ann", "XDG_STATE_HOME": "state"}) == Path("/home/ann/.local/state/tandem")


def test_a_run_folder_has_one_holder(tmp_path: Path) -> None:
    with (
        RunDir(tmp_path, 8000),
        RunDir(tmp_path, 8001),
        pytest.raises(ConfigError, match=r"on port 8000 already .* set PORT"),
        RunDir(tmp_path, 8000),
    ):
        pytest.fail("two supervisors hold one folder")


def test_a_held_run_folder_is_seen_without_taking_it(tmp_path: Path) -> None:
    require_free(tmp_path, 8000)
    assert not list(tmp_path.iterdir())
    with RunDir(tmp_path, 8000):
        require_free(tmp_path, 8001)
        with pytest.raises(ConfigError, match=r"on port 8000 already .* set PORT"):
            require_free(tmp_path, 8000)
    require_free(tmp_path, 8000)


def test_a_run_folder_is_private_and_keeps_its_logs(tmp_path: Path) -> None:
    with RunDir(tmp_path, 8000) as run_dir:
        (run_dir.logs / "worker.log").write_text("hello")
        (run_dir.ready / "worker.json").touch()
        run_dir.write_state({"port": 8000})
        assert json.loads(run_dir.state_file.read_text()) == {"port": 8000}
        assert run_dir.path.stat().st_mode & 0o077 == 0
    assert (run_dir.logs / "worker.log").read_text() == "hello"
    assert not run_dir.state_file.exists()
    assert not run_dir.ready.exists()
    with RunDir(tmp_path, 8000) as again:
        assert not list(again.logs.iterdir())


def test_a_home_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="set XDG_STATE_HOME"), RunDir(tmp_path / "file", 8000):
        pytest.fail("a folder inside a file")


def test_an_existing_model_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    assert UpSettings(model="weights").model == str(tmp_path / "weights")
    assert UpSettings(model="org/weights").model == "org/weights"


@pytest.mark.parametrize(
    ("counts", "is_complete"),
    [
        ({}, True),
        ({"prefill": 0}, False),
        ({"decode": 0}, False),
        ({"prefill": 0, "decode": 0, "mixed": 1}, True),
    ],
)
def test_somebody_must_be_able_to_answer(counts: dict[str, int], is_complete: bool) -> None:
    assert UpSettings.model_validate(counts).is_complete is is_complete
