"""The handoff that a node makes to itself to stay warm: it comes to its end each time, and nobody hears of it."""

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from contracts.handoff import Grant, Offer
from contracts.ids import BlockId, Epoch, Incarnation, RequestId, WorkerId
from contracts.layout import KVLayout
from kv_transfer import warm_path as rehearsal
from kv_transfer.connection.frames import PROTOCOL, Hello
from kv_transfer.links.incoming_link import IncomingLink
from kv_transfer.links.link import LinkParts
from kv_transfer.node import TransferNode
from kv_transfer.settings import TransferSettings
from kv_transfer.warm_path import REHEARSAL_S, Rehearsal
from tests.kv_transfer.kv_worker import LAYOUT, SECRET, make_pool

KEY = RequestId("r"), Epoch(1)
SHARDED = msgspec.structs.replace(LAYOUT, tp_size=2)


def never(*heard: object) -> None:
    raise AssertionError(f"somebody heard of {heard}")


def parts(layout: KVLayout = LAYOUT, **changes: Any) -> LinkParts:
    """A node's, in which nobody may hear of anything."""
    facts: dict[str, Any] = dict.fromkeys(
        ("emit", "note", "wake", "is_busy", "keep_warm", "on_proved", "on_lost"), never
    )
    facts |= {"settings": TransferSettings(secret=SECRET), "layout": layout, "pools": [SimpleNamespace(num_blocks=64)]}
    facts |= {"identity": None, "memory": "host", "plane_scales": (), "transports": None, "paths": object()}  # type: ignore[arg-type]
    return LinkParts(**facts | changes)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`now`: what the rehearsals' clock says."""
    made = SimpleNamespace(now=100.0)
    made.perf_counter = made.monotonic = lambda: made.now
    monkeypatch.setattr(rehearsal, "time", made)
    return made


@pytest.mark.parametrize("layout", [LAYOUT, SHARDED])
def test_each_comes_to_commit_and_leaves_nothing(layout: KVLayout):
    rehearsed = Rehearsal(parts(layout))
    for _ in range(3):
        rehearsed.run()
    prefill, decode, key = rehearsed._prefill, rehearsed._decode, rehearsal._KEY
    assert prefill._pull_sender is not None and decode._pull_receiver is not None
    assert (prefill._pull_sender.num_chunks, decode._pull_receiver.num_chunks, decode._pull_receiver.num_bad) == (
        3,
        3,
        0,
    )
    assert not prefill.knows(key) and not decode.knows(key) and not decode.grants.is_committed(key)
    assert prefill._pull_sender.end(key), "decode reads nothing of it"
    assert decode._pull_receiver.tend() == math.inf, "no copy waits"


def test_it_goes_the_way_of_what_is_announced_marked_and_read_ahead(monkeypatch: pytest.MonkeyPatch):
    heard: list[str] = []
    for kind, name in ((rehearsal._NoSemaphore, "set"), (rehearsal._NoPool, "wait"), (rehearsal._NoPool, "pull")):
        do = getattr(kind, name)
        noted = lambda self, *args, do=do, name=name: (heard.append(name), do(self, *args))[1]  # noqa: E731
        monkeypatch.setattr(kind, name, noted)
    rehearsed = Rehearsal(parts())
    puller = rehearsed._decode._pull_receiver
    assert puller is not None
    put = puller.put
    monkeypatch.setattr(puller, "put", lambda pull: (heard.append("put"), put(pull)))
    rehearsed.run()
    assert heard == ["set", "set", "wait", "put"]


def test_the_first_that_goes_wrong_is_the_last_and_nobodys_loss(clock, monkeypatch: pytest.MonkeyPatch, caplog):
    rehearsed = Rehearsal(parts())
    monkeypatch.setattr(rehearsed._decode.grants, "finished", lambda fin: None)
    assert not rehearsed.keep_warm()
    assert "did not commit" in caplog.text
    clock.now += 3600.0
    caplog.clear()
    assert not rehearsed.keep_warm() and not caplog.text


def test_it_is_due_once_a_while_and_one_thread_is_enough(clock):
    rehearsed = Rehearsal(parts())
    assert rehearsed.keep_warm() and not rehearsed.keep_warm()
    clock.now += 2 * REHEARSAL_S
    with rehearsed._lock:
        assert not rehearsed.keep_warm(), "another thread is at it"
    assert rehearsed.keep_warm()
    puller = rehearsed._decode._pull_receiver
    assert puller is not None and puller.num_chunks == 2


def test_a_node_that_rehearses_shows_nothing_of_it():
    settings = TransferSettings(secret=SECRET)
    node = TransferNode(settings, WorkerId("w"), Incarnation("1"), LAYOUT, make_pool(), never)
    assert node.keep_warm() and not node.poll() and not node.stats()
    assert (node.transfer_rate, node.bad_paths) == (0.0, ())
    node.close()


def test_who_waits_for_a_lone_handoff_without_sleep_rehearses_unless_the_owner_computes():
    warmed: list[None] = []
    link = IncomingLink(
        parts(keep_warm=lambda: warmed.append(None), is_busy=lambda: is_busy),
        Hello(PROTOCOL, WorkerId("p"), Incarnation("1"), "prefill", b""),
    )
    link._pull_receiver = link._pull_receiver_of([rehearsal._NoPool(LAYOUT.only_group.num_planes)], checks=True)
    is_busy = False
    assert link._poll_timeout_s() == math.inf and not warmed, "no handoff is under way"
    link.grants.offered(Offer(*KEY, 4, LAYOUT.layout_id))
    link.grants.grant(Grant(*KEY, [[BlockId(3)]], 0))
    assert link._poll_timeout_s() == 0.0 and len(warmed) == 1
    is_busy = True
    assert link._poll_timeout_s() == math.inf and len(warmed) == 1


def test_an_owner_that_rests_is_not_busy_whatever_it_launched_a_moment_ago():
    node = TransferNode(
        TransferSettings(secret=SECRET), WorkerId("w"), Incarnation("1"), LAYOUT, make_pool(), lambda: None
    )
    node.chunks_launched(is_all=True)
    assert node._parts.is_busy()
    node.rested()
    assert not node._parts.is_busy()
    node.chunks_launched(is_all=True)
    assert node._parts.is_busy()
    node.close()
