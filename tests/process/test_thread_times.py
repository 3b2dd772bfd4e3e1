"""How much of a time a process could use, as the kernel counts it."""

import os
import subprocess
import sys
import time

from process.thread_times import ThreadTimes, look_at_threads, usable_s
from tests.waiting import until

BUSY = [sys.executable, "-c", "while True: pass"]


def test_who_shares_a_cpu_could_use_a_part_and_who_sleeps_all_of_it() -> None:
    cpu = max(os.sched_getaffinity(0))
    busy, asleep = [subprocess.Popen(BUSY) for _ in range(3)], subprocess.Popen(["sleep", "600"])
    try:
        for process in busy:
            os.sched_setaffinity(process.pid, {cpu})
        until(lambda: is_asleep(asleep.pid) and all(look_at_threads(process.pid).is_runnable for process in busy))
        pids, began_s = [process.pid for process in (*busy, asleep)], time.monotonic()
        before = [look_at_threads(pid) for pid in pids]
        until(lambda: time.monotonic() > began_s + 2.0)
        span_s = time.monotonic() - began_s
        *shares, whole = [usable_s(old, look_at_threads(pid), span_s) for pid, old in zip(pids, before, strict=True)]
        assert whole == span_s
        assert 0 < sum(shares) < 1.25 * (time.monotonic() - began_s)  # all three together have had one CPU at most
    finally:
        for process in (*busy, asleep):
            process.kill()
            process.wait()
    assert look_at_threads(asleep.pid) == ThreadTimes({}, False)


def is_asleep(pid: int) -> bool:
    look = look_at_threads(pid)
    return bool(look.cpu_s) and not look.is_runnable


def test_the_thread_that_got_most_counts_and_a_new_one_from_its_beginning() -> None:
    before = ThreadTimes({1: 5.0, 2: 1.0}, True)
    assert usable_s(before, ThreadTimes({1: 5.1, 2: 1.5}, True), 2.0) == 0.5
    assert usable_s(before, ThreadTimes({1: 5.0, 3: 0.25}, True), 2.0) == 0.25
    assert usable_s(before, ThreadTimes({1: 9.0, 2: 1.0}, True), 2.0) == 2.0
    assert usable_s(before, ThreadTimes({1: 5.0, 2: 1.0}, False), 2.0) == 2.0


def test_a_name_may_hold_anything(tmp_path) -> None:
    folder = tmp_path / "7" / "task" / "8"
    folder.mkdir(parents=True)
    (tmp_path / "7" / "task" / "9").mkdir()  # ended since it was listed
    (folder / "stat").write_text(f"8 (a) R (b) S {' '.join(['0'] * 10)} 150 50 0 0")
    assert look_at_threads(7, tmp_path) == ThreadTimes({8: 200 / os.sysconf("SC_CLK_TCK")}, False)
