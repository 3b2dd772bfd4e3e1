"""`tandem ps`: the processes of every system that `tandem up` runs here for this user."""

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
    """What to say where there are no rows; `others`: what runs on other ports than `port`."""
    if others:
        ports = sorted({int(row["port"] or 0) for row in others})
        return f"nothing runs on port {port}; what runs is on {' and '.join(map(str, ports))}"
    return "nothing runs; `tandem up` starts a system"


def list_processes(home: Path) -> Iterator[Row]:
    """One row per process, in the order they were started. Systems whose supervisor is gone are left out."""
    for file in sorted(home.glob("*/state.json")):
        try:
            system = json.loads(file.read_text())
        except (FileNotFoundError, ValueError):
            continue  # it ended between the listing and the look, or the machine did before all was on the disk
        if is_alive(system["supervisor"]):
            for process in system["processes"]:
                yield {"port": system["port"]} | process | {"state": observe(process)}


def identify(pid: int) -> dict:
    """A process, told from a later one with the same number by when it began."""
    return {"pid": pid, "created_s": psutil.Process(pid).create_time()}


def is_alive(identity: dict) -> bool:
    """A zombie is not: in a container whose first process collects nobody, what was killed stays one."""
    try:
        process = psutil.Process(identity["pid"])
        return process.create_time() == identity["created_s"] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def observe(process: dict) -> str:
    """The state as the supervisor knows it, and by the service's own `/health` and `/ready` where it is ready."""
    if process["state"] != "ready" or not str(process["url"]).startswith("http"):
        return process["state"]
    try:
        with open_local(f"{process['url']}/health", HEALTH_TIMEOUT_S):
            return "draining" if process["role"] in WORKERS and _drains(process["url"]) else "ready"
    except (urllib.error.URLError, OSError):
        return "unhealthy"


def _drains(url: str) -> bool:
    """Of a worker: it is well, and takes no work."""
    try:
        with open_local(f"{url}/ready", HEALTH_TIMEOUT_S):
            return False
    except urllib.error.HTTPError as error:
        with error:
            return b'"draining"' in error.read()


def show(rows: list[Row]) -> None:
    """Columns as wide as they must be: a path that is cut short can't be pasted."""
    lines = [COLUMNS, *(tuple("-" if row[name] is None else str(row[name]) for name in COLUMNS) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
