"""What a core of the handoff's bench leaves of each request: the points between which its milliseconds are counted."""

import json
from pathlib import Path

from bench.handoff.core import StampedCore, Stamps
from contracts.ids import RequestId
from engine.messages import Started
from tests.path.ring import D, P, Ring, answer

R = RequestId("r")


def told(stamps: Stamps, folder: Path) -> list[tuple[str, str]]:
    stamps.write(str(folder / "stamps"))
    rows = json.loads((folder / "stamps").read_text())
    assert [at for *_, at in rows] == sorted(at for *_, at in rows)
    return [(what, request_id) for what, request_id, _ in rows]


def test_a_handoffs_account_names_each_point_once(tmp_path: Path):
    ring, stamps = Ring(), {P: Stamps(), D: Stamps()}
    for name, side in ring.sides.items():
        parts = name, side.engine, side.node, side.roles, side.ledger, side.link
        side.core = StampedCore(stamps[name], *parts, lambda: ring.clock.now)
    ring.both(ring.job(R, list(range(20)), 4))
    ring.settle()
    assert ring.tokens(R) == answer(list(range(20)), 4)
    by_side = {name: told(stamps[name], tmp_path) for name in (P, D)}
    assert by_side[P] == [("started", R), *[("computed", R)] * 3, ("sent", R)]
    assert by_side[D] == [("started", R), ("stepped", R)]


def test_the_first_step_is_launched_once_and_when_all_of_it_is(tmp_path: Path):
    side, stamps = Ring().sides[D], Stamps()
    core = StampedCore(stamps, D, side.engine, side.node, side.roles, side.ledger, side.link)
    core.started(Started(RequestId("r.1"), 0))
    core.chunks_launched(is_all=False)
    assert told(stamps, tmp_path) == [("started", "r")]
    core.chunks_launched(is_all=True)
    core.chunks_launched(is_all=True)
    assert told(stamps, tmp_path) == [("started", "r"), ("launched", "r")]
