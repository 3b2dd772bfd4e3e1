"""The CPU time of a process's threads between two observations.

On a busy host threads that could run may get no CPU.
"""

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ThreadTimes:
    """One observation of a process's threads.

    `cpu_s` is what each has used since it began; `is_runnable` says that one runs, or waits for a CPU.
    """

    cpu_s: dict[int, float]
    is_runnable: bool


def look_at_threads(pid: int, proc: Path = Path("/proc")) -> ThreadTimes:
    """Return the look at a process of this number; one without threads if it has ended.

    Source: state, utime and stime of /proc/PID/task/TID/stat, proc(5).
    """
    cpu_s, states = {}, set()
    for task in _tasks(proc / str(pid) / "task"):
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the thread has just ended
            continue
        states.add(fields[0])
        cpu_s[int(task.name)] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return ThreadTimes(cpu_s, "R" in states)


def usable_s(before: ThreadTimes, after: ThreadTimes, span_s: float) -> float:
    """Return how much of the `span_s` seconds between two looks the process could use.

    All of it, if nothing was left to run: it waits for something else than a CPU. Else as much as its busiest thread
    got; the others may have waited for that one.
    """
    if not after.is_runnable:
        return span_s
    return min(span_s, max(used_s - before.cpu_s.get(thread, 0.0) for thread, used_s in after.cpu_s.items()))


def _tasks(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
