"""What a worker tells placement about its transfers, from handoffs that finished."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.handoff import Abort, Commit, Fin, Grant, Offer
from contracts.ids import BlockId, Epoch, RequestId
from kv_transfer.events import ChunkLanded, Drained, MessageReceived
from kv_transfer.links.handoff_rate import HandoffRate, Key
from tests.kv_transfer.kv_pair import Peer, fin, offer_and_grant, send

KEY = RequestId("r"), Epoch(1)


def _finish(rate: HandoffRate, nbytes: int, seconds: float, key: Key = KEY) -> None:
    rate.begin(key)
    rate.sent(key, nbytes, 10.0, 10.0 + seconds / 2)
    rate.committed(key, 10.0 + seconds)


def test_nothing_is_known_before_a_handoff_has_finished() -> None:
    rate = HandoffRate()
    assert rate.nbytes_per_s == 0.0
    rate.begin(KEY)
    rate.sent(KEY, 1000, 1.0, 2.0)
    assert rate.nbytes_per_s == 0.0
    rate.dropped(KEY)
    rate.committed(KEY, 3.0)
    assert rate.nbytes_per_s == 0.0


def test_waiting_for_the_next_chunk_to_be_computed_is_not_the_transfers() -> None:
    rate = HandoffRate()
    rate.begin(KEY)
    rate.sent(KEY, 600, 0.0, 1.0)
    rate.sent(KEY, 600, 100.0, 101.0)
    rate.committed(KEY, 102.0)
    assert rate.nbytes_per_s == pytest.approx(1200 / 3)


def test_large_handoffs_weigh_more_and_old_ones_fade() -> None:
    rate = HandoffRate()
    _finish(rate, 10_000, 1.0)
    _finish(rate, 10, 1.0)
    assert rate.nbytes_per_s == pytest.approx((0.9 * 10_000 + 10) / 1.9)
    for _ in range(100):
        _finish(rate, 500, 1.0)
    assert rate.nbytes_per_s == pytest.approx(500, rel=0.01)


def test_what_each_handoff_takes_however_small_is_no_rate() -> None:
    """A link of 1 GB/s whose Commit is back after 2 ms: by bytes over seconds 30 blocks would make it 25 MB/s."""
    rate = HandoffRate()
    for nbytes in (50_000, 50_000, 2_000_000, *[50_000] * 27):
        _finish(rate, nbytes, 0.002 + nbytes / 1e9)
    assert rate.nbytes_per_s == pytest.approx(1e9)
    for nbytes in (50_000, 2_000_000) * 40:  # then it is slower
        _finish(rate, nbytes, 0.002 + nbytes / 1e8)
    assert rate.nbytes_per_s == pytest.approx(1e8, rel=0.01)


@given(st.integers(0, 1 << 30), st.floats(1e8, 1e11), st.floats(0.0, 0.1))
def test_noise_of_the_latency_makes_no_link_much_faster_or_slower_than_it_is(seed: int, true: float, noise: float):
    """The inverse of a slope of noise is any number: handoffs of 1 and 4 MiB take 5 ms beside."""
    rate, rng, nbytes, seconds = HandoffRate(), random.Random(seed), 0.0, 0.0
    for _ in range(40):
        size = rng.choice((1 << 20, 4 << 20))
        span_s = rng.uniform(1 - noise, 1 + noise) * 0.005 + size / true
        _finish(rate, size, span_s)
        nbytes, seconds = 0.9 * nbytes + size, 0.9 * seconds + span_s
        assert nbytes / seconds * (1 - 1e-9) <= rate.nbytes_per_s <= 3 * true


@pytest.mark.parametrize(
    "handoffs",
    [
        [(1000, 1.0), (1100, 5.0), (900, 1.0)],  # of nearly one size
        [(1000, 2.0), (9000, 1.0)],  # the larger took less
        [(1000, 0.1), (9000, 9.0)],  # none would have taken less than no time
    ],
    ids=["one size", "falling", "below zero"],
)
def test_where_latency_and_rate_are_not_told_apart_bytes_over_seconds_count(handoffs: list[tuple[int, float]]) -> None:
    rate, nbytes, seconds = HandoffRate(), 0.0, 0.0
    for each in handoffs:
        _finish(rate, *each)
        nbytes, seconds = 0.9 * nbytes + each[0], 0.9 * seconds + each[1]
    assert rate.nbytes_per_s == pytest.approx(nbytes / seconds)


def test_an_offer_states_the_rate_of_former_handoffs_unless_decode_fetches(
    make_peer: Callable[..., Peer], transport: str
) -> None:
    prefill, decode = make_peer("prefill", transport=transport), make_peer("decode", transport=transport)
    stated = list[float]()
    for name in ("a", "b"):
        prefill.node.offer(decode.ref, Offer(RequestId(name), Epoch(1), 8, prefill.layout.layout_id))
        stated.append(decode.message(Offer, name).nbytes_per_s)
        decode.node.grant(prefill.name, Grant(RequestId(name), Epoch(1), [[BlockId(3), BlockId(4)]], 0))
        prefill.message(Grant, name)
        send(prefill, decode, name, 0, 0, 8, [1, 2])
        prefill.node.finish(decode.name, fin(name, 1))
        decode.wait(ChunkLanded)
        decode.message(Fin, name)
        decode.node.commit(prefill.name, Commit(RequestId(name), Epoch(1), 1, 0))
        prefill.message(Commit, name)
    assert stated[0] == 0.0
    assert (stated[1] == 0.0) == (transport == "nvlink")


def test_handoffs_beside_each_other_are_told_apart() -> None:
    rate, other = HandoffRate(), (RequestId("s"), Epoch(1))
    rate.begin(KEY)
    rate.begin(other)
    rate.sent(other, 1 << 40, 0.0, 1.0)
    rate.sent(KEY, 100, 1.0, 2.0)
    rate.committed(KEY, 2.0)
    assert rate.nbytes_per_s == pytest.approx(100)


def test_what_is_sent_after_the_end_leaves_nothing_behind() -> None:
    rate = HandoffRate()
    _finish(rate, 100, 1.0)
    rate.sent(KEY, 1 << 40, 0.0, 1.0)
    rate.committed(KEY, 5.0)
    assert rate.nbytes_per_s == pytest.approx(100) and not rate._open


def test_of_chunks_that_decode_fetches_the_last_one_is_timed() -> None:
    rate = HandoffRate()
    rate.begin(KEY)
    rate.reported(KEY, 1 << 40, 0.0)
    rate.reported(KEY, 100, 100.0)
    rate.committed(KEY, 102.0)
    assert rate.nbytes_per_s == pytest.approx(50)


def test_what_is_told_after_the_end_leaves_nothing_behind() -> None:
    rate = HandoffRate()
    rate.begin(KEY)
    rate.dropped(KEY)
    rate.reported(KEY, 100, 1.0)
    assert not rate._open


def test_a_node_tells_the_rate_of_its_handoffs_peer_by_peer(make_peer: Callable[..., Peer], transport: str) -> None:
    prefill, *decodes = (make_peer(name, transport=transport) for name in ("prefill", "decode-1", "decode-2"))
    assert prefill.node.transfer_rate == 0.0
    for decode in decodes:
        offer_and_grant(prefill, decode, decode.name, 8, [1, 2])
        send(prefill, decode, decode.name, 0, 0, 8, [3, 4])
        prefill.node.finish(decode.name, fin(decode.name, 1))
        header = decode.wait(ChunkLanded).header
        decode.message(Fin, decode.name)
        decode.node.commit(prefill.name, Commit(header.request_id, header.epoch, 1, header.nbytes))
        prefill.message(Commit, decode.name)
    rates = [link.nbytes_per_s for link in prefill.node.stats()]
    assert len(rates) == 2 and all(rate > 0 for rate in rates)
    assert prefill.node.transfer_rate == pytest.approx(sum(rates) / 2)
    assert all(decode.node.transfer_rate == 0.0 for decode in decodes)


def test_an_aborted_handoff_says_nothing_about_speed(make_peer: Callable[..., Peer], transport: str) -> None:
    prefill, decode = make_peer("prefill", transport=transport), make_peer("decode-1", transport=transport)
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    send(prefill, decode, "r", 0, 0, 8, [3, 4])
    decode.wait(ChunkLanded)
    prefill.node.abort(decode.name, Abort(*KEY, "cancelled", "a test says so"))
    prefill.wait(Drained)
    assert prefill.node.transfer_rate == 0.0


def test_an_offer_that_was_lowered_says_nothing_about_speed(make_peer: Callable[..., Peer], transport: str) -> None:
    """Its last chunk had come long before: what was waited for is what tiers of the offering worker did not give."""
    prefill, decode = make_peer("prefill", transport=transport), make_peer("decode-1", transport=transport)
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    send(prefill, decode, "r", 0, 0, 4, [3])
    decode.wait(ChunkLanded)
    prefill.node.lower_offer(decode.name, Offer(*KEY, 4, prefill.layout.layout_id))
    assert decode.message(Offer, "r").num_tokens == 4
    assert decode.node.commit(prefill.name, Commit(*KEY, 1, 0))
    prefill.message(Commit, "r")
    assert prefill.node.transfer_rate == 0.0


def test_an_offer_that_is_over_is_not_lowered(make_peer: Callable[..., Peer], transport: str) -> None:
    prefill, decode = make_peer("prefill", transport=transport), make_peer("decode-1", transport=transport)
    offer_and_grant(prefill, decode, "r", 8, [1, 2])
    decode.node.abort(prefill.name, Abort(*KEY, "cancelled", "a test says so"))
    prefill.wait(Drained)
    prefill.node.lower_offer(decode.name, Offer(*KEY, 4, prefill.layout.layout_id))
    offer_and_grant(prefill, decode, "s", 8, [1, 2])
    said = [event.message for event in decode.seen if isinstance(event, MessageReceived)]
    assert not any(isinstance(message, Offer) for message in said)
    assert not prefill.node.knows(decode.name, *KEY) and not decode.node.knows(prefill.name, *KEY)
