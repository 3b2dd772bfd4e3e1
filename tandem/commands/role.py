"""The command `tandem role`: give a running worker another role."""

import argparse
import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from contracts.errors import ConfigError, Unavailable
from process.local_http import open_local
from tandem.commands import ps

DESCRIPTION = (
    "Give a running worker another role: prefill, decode or mixed. It keeps its KV cache and its links. New requests "
    "see the new role at once; those that run end as they began, and the command waits for them."
)
EXAMPLES = """\
examples:
  tandem role decode-1 prefill                  a worker of `tandem ps`
  tandem role decode-1 decode --port 8000       that of one of several systems
  TANDEM_SECRET=... tandem role http://10.0.0.5:9000 mixed
                                                a worker elsewhere, by its address and its pool's secret

The role lasts until the worker ends: started again, it has that of its settings. The last worker of a pool that
computes prompts, or that produces answers, keeps that side.
"""
TIMEOUT_S = 10.0
END_TIMEOUT_S = 600.0
"""How long the requests of the former role are waited for; they have deadlines of their own."""
LOOK_PERIOD_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "worker", metavar="WORKER", help="its id, as `tandem ps` has it, or its address, http://HOST:PORT"
    )
    parser.add_argument("role", metavar="ROLE", choices=ps.WORKERS, help=", ".join(ps.WORKERS))
    parser.add_argument("--port", type=int, help="the system on this machine whose gateway has this port")


def run(options: argparse.Namespace, home: Path) -> int:
    url, secret = _worker(options, home)
    began_s = time.monotonic()
    changed = _ask(f"{url}/role", secret, {"role": options.role})
    changed_s = time.monotonic() - began_s
    print(
        f"{options.worker} is {changed['role']}, and was {changed['was']}: new requests see it so ({changed_s:.2f} s)"
    )
    _wait_for_former(url, options.worker, changed["was"], began_s)
    return 0


def _wait_for_former(url: str, worker: str, was: str, began_s: float) -> None:
    """Wait until no request of the former role runs. Raises Unavailable after END_TIMEOUT_S."""
    num_left, num_told = 1, 0
    while num_left:
        time.sleep(LOOK_PERIOD_S)
        num_left = int(_ask(f"{url}/health")["num_of_former_role"])
        if num_left and not num_told:
            print(f"{num_left} of its requests as {was} go on to their end", flush=True)
            num_told = num_left
        if num_left and time.monotonic() - began_s > END_TIMEOUT_S:
            raise Unavailable(f"{num_left} requests of {worker} as {was} still run after {END_TIMEOUT_S:.0f} s")
    if num_told:
        print(f"none is left ({time.monotonic() - began_s:.1f} s)")


def _worker(options: argparse.Namespace, home: Path) -> tuple[str, str]:
    """Return the address of the worker that was named, and the secret of its pool. Raises ConfigError."""
    if "://" in options.worker:
        return options.worker.rstrip("/"), os.environ.get("TANDEM_SECRET", "")
    rows = [row for row in ps.list_processes(home) if row["role"] in ps.WORKERS and options.port in (None, row["port"])]
    found = [row for row in rows if row["id"] == options.worker and row["url"] and row["pid"]]
    match found:
        case [row]:
            return str(row["url"]), _secret_of(int(row["pid"] or 0))
        case []:
            names = ", ".join(str(row["id"]) for row in rows)
            raise ConfigError(
                f"no worker {options.worker!r} runs here; {f'there are {names}' if names else 'none does'}"
            )
    raise ConfigError(f"{options.worker!r} runs in several systems: choose one with --port")


def _secret_of(pid: int) -> str:
    """Return the secret in a process's environment: `tandem up` draws one, and writes it nowhere."""
    try:
        return psutil.Process(pid).environ().get("TANDEM_SECRET", "")
    except psutil.Error as error:
        raise ConfigError(f"the worker's process can't be asked for its pool's secret: {error}") from error


def _ask(url: str, secret: str = "", body: dict[str, str] | None = None) -> Any:
    """Send GET, or POST of JSON, and return the answer's JSON. Raises Unavailable with the worker's words."""
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with open_local(request, TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            raise Unavailable(_words(error)) from error
    except (OSError, ValueError) as error:
        raise Unavailable(f"{url} does not answer as a worker does: {error}") from error


def _words(error: urllib.error.HTTPError) -> str:
    try:
        answer = json.load(error)
        return answer["error"]["message"] if "error" in answer else answer["status"]
    except (ValueError, KeyError, TypeError):
        return f"{error.url} answers {error.code} {error.reason}"
