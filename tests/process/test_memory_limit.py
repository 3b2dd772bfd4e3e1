"""Memory under control groups of both versions, in a made-up /proc and /sys, and on this machine."""

from pathlib import Path

import psutil
import pytest

from process.memory_limit import available_nbytes, limit_nbytes

MIB = 1 << 20
V1_UNLIMITED = str(0x7FFFFFFFFFFFF000)


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """One with 8 GiB available."""
    everything = files | {
        "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
        "proc/self/cgroup": cgroup,
    }
    for name, words in everything.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{words}\n" if words else "")
    return root


def v2(path: str, limit: str, used: int = 0, inactive: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup/{path}"
    stat = f"anon 1\ninactive_file {inactive}"
    return {f"{folder}memory.max": limit, f"{folder}memory.current": str(used), f"{folder}memory.stat": stat}


def v1(path: str, limit: str, used: int = 0, inactive: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory/{path}"
    stat = f"inactive_file 7\ntotal_inactive_file {inactive}"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    return dict(zip((f"{folder}{name}" for name in names), (limit, str(used), stat), strict=True))


GIB8 = 8 << 30
CASES = {
    "no control groups": ("", {}, GIB8, None),
    "v2, a container": ("0::/", v2("", str(1024 * MIB), 300 * MIB, 100 * MIB), 824 * MIB, 1024 * MIB),
    "v2, no limit": ("0::/user", v2("user/", "max"), GIB8, None),
    "v2, the group above is tighter": (
        "0::/a/b",
        v2("a/b/", str(4096 * MIB)) | v2("a/", str(512 * MIB), 12 * MIB),
        500 * MIB,
        512 * MIB,
    ),
    "v2, the limit is beyond what is free": ("0::/", v2("", str(64 << 30)), GIB8, 64 << 30),
    "v2, more in use than allowed": ("0::/", v2("", str(100 * MIB), 120 * MIB), 0, 100 * MIB),
    "v1, a container": ("5:memory:/docker/x", v1("", str(2048 * MIB), 48 * MIB), 2000 * MIB, 2048 * MIB),
    "v1, a group": ("9:cpu,memory:/s", v1("s/", str(256 * MIB), 56 * MIB, 6 * MIB), 206 * MIB, 256 * MIB),
    "v1, no limit": ("5:memory:/\n0::/", v1("", V1_UNLIMITED), GIB8, None),
    "both versions, memory in the first": (
        "5:memory:/s\n0::/s",
        v1("s/", str(64 * MIB)) | v2("s/", str(1 * MIB)),
        64 * MIB,
        64 * MIB,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_left(tmp_path: Path, case: str):
    cgroup, files, left, limit = CASES[case]
    root = machine(tmp_path, cgroup, files)
    assert available_nbytes(root) == left
    assert limit_nbytes(root) == limit


def test_on_this_machine_it_is_no_more_than_there_is():
    assert 0 <= available_nbytes() <= psutil.virtual_memory().total
