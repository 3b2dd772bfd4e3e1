"""The command `tandem ps`: the processes of every system that `tandem up` runs here for this user."""

import argparse
import json
import urllib.error
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from process.local_http import open_local

DESCRIPTION = "Show the processes that `tandem up` started, of every system of this user on this machine."
EXAMPLES = """\
examples:
  tandem ps
  tandem ps --json | jq -r '.[] | select(.role == "decode") | .log'
"""
COLUMNS = ("port", "role", "id", "pid", "core_pid", "url", "state", "log")
WORKERS = ("prefill", "decode", "mixed")
HEALTH_TIMEOUT_S = 2.0

Row = dict[str, str | int | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="a JSON array of objects, for scripts")
    parser.add_argument("--port", type=int, help="only the system whose gateway has this port")


def run(options: argparse.Namespace, home: Path) -> int:
    found = list(list_processes(home))
    rows = [row for row in found if options.port in (None, row["port"])]
    if options.json:
        print(json.dumps(rows, indent=1))
    elif rows:
        show(rows)
    else:
        print(nothing_runs(found, options.port))
    return 0


def nothing_runs(others: Sequence[Row], port: int | None) -> str:
    """Return the line to print if there are no rows; `others`: what runs on other ports than `port`."""
    if others:
        ports = sorted({int(row["port"] or 0) for row in others})
        return f"nothing runs on port {port}; what runs is on {' and '.join(map(str, ports))}"
    return "nothing runs; `tandem up` starts a system"


def list_processes(home: Path) -> Iterator[Row]:
    """Yield a row for each process, in the order of their start, leaving out systems without a supervisor."""
    for file in sorted(home.glob("*/state.json")):
        try:
            system = json.loads(file.read_text())
        except (FileNotFoundError, ValueError):
            continue  # the system ended meanwhile, or the machine before the file was on the disk
        if is_alive(system["supervisor"]):
            for process in system["processes"]:
                yield {"port": system["port"]} | process | observe(process)


def identify(pid: int) -> dict:
    """Return the identity of a process, whose start time distinguishes it from a later one with its id."""
    return {"pid": pid, "created_s": psutil.Process(pid).create_time()}


def is_alive(identity: dict) -> bool:
    """Return whether the process lives. A zombie does not.

    In a container whose first process collects no children, a killed process stays a zombie.
    """
    try:
        process = psutil.Process(identity["pid"])
        return process.create_time() == identity["created_s"] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def observe(process: dict) -> Row:
    """Return the state that the supervisor wrote, checked by `/health` and `/ready` if it is "ready".

    A worker has the role that it says: it may be another than it was started with.
    """
    if process["state"] != "ready" or not str(process["url"]).startswith("http"):
        return {"state": process["state"]}
    try:
        with open_local(f"{process['url']}/health", HEALTH_TIMEOUT_S) as response:
            health = json.loads(response.read() or b"{}") if process["role"] in WORKERS else {}
            return _of_worker(process, health) if process["role"] in WORKERS else {"state": "ready"}
    except (urllib.error.URLError, OSError, ValueError):
        return {"state": "unhealthy"}


def _of_worker(process: dict, health: dict) -> Row:
    """Return the role of a healthy worker and its state.

    It is "turning" while requests of its former role run.
    """
    is_turning = bool(health.get("num_of_former_role"))
    state = "draining" if _drains(process["url"]) else "turning" if is_turning else "ready"
    return {"role": health.get("role", process["role"]), "state": state}


def _drains(url: str) -> bool:
    """Return whether a worker is healthy and takes no new work."""
    try:
        with open_local(f"{url}/ready", HEALTH_TIMEOUT_S):
            return False
    except urllib.error.HTTPError as error:
        with error:
            return b'"draining"' in error.read()


def show(rows: list[Row]) -> None:
    """Print the rows in columns as wide as they must be: a path that is cut short can't be pasted."""
    lines = [COLUMNS, *(tuple("-" if row[name] is None else str(row[name]) for name in COLUMNS) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
