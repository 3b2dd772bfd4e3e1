"""The prompt that nobody asked for: the core's own loop hands it over, again and again, and keeps nothing of it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from engine.engine import Engine
from kv_transfer.node import TransferNode
from prefill_svc.core import make_roles
from prefill_svc.warm_path import EngineCoreRehearsal, keeper
from tests.kv_transfer.kv_worker import LAYOUT, make_pool
from worker.core import main as core_main
from worker.core.front_link import FrontLink
from worker.messages import Start
from worker.settings import WorkerSettings


def test_each_is_handed_over_and_forgotten():
    rehearsal = EngineCoreRehearsal(LAYOUT)
    assert [rehearsal.run() for _ in range(3)] == [1, 2, 3]
    core = rehearsal._core
    assert len(core._attempts) == 0 and core._attempts.num_stale == 0
    (role,) = core._roles
    assert role.is_idle() and role.counters()["handoffs_committed"] == 3
    assert core._attempts.take() == ({}, [])


def test_the_core_of_a_worker_keeps_warm(monkeypatch: pytest.MonkeyPatch):
    class Stopped(Exception):
        pass

    class StoppedCore:
        def __init__(self, *parts: object, keep_warm: Callable[[], None]) -> None:
            monkeypatch.setattr(EngineCoreRehearsal, "run", lambda self: ran.append(self))
            keep_warm()
            raise Stopped

    ran: list[EngineCoreRehearsal] = []
    monkeypatch.setattr(core_main, "EngineCore", StoppedCore)
    engine = SimpleNamespace(layout=LAYOUT, transfer_pool=make_pool(), close=lambda: None)
    settings = WorkerSettings.model_validate({"role": "prefill", "secret": "s"})
    link = cast(FrontLink, SimpleNamespace(wake=lambda: None))
    with pytest.raises(Stopped):
        core_main.serve(link, Start(b"", "w", "1"), settings, cast(Engine, engine), make_roles, keeper)
    assert len(ran) == 1


def test_it_goes_with_those_of_the_transfer(monkeypatch):
    ran, due = [], iter([True, False, True])
    monkeypatch.setattr(EngineCoreRehearsal, "run", lambda self: ran.append(self))
    keep_warm = keeper(cast(TransferNode, SimpleNamespace(keep_warm=lambda: next(due))), LAYOUT)
    for _ in range(3):
        keep_warm()
    assert len(ran) == 2 and ran[0] is ran[1]
