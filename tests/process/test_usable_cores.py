"""The cores that control groups of both versions leave, in a made-up /proc and /sys, and on this machine."""

import os
from pathlib import Path

import pytest

from process.usable_cores import limiting_group, usable_cores

CORES = 8


def v1(quota_us: int, period_us: int) -> dict[str, str]:
    return {"cpu/cpu.cfs_quota_us": str(quota_us), "cpu/cpu.cfs_period_us": str(period_us)}


CASES = {
    "no control groups": ("", {}, CORES, None),
    "v2, no limit": ("0::/user", {"user/cpu.max": "max 100000"}, CORES, None),
    "v2, a container": ("0::/", {"cpu.max": "200000 100000"}, 2, ""),
    "v2, a part of a core counts as one": ("0::/", {"cpu.max": "150000 100000"}, 2, ""),
    "v2, less than a core": ("0::/", {"cpu.max": "10000 100000"}, 1, ""),
    "v2, more than there are": ("0::/", {"cpu.max": "6400000 100000"}, CORES, ""),
    "v2, the group above is tighter": ("0::/a/b", {"a/b/cpu.max": "400000 100", "a/cpu.max": "300 100"}, 3, "a/b"),
    "v1, a container": ("4:cpu,cpuacct:/x", v1(50000, 25000), 2, "cpu"),
    "v1, no limit": ("4:cpu,cpuacct:/\n0::/", v1(-1, 100000), CORES, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_groups_leave(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))
    entries, files, cores, group = CASES[case]
    for name, words in {f"sys/fs/cgroup/{name}": words for name, words in files.items()}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{words}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{entries}\n" if entries else "")
    assert usable_cores(tmp_path) == cores
    assert limiting_group(tmp_path) == (None if group is None else tmp_path / "sys/fs/cgroup" / group)


def test_on_this_machine_they_are_no_more_than_those_it_may_run_on() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
