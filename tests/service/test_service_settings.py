"""Settings by flag, variable and default, in that order, for every service; and what is said of wrong ones."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic_settings import BaseSettings

from contracts.errors import ConfigError
from coordinator.settings import CoordinatorSettings
from gateway.settings import GatewaySettings
from service.settings import read_settings
from service.version import release
from tandem.local.settings import UpSettings
from tools.configuration import COMMANDS
from worker.settings import DRAFTERS, Dtype, Transfer, WorkerSettings

KINDS: list[type[BaseSettings]] = [CoordinatorSettings, GatewaySettings, WorkerSettings, UpSettings]
FORMATS = (
    "from engine.cpu.linear import FORMATS; from engine.cpu.native.choice import NATIVE; "
    "from engine.cuda.model.number_formats import DEVICE_FORMATS; print('auto', NATIVE, *FORMATS, *DEVICE_FORMATS)"
)
NAMED_DRAFTERS = (
    "from engine.speculative.choice import AUTO, EAGLE3, MTP, OFF, PROPOSERS, SUFFIX_FIRST; "
    "print(AUTO, OFF, EAGLE3, SUFFIX_FIRST + EAGLE3, MTP, SUFFIX_FIRST + MTP, *PROPOSERS)"
)
TRANSPORTS = "from kv_transfer.settings import TRANSPORTS; print(*TRANSPORTS)"


def printed(code: str) -> set[str]:
    """In a process of its own: what it imports is heavy."""
    command = [sys.executable, "-c", code]
    return set(subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout.split())


@pytest.mark.parametrize("kind", KINDS)
def test_a_flag_wins_over_a_variable_and_that_over_the_default(kind, monkeypatch: pytest.MonkeyPatch):
    default = kind.model_fields["port"].default
    assert read_settings(kind, []).port == default
    monkeypatch.setenv("TANDEM_PORT", "1234")
    assert read_settings(kind, []).port == 1234
    assert read_settings(kind, ["--port", "4321"]).port == 4321


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_value_names_setting_value_bound_and_both_ways_to_set_it(kind):
    with pytest.raises(ConfigError) as caught:
        read_settings(kind, ["--port", "-1"])
    bound = "it must be greater than or equal to 0"
    assert str(caught.value) == f"port is '-1': {bound} (set by --port or TANDEM_PORT)"


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_host_is_refused_for_it_would_be_every_address(kind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TANDEM_HOST", "")
    with pytest.raises(ConfigError, match="host is '': it must have at least 1 character"):
        read_settings(kind, [])


@pytest.mark.parametrize("kind", KINDS)
def test_the_secret_is_never_printed(kind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TANDEM_SECRET", "hunter2")
    settings = read_settings(kind, [])
    assert settings.secret.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(settings) + str(settings) + settings.model_dump_json()


@pytest.mark.parametrize(("command", "kind"), COMMANDS.items())
def test_the_help_names_the_command_that_there_is(command: str, kind, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        read_settings(kind, ["--help"])
    assert capsys.readouterr().out.startswith(f"usage: {command} [-h]")


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_says_what_it_is(kind):
    assert [name for name, field in kind.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_frozen(kind):
    with pytest.raises(ValueError, match="frozen"):
        read_settings(kind, []).port = 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_flag_ends_with_code_2(kind, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        read_settings(kind, ["--prot", "1"])
    assert caught.value.code == 2
    assert "--prot" in capsys.readouterr().err


def test_the_number_formats_are_those_of_the_engine():
    """A format was added or removed there: name it in worker.settings.Dtype too."""
    assert set(get_args(Dtype)) == printed(FORMATS)


def test_the_transports_are_those_of_the_transfer_layer():
    assert set(get_args(Transfer)) == printed(TRANSPORTS)


def test_the_release_is_a_version():
    assert release()[0].isdigit()


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_worker_tells_others_an_address_that_they_can_reach(host: str):
    assert WorkerSettings.model_validate({"host": host}).advertised_host not in ("", "0.0.0.0")
    assert WorkerSettings.model_validate({"host": host, "advertise_host": "10.1.2.3"}).advertised_host == "10.1.2.3"


@pytest.mark.parametrize("module", ["coordinator", "prefill_svc", "decode_svc", "mixed_svc", "gateway"])
def test_a_service_refuses_in_one_line(module: str):
    command = [sys.executable, "-m", module, "--log-level", "loud"]
    env = {"PATH": "/usr/bin:/bin", "TANDEM_SECRET": "s"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, cwd=Path(__file__).parents[2])
    assert done.returncode == 1
    assert done.stderr.startswith(f"tandem {module}: log_level is 'loud'") and done.stderr.count("\n") == 1


def test_a_service_of_one_role_refuses_another():
    command = [sys.executable, "-m", "prefill_svc", "--role", "decode"]
    env = {"PATH": "/usr/bin:/bin", "TANDEM_SECRET": "s"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, cwd=Path(__file__).parents[2])
    assert done.returncode == 1
    assert "role is 'decode', but this is prefill_svc; start decode_svc instead" in done.stderr


def test_a_worker_id_that_is_no_part_of_a_key_is_refused():
    """One of "d1:alive" and "d1" would overwrite the other in Redis."""
    with pytest.raises(ConfigError, match="worker_id"):
        read_settings(WorkerSettings, ["--worker-id", "d1:alive"])
    assert read_settings(WorkerSettings, ["--worker-id", "host-1.a_b"]).worker_id == "host-1.a_b"


def test_a_drafter_is_named_as_the_engine_names_it_or_is_a_folder():
    assert set(DRAFTERS) == printed(NAMED_DRAFTERS)
    assert read_settings(WorkerSettings, ["--speculate", "./head"]).speculate == "./head"
    with pytest.raises(
        ConfigError, match=r"speculate is 'head': it may be auto, off, .*, or the path of an EAGLE3 head"
    ):
        read_settings(WorkerSettings, ["--speculate", "head"])
