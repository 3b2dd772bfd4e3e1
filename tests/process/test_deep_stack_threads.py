"""Threads with a deep stack: all there from the start, or none."""

import gc
import threading

import pytest

from process.deep_stack_threads import STACK_NBYTES, DeepThreads
from tests.waiting import until

NAME = "deep-test"


def num_alive() -> int:
    return sum(thread.name.startswith(NAME) for thread in threading.enumerate())


def lack_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def lacking(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", lacking)


def test_work_is_done_though_no_thread_is_left_when_it_comes(monkeypatch):
    lack_a_third(monkeypatch)
    with DeepThreads(2, NAME) as threads:
        assert num_alive() == 2
        both = threading.Barrier(2)
        turns = [threads.submit(both.wait, 30) for _ in range(2)]
        assert sorted(turn.result(30) for turn in turns) == [0, 1]
    assert num_alive() == 0


def test_if_they_can_not_all_be_started_none_stays(monkeypatch):
    usual_nbytes = threading.stack_size()
    lack_a_third(monkeypatch)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        DeepThreads(3, NAME)
    assert threading.stack_size() == usual_nbytes != STACK_NBYTES
    gc.collect()
    until(lambda: num_alive() == 0)
