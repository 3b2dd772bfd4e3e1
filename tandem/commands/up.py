"""The command `tandem up`: a whole system on this machine, from its first process to its last.

local.system_plan says which processes there are.
"""

import json
import os
import secrets
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from contracts.errors import ConfigError
from coordinator.store.local_server import find_server
from process.local_http import open_local
from process.sockets import http_url
from tandem.commands.ps import identify
from tandem.commands.target import key_headers
from tandem.local.child import ChildProcess
from tandem.local.console_output import plain
from tandem.local.ports import claim_port
from tandem.local.preflight import (
    LORA_MODULES,
    SPECULATE,
    absolute_adapters,
    absolute_drafter,
    handed_on,
    preflight,
    read_up_settings,
    unread,
)
from tandem.local.run_dir import RunDir, require_free, state_home
from tandem.local.settings import UpSettings
from tandem.local.signals import SignalInbox
from tandem.local.supervisor import StopRequested, Supervisor, VitalDeath
from tandem.local.system_plan import plan_system, require_redis
from tandem.local.vllm_options import translated

ROOT = Path(__file__).resolve().parents[2]
STOPPED, CANT_START, VITAL_DIED = 0, 1, 3
HTTP_TIMEOUT_S = 2.0


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    console = Console(highlight=False)
    for line in unread(environ):
        print(f"tandem up: {line}", file=sys.stderr)
    try:
        words, notes = translated(argv)
        own, handed = handed_on(words)
        if drafter := {**environ, **handed}.get(SPECULATE):
            handed[SPECULATE] = absolute_drafter(drafter)
        if modules := {**environ, **handed}.get(LORA_MODULES):
            handed[LORA_MODULES] = absolute_adapters(modules)
        for line in notes:
            print(f"tandem up: {line}", file=sys.stderr)
        os.environ.update(handed)  # services' settings are checked there, and their processes inherit it
        environ = {**environ, **handed}
        settings = read_up_settings(own)
        require_free(state_home(environ), settings.port)  # first: its error names a Tandem system on the port
        port = claim_port(settings.host, settings.port)
        preflight(settings)
    except ConfigError as error:
        return complain(error)
    with SignalInbox() as inbox:
        try:
            return run(settings, port, environ, inbox, console)
        except ConfigError as error:
            return complain(error)
        except StopRequested:
            plain(console, "stopped before it was up")
            return STOPPED
        except VitalDeath as error:
            print(f"tandem up: {error}", file=sys.stderr)
            return VITAL_DIED


def complain(error: ConfigError) -> int:
    """Print the error, and return the exit code of a start that failed."""
    print(f"tandem up: {error}", file=sys.stderr)
    return CANT_START


def run(settings: UpSettings, port: int, environ: Mapping[str, str], inbox: SignalInbox, console: Console) -> int:
    secret = settings.secret.get_secret_value() or secrets.token_hex(32)
    with RunDir(state_home(environ), port) as run_dir:
        specs = plan_system(settings, run_dir, port, secret, environ, redis_program(settings))
        children = [ChildProcess(spec, run_dir.logs / f"{spec.name}.log", ROOT) for spec in specs]
        supervisor = Supervisor(children, inbox, console, StateFile(run_dir, port, children, console).write)
        try:
            began_s = time.monotonic()
            supervisor.start(settings.start_timeout_s)
            url = http_url(settings.host, port)
            supervisor.wait_for(lambda: answers(f"{url}/ready"), "the gateway's first look at the workers", 30.0)
            announce(console, url, run_dir, time.monotonic() - began_s)
            supervisor.watch()
            return STOPPED
        finally:
            supervisor.stop()
            plain(console, "all processes have ended")


def redis_program(settings: UpSettings) -> str:
    """Return the Redis server to start; empty if the settings name one.

    Raises ConfigError if there is none to start, or the one that is named does not answer.
    """
    if not settings.redis_url:
        return str(find_server())
    require_redis(settings.redis_url, "leave REDIS_URL empty")
    return ""


class StateFile:
    """The file of processes for `tandem ps`; on a full disk it falls behind, and the system goes on."""

    def __init__(self, run_dir: RunDir, port: int, children: Sequence[ChildProcess], console: Console) -> None:
        self._run_dir, self._port, self._children, self._console = run_dir, port, children, console
        self._is_behind = False

    def write(self) -> None:
        """Bring the file up to date; of several failures in a row the first is reported."""
        processes = [process_row(child) for child in self._children]
        state = {"port": self._port, "supervisor": identify(os.getpid()), "processes": processes}
        try:
            self._run_dir.write_state(state)
            self._is_behind = False
        except OSError as error:
            if not self._is_behind:
                what = f"can't write {self._run_dir.state_file}: {error.strerror}"
                plain(self._console, f"{what}; the system goes on, and `tandem ps` shows what was before")
            self._is_behind = True


def process_row(child: ChildProcess) -> dict[str, object]:
    """Return what `tandem ps` shows of one process."""
    return {
        "role": child.spec.role,
        "id": child.facts.get("id", child.name),
        "pid": child.pid,
        "core_pid": child.facts.get("core_pid"),
        "url": child.facts.get("url"),
        "state": child.state,
        "log": str(child.log),
    }


def answers(url: str) -> bool:
    """Return whether the URL answers with success."""
    try:
        with open_local(url, HTTP_TIMEOUT_S):
            return True
    except (urllib.error.URLError, OSError):
        return False


def announce(console: Console, url: str, run_dir: RunDir, took_s: float) -> None:
    """Print where the system is, and a request to try."""
    messages = [{"role": "user", "content": "What is the moon?"}]
    named = {"model": name} if (name := served_model(url)) else {}
    body = json.dumps(named | {"messages": messages, "max_tokens": 64, "temperature": 0})
    for line in (
        "",
        f"Tandem is up after {took_s:.1f} s: {url}",
        "",
        "Try it:",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{shown_key()} -d {shlex.quote(body)}",
        "",
        f"Logs: {run_dir.logs}",
        "Stop: Ctrl-C",
    ):
        plain(console, line)


def shown_key() -> str:
    """Return the curl option with the key as a shell variable, never the key itself.

    The variable's value may be several keys: the first one is taken. With tenants alone it is one of theirs, which is
    for who asks to know.
    """
    keys = os.environ.get("TANDEM_API_KEY", "")
    if not keys and os.environ.get("TANDEM_TENANTS"):
        return ' -H "Authorization: Bearer $KEY"'
    variable = "${TANDEM_API_KEY%%,*}" if "," in keys else "$TANDEM_API_KEY"
    return f' -H "Authorization: Bearer {variable}"' if keys else ""


def served_model(url: str) -> str:
    """Return the name of the model that the gateway serves; empty where it tells none but tenants.

    Raises ConfigError if it does not answer.
    """
    request = urllib.request.Request(f"{url}/v1/models", headers=key_headers())
    try:
        with open_local(request, HTTP_TIMEOUT_S) as response:
            return json.load(response)["data"][0]["id"]
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError) and error.code == 401 and os.environ.get("TANDEM_TENANTS"):
            return ""
        raise ConfigError(f"the gateway does not say what it serves: {error}") from error
