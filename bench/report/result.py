"""The result files: one per benchmark run, as JSON and as a Markdown page.

A file says what was measured, on which machine, with which versions, beside which limit and which peer.
"""

import argparse
import hashlib
import importlib.metadata
import json
import logging
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path("bench/results")
_log = logging.getLogger(__name__)
_TIMES = ("s", "ms", "us")
_PACKAGES = ("torch", "transformers", "ucxx-cu13", "numpy", "redis", "uvicorn", "msgspec")


@dataclass(frozen=True)
class ResultRow:
    """One figure.

    `limit` is what the hardware allows, in the same unit: the least of a time, the most of all else. `peer_value` is
    what `peer` reached in the same run.
    """

    name: str
    value: float
    unit: str
    params: Mapping[str, Any] = field(default_factory=dict)
    limit: float | None = None
    peer: str | None = None
    peer_value: float | None = None


def shown(row: ResultRow) -> ResultRow:
    """Log a row at once, so that a run that is cut short still leaves figures, and return it."""
    share = f" ({share_of_limit(row.value, row.limit, row.unit):.0%} of the limit)" if row.limit else ""
    _log.info("%s %s %.4g %s%s", row.name, dict(row.params), row.value, row.unit, share)
    return row


def write_result(path: Path | None, what: str, rows: Sequence[ResultRow], config: Mapping[str, Any]) -> Path:
    """Write `bench/results/<date>-<what>-<hardware>.json` (or `path`) and the Markdown page beside it.

    Return the path of the JSON.
    """
    now = datetime.now(UTC)
    file = path or RESULTS / f"{now:%Y-%m-%d}-{what}-{_slug(hardware()['cpu'])}.json"
    result = {
        "what": what,
        "time": now.isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": _versions(),
        "commit": commit_of(),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "config": dict(config),
        "config_digest": config_digest(config),
        "rows": [asdict(row) for row in rows],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(page(result), encoding="utf-8")
    return file


def share_of_limit(value: float, limit: float, unit: str) -> float:
    """Return the fraction of the limit that is reached; a time twice the least reaches half."""
    return limit / value if unit in _TIMES else value / limit


def config_digest(config: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def hardware() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def page(result: Mapping[str, Any]) -> str:
    """Return the result as Markdown: one table, then how to run it again."""
    machine = result["hardware"]
    lines = [
        f"# {result['what']}",
        "",
        f"{result['time']}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"commit {result['commit']}, configuration {result['config_digest']}",
        "",
        "| what | parameters | value | of the limit | peer | times the peer |",
        "|---|---|---|---|---|---|",
        *(_line(row) for row in result["rows"]),
        "",
        f"Command: `{result['command']}`. Versions: {', '.join(f'{k} {v}' for k, v in result['versions'].items())}.",
    ]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    params = ", ".join(f"{key} {value}" for key, value in row["params"].items())
    reached = share_of_limit(row["value"], row["limit"], row["unit"]) if row["limit"] else None
    share = "" if reached is None else f"{reached:.0%} of {row['limit']:.4g}"
    peer = f"{row['peer']}: {row['peer_value']:.4g}" if row["peer_value"] else ""
    times = f"{row['value'] / row['peer_value']:.2f}" if row["peer_value"] else ""
    return f"| {row['name']} | {params} | {row['value']:.4g} {row['unit']} | {share} | {peer} | {times} |"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _slug(name: str) -> str:
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    return "-".join(word for word in words if word not in ("r", "tm", "cpu", "processor"))[:40]


def _versions() -> dict[str, str]:
    installed = {dist.metadata["Name"] for dist in importlib.metadata.distributions()}
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES if name in installed}
    return {"python": platform.python_version(), **packages}


def commit_of(checkout: Path | None = None) -> str:
    """Return the revision of this checkout, or of another, with `+` if tracked files differ from it.

    It is "unknown" outside of a git checkout, or without git.
    """
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() or "unknown"


def checkout(text: str) -> Path:
    """Return the whole path of another checkout, for argparse.

    A child that runs in a folder would look for a path from there, not find it, and measure this checkout's code.
    """
    folder = Path(text).resolve()
    if not (folder / "pyproject.toml").is_file():
        raise argparse.ArgumentTypeError(f"{folder} is no checkout of this project: `git worktree add {text} COMMIT`")
    return folder


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem
