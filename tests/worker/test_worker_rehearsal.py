"""The prompt that nobody asked for: the core's own loop hands it over, again and again, and keeps nothing of it."""

from types import SimpleNamespace
from typing import cast

from contracts.layout import KVLayout
from kv_transfer.node import TransferNode
from worker.rehearsal import Rehearsal, keeper

LAYOUT = KVLayout(model="tiny", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


def test_each_is_handed_over_and_forgotten():
    rehearsal = Rehearsal(LAYOUT)
    assert [rehearsal.run() for _ in range(3)] == [1, 2, 3]
    core = rehearsal._core
    assert len(core._ledger) == 0 and core._ledger.num_stale == 0
    (role,) = core._roles
    assert role.is_idle() and role.counters()["handoffs_committed"] == 3
    assert core._ledger.take() == ({}, [])


def test_it_goes_with_those_of_the_transfer(monkeypatch):
    ran, due = [], iter([True, False, True])
    monkeypatch.setattr(Rehearsal, "run", lambda self: ran.append(self))
    keep_warm = keeper(cast(TransferNode, SimpleNamespace(keep_warm=lambda: next(due))), LAYOUT)
    for _ in range(3):
        keep_warm()
    assert len(ran) == 2 and ran[0] is ran[1]
