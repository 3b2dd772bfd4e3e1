"""What a worker says of its ways before it meets anybody: it says what the handshake would."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import ConfigError
from contracts.layout import KVGroup, KVLayout
from contracts.node import NodeInfo, TransferCapabilities
from kv_transfer.connection import layout_negotiation as conversion
from kv_transfer.connection.handshake_frames import Terms
from kv_transfer.connection.transport_choice import candidates, capabilities_of
from tests.nodes import node_info

LAYOUT = KVLayout.uniform(model="m", num_layers=2, num_kv_heads=4, head_dim=8, block_size=4, dtype="float32")
NARROW = LAYOUT.with_groups(dtype="float8_e4m3fn", scales="layer-x")
WIDE = LAYOUT.with_groups(dtype="bfloat16")
LAYOUTS = [msgspec.structs.replace(layout, tp_size=size) for layout in (LAYOUT, WIDE, NARROW) for size in (1, 2, 4)]
NAMES = ["nvlink", "shm", "ucx", "tcp"]


def terms(
    layout: KVLayout = LAYOUT,
    transport: str = "auto",
    available: str = "nvlink ucx shm tcp",
    memory: str = "cuda",
    scale: float = 0.5,
    boot_id: str = "a",
) -> Terms:
    scales = [scale] * layout.only_group.num_planes
    return Terms(layout, 64, transport, available.split(), boot_id, True, memory, scales)


HEAD = KVGroup(kind="draft", layers=(0,), num_kv_heads=1, head_dim=8, block_size=4, dtype="float32", weights="a head")


def with_heads(layout: KVLayout, *weights: str) -> KVLayout:
    """Return the layout with a draft head of each of these weights."""
    heads = [msgspec.structs.replace(HEAD, weights=each) for each in weights]
    return msgspec.structs.replace(layout, groups=(*layout.groups, *heads))


@pytest.mark.parametrize(
    ("sender", "receiver", "pairs", "why"),
    [
        (LAYOUT, LAYOUT, [(0, 0)], ""),
        (with_heads(LAYOUT, "a"), with_heads(LAYOUT, "a"), [(0, 0), (1, 1)], ""),
        (with_heads(LAYOUT, "a", "b"), with_heads(LAYOUT, "b"), [(0, 0), (2, 1)], "groups is"),
        (with_heads(LAYOUT, "a"), with_heads(LAYOUT, "b"), [(0, 0)], "groups[1].weights is a here, b there"),
        (with_heads(LAYOUT, "a"), LAYOUT, [(0, 0)], "groups is ['full', 'draft'] here, ['full'] there"),
        (
            with_heads(msgspec.structs.replace(LAYOUT, tp_size=2), "a"),
            with_heads(LAYOUT, "a"),
            [(0, 0)],
            "tp_size is 2 here, 1 there",
        ),
        (with_heads(WIDE, "a"), with_heads(NARROW, "a"), [(0, 0)], "groups[0].dtype is bfloat16 here"),
    ],
)
def test_a_head_moves_where_both_ends_have_it_as_it_is(
    sender: KVLayout, receiver: KVLayout, pairs: list[tuple[int, int]], why: str
) -> None:
    assert conversion.shared_groups(sender, receiver) == pairs
    found = conversion.why_left_out(sender, receiver)
    assert found.startswith(why) and bool(found) == bool(why)


def test_a_worker_states_what_it_takes_without_its_head() -> None:
    stated = msgspec.structs.replace(terms(memory="host"), layout=with_heads(LAYOUT, "a"))
    assert capabilities_of(stated) == capabilities_of(terms(memory="host"))


def node(terms: Terms) -> NodeInfo:
    return node_info(layout_id=terms.layout.layout_id, ways=capabilities_of(terms))


def handshake_finds(sender: Terms, receiver: Terms) -> list[str]:
    """Which transports it would try, in words of its own."""
    if sender.memory != receiver.memory or not conversion.is_possible(sender, receiver):
        return []
    try:
        return candidates(sender, receiver)
    except ConfigError:
        return []


ends = st.builds(
    terms,
    layout=st.sampled_from(LAYOUTS),
    transport=st.sampled_from(["auto", "auto", *NAMES]),
    available=st.lists(st.sampled_from(NAMES), unique=True).map(" ".join),
    memory=st.sampled_from(["cuda", "cuda", "host"]),
    scale=st.sampled_from([0.5, float("nan")]),
)


@given(ends, ends)
def test_on_one_host_two_are_a_pair_just_if_their_handshake_finds_a_transport(sender: Terms, receiver: Terms) -> None:
    assert node(receiver).can_receive_from(node(sender)) == bool(handshake_finds(sender, receiver))


@given(ends, ends)
def test_on_two_hosts_those_that_do_not_leave_one_do_not_count(sender: Terms, receiver: Terms) -> None:
    far = msgspec.structs.replace(receiver, boot_id="b")
    left = set(handshake_finds(sender, far)) - {"nvlink", "shm"}
    assert node(far).can_receive_from(node(sender)) == bool(left)


def test_ways_are_said_best_first_and_with_the_host_where_they_stay_on_it() -> None:
    assert capabilities_of(terms(memory="host", available="tcp ucx shm")) == TransferCapabilities(
        memory="host", sends=["shm@a", "ucx", "tcp"], takes={LAYOUT.layout_id: ["shm@a", "ucx", "tcp"]}
    )
    assert capabilities_of(terms(available="tcp ucx shm nvlink")).sends == ["nvlink@a", "ucx", "shm@a", "tcp"]
    assert capabilities_of(terms(transport="tcp")).sends == ["tcp"]
    assert capabilities_of(terms(transport="ucx", available="tcp")).sends == []


def test_a_layout_that_the_setting_keeps_out_is_said_with_no_way() -> None:
    takes = capabilities_of(terms(NARROW)).takes
    assert (takes[NARROW.layout_id], takes[WIDE.layout_id]) == (["nvlink@a", "ucx", "shm@a", "tcp"], ["ucx"])
    takes = capabilities_of(terms(NARROW, "nvlink")).takes
    assert (takes[NARROW.layout_id], takes[WIDE.layout_id]) == (["nvlink@a"], [])
    assert WIDE.layout_id not in capabilities_of(terms(NARROW, available="nvlink tcp")).takes
