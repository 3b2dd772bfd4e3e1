"""Once a process is ready, the garbage collector leaves alone what its start has made."""

import gc
from collections.abc import Iterator

import pytest

from process import garbage_collector as collector
from process.garbage_collector import GcMetrics, freeze_startup_objects

pytestmark = pytest.mark.slow


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcMetrics]:
    """Those of a process that has just settled; before, nothing is left alone."""
    found = GcMetrics()
    monkeypatch.setattr(collector, "COLLECTIONS", found)
    gc.unfreeze()
    freeze_startup_objects()
    yield found
    gc.callbacks.remove(found)


def test_what_was_there_is_not_looked_at_again(collections):
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < gc.get_freeze_count() / 10


def test_a_cycle_that_was_made_later_is_found(collections):
    cycle: list = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1


def test_each_look_is_counted_and_the_longest_kept(collections):
    num = collections.num
    gc.collect()
    gc.collect()
    assert collections.num >= num + 2
    assert 0 < collections.longest_s <= collections.seconds


def test_each_look_is_counted_once_by_who_settles_again(collections):
    freeze_startup_objects()
    num = collections.num
    gc.collect()
    assert collections.num == num + 1
