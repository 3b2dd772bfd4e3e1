"""The cores that this process may use.

They are those that it may run on, or fewer if a control group limits its time on them.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from process.control_groups import control_groups


def usable_cores(root: Path = Path("/")) -> int:
    """Return as many as the time that each control group above this process gives it fills; at least one."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def limiting_group(root: Path = Path("/")) -> Path | None:
    """Return the innermost control group that limits the time of its processes, or None."""
    return next((folder for folder in control_groups("cpu", root) if _quota(folder) is not None), None)


def _quotas(root: Path) -> Iterator[int]:
    for folder in control_groups("cpu", root):
        if (quota := _quota(folder)) is not None:
            yield quota


def _quota(folder: Path) -> int | None:
    """Return how many cores' time a group gives, in whole cores, or None for any number."""
    # Version 2 has both in one file, "max" for no limit; version 1 has two, and -1.
    words = _read(folder / "cpu.max") or f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    quota_us, _, period_us = words.partition(" ")
    if not (quota_us.isdigit() and period_us.isdigit() and int(period_us)):
        return None
    return math.ceil(int(quota_us) / int(period_us))


def _read(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""
