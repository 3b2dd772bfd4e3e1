"""The memory that this process may still take.

It is what the machine has free, or less if a control group limits it.
"""

from pathlib import Path

from process.control_groups import control_groups

UNLIMITED = 1 << 60  # version 1 writes a number of this order where nothing is limited


def available_nbytes(root: Path = Path("/")) -> int:
    """Return the least of what the machine and each control group above this process have left."""
    return min([_machine_nbytes(root), *_left_in_groups(root)])


def limit_nbytes(root: Path = Path("/")) -> int | None:
    """Return the smallest limit of a control group above this process, or None."""
    limits = [limit for folder in control_groups("memory", root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _machine_nbytes(root: Path) -> int:
    """Return MemAvailable of /proc/meminfo, which is in KiB there."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _left_in_groups(root: Path) -> list[int]:
    groups = [(folder, limit) for folder in control_groups("memory", root) if (limit := _limit(folder)) is not None]
    return [max(0, limit - _used(folder)) for folder, limit in groups]


def _limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        words = _read(folder / name)
        if words.isdigit() and int(words) < UNLIMITED:
            return int(words)
    return None


def _used(folder: Path) -> int:
    """Return what is used without the page cache that the kernel would give back."""
    used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes") or "0"
    rows = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    return int(used) - int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))


def _read(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""
