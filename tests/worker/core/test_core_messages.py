"""What front and core say to each other comes back as what it was."""

import msgspec
import pytest

from contracts.codec import decoder, encode, frame
from contracts.events import Failed
from contracts.ids import Epoch, GatewayId, RequestId
from contracts.layout import KVLayout
from contracts.node import NodeLoad
from contracts.request import Cancel
from tests.nodes import node_info, ways
from worker.messages import (
    CoreFailed,
    CoreFrame,
    CoreReady,
    CoreStatus,
    GatewayGone,
    KnownPeers,
    LinkStatus,
    Loading,
    Start,
    Stop,
    ToCore,
    ToFront,
    Work,
)

LAYOUT = KVLayout.uniform(model="m", num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32")
R, E, G = RequestId("r"), Epoch(1), GatewayId("g")
STATUS = CoreStatus(
    num_turns=9,
    num_steps=4,
    load=NodeLoad(num_running=1),
    counters={"steps": 4.0},
    gauges={"requests": 1.0},
    links=[LinkStatus("d", True, "ucx", "tcp/lo", "open", {"nbytes": 5.0})],
    is_clean=False,
)
INWARD = [
    Start(b"{}", "w", "i"),
    Work([Cancel(R, E, "why")], 1.0),
    GatewayGone(G),
    KnownPeers([node_info().ref]),
    Stop(),
]
OUTWARD = [
    Loading("weights", 3, 10),
    CoreFailed("no such model"),
    CoreReady("m", LAYOUT, "h:1", 100, 1000, "float32", ways(LAYOUT.layout_id)),
    CoreFrame({G: [Failed(R, E, "internal", "words")]}, [(R, E, "QUEUED")], STATUS),
    CoreFrame({}, [], None),
]


@pytest.mark.parametrize("message", INWARD, ids=lambda m: type(m).__name__)
def test_to_the_core(message):
    assert decoder(ToCore).decode(encode(message)) == message


@pytest.mark.parametrize("message", OUTWARD, ids=lambda m: type(m).__name__)
def test_to_the_front(message):
    assert decoder(ToFront).decode(encode(message)) == message


@pytest.mark.parametrize("message", OUTWARD, ids=lambda m: type(m).__name__)
def test_a_message_that_goes_the_wrong_way_is_refused(message):
    with pytest.raises(msgspec.ValidationError):
        decoder(ToCore).decode(encode(message))


def test_a_step_without_news_is_small():
    assert len(frame(CoreFrame({}, [], None))) < 64
