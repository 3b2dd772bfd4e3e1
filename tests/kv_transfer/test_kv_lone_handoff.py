"""A lone handoff that decode fetches is waited for without sleep, as long as that disturbs nobody."""

import math
from types import SimpleNamespace
from typing import Any, cast

from contracts.handoff import Grant, Offer
from contracts.ids import BlockId, Epoch, Incarnation, RequestId, WorkerId
from kv_transfer.chunks.device_pool import RemotePool
from kv_transfer.connection.handshake_frames import PROTOCOL, Hello
from kv_transfer.links.incoming_link import IncomingLink
from kv_transfer.links.link import LinkParts
from kv_transfer.node import TransferNode
from kv_transfer.settings import TransferSettings
from tests.kv_transfer.kv_worker import LAYOUT, SECRET, make_pool

KEY = RequestId("r"), Epoch(1)


def never(*heard: object) -> None:
    raise AssertionError(f"somebody heard of {heard}")


def parts(**changes: Any) -> LinkParts:
    """A node's, in which nobody may hear of anything."""
    facts: dict[str, Any] = dict.fromkeys(("emit", "note", "wake", "is_busy", "on_proved", "on_lost"), never)
    facts |= {"settings": TransferSettings(secret=SECRET), "layout": LAYOUT, "pools": [SimpleNamespace(num_blocks=64)]}
    facts |= {"identity": None, "memory": "host", "plane_scales": (), "transports": None, "paths": object()}
    return LinkParts(**facts | changes)


def test_a_lone_handoff_is_waited_for_without_sleep_unless_the_owner_computes():
    hello = Hello(PROTOCOL, WorkerId("p"), Incarnation("1"), "prefill", b"")
    link = IncomingLink(parts(is_busy=lambda: is_busy), hello)
    link._pull_receiver = link._pull_receiver_of([cast(RemotePool, SimpleNamespace(num_pages=1))], checks=True)
    is_busy = False
    assert link._poll_timeout_s() == math.inf, "no handoff is under way"
    link.grants.offered(Offer(*KEY, 4, LAYOUT.layout_id))
    link.grants.grant(Grant(*KEY, [[BlockId(3)]], 0))
    assert link._poll_timeout_s() == 0.0
    is_busy = True
    assert link._poll_timeout_s() == math.inf


def test_an_owner_that_rests_is_not_busy_whatever_it_launched_a_moment_ago():
    settings = TransferSettings(secret=SECRET)
    node = TransferNode(settings, WorkerId("w"), Incarnation("1"), LAYOUT, make_pool(), lambda: None)
    node.chunks_launched(is_all=True)
    assert node._parts.is_busy()
    node.rested()
    assert not node._parts.is_busy()
    node.chunks_launched(is_all=True)
    assert node._parts.is_busy()
    node.close()
