"""A slow link compresses what both ends allow, a fast one nothing; what arrives is checked before a page changes."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from contracts.errors import ConfigError
from contracts.handoff import Commit, Grant, Offer
from contracts.ids import BlockId, Epoch, RequestId
from contracts.layout import KVGroup, KVLayout
from contracts.request import WorkerRef
from kv_transfer.data_path.compression import LinkBandwidth, SegmentCodec
from kv_transfer.events import ChunkBad, ChunkLanded, LinkStats
from testing.paced_proxy import PacedProxy
from tests.kv_transfer.kv_pair import Peer, fin, send

pytestmark = pytest.mark.slow

SLOW = 8e6
"""Bytes a second: the pages take two seconds, of which the sender's socket holds a quarter at most."""
LAYOUT = KVLayout.uniform(model="slow", num_layers=16, num_kv_heads=2, head_dim=32, block_size=16, dtype="float32")
HEAD = KVGroup(
    kind="draft", layers=(0, 1), num_kv_heads=2, head_dim=32, block_size=16, dtype="float32", weights="a head"
)
STATE = msgspec.structs.replace(HEAD, kind="state", planes=("state",), head_dim=512, weights="")
PAGES = list(range(128))
NUM_TOKENS = 16 * len(PAGES)


class SlowPair:
    """A pair with a slow link, and values of a normal distribution in prefill's pages."""

    def __init__(self, ours: str, theirs: str, layout: KVLayout = LAYOUT) -> None:
        self.prefill = Peer("prefill", len(PAGES), layout, kv_codec=ours, slot_nbytes=128 << 10)
        self.decode = Peer("decode", len(PAGES), layout, kv_codec=theirs)
        self.layout = layout
        self.sent = self.prefill.pool.view(np.float32)
        self.sent[:] = np.random.default_rng(1).normal(size=self.sent.shape)
        self.proxy = PacedProxy(self.decode.node.address, SLOW)
        self.losses: list[str] = []

    def hand_over(self, request_id: str = "a", loss: str = "") -> None:
        """Move all pages of prefill's to decode's, in two chunks, until Commit. `losses` has those that arrived."""
        self.offer(request_id)
        half = NUM_TOKENS // 2
        for index in range(2):
            pages = PAGES[index * 64 : (index + 1) * 64]
            send(self.prefill, self.decode, request_id, index, index * half, half, pages, loss=loss)
        self.losses = [self.decode.wait(ChunkLanded).header.loss for _ in range(2)]
        self.prefill.node.finish(self.decode.name, fin(request_id, 2))
        self.decode.node.commit(self.prefill.name, self.prefill.message(Commit, request_id))

    def offer(self, request_id: str) -> None:
        key = RequestId(request_id), Epoch(1)
        via = WorkerRef(self.decode.name, self.decode.incarnation, "", self.proxy.address)
        self.prefill.node.offer(via, Offer(*key, NUM_TOKENS, self.layout.layout_id))
        self.decode.message(Offer, request_id)
        tables = [[BlockId(page) for page in PAGES]] * len(self.layout.groups)
        self.decode.node.grant(self.prefill.name, Grant(*key, tables, 0))
        self.prefill.message(Grant, request_id)

    @property
    def received(self) -> np.ndarray:
        return self.decode.pool.view(np.float32)

    @property
    def stats(self) -> LinkStats:
        (stats,) = self.prefill.node.stats()
        return stats

    @property
    def levels(self) -> set[str]:
        """Return the levels that both ends count, besides raw."""
        (received,) = self.decode.node.stats()
        both = {name: stats.wire_nbytes for name, stats in self.stats.levels.items()}
        assert both == {name: stats.wire_nbytes for name, stats in received.levels.items()}
        return set(both) - {"raw"}

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.proxy.close()


@pytest.fixture
def pairs() -> Iterator[Any]:
    made: list[SlowPair] = []

    def make(ours: str, theirs: str, layout: KVLayout = LAYOUT) -> SlowPair:
        made.append(SlowPair(ours, theirs, layout))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def test_a_slow_link_compresses_without_loss_by_itself(pairs) -> None:
    pair = pairs("auto", "auto")
    pair.hand_over()
    assert (pair.received == pair.sent).all()
    assert pair.levels == {"lossless"}
    assert pair.losses == ["", ""]
    lossless = pair.stats.levels["lossless"]
    assert lossless.wire_nbytes < 0.95 * lossless.nbytes and lossless.seconds > 0
    assert sum(level.nbytes for level in pair.stats.levels.values()) == pair.stats.nbytes


@pytest.mark.parametrize("beside", [HEAD, STATE], ids=["head", "state"])
def test_the_pages_of_a_head_and_states_cross_a_slow_link_as_they_are(pairs, beside: KVGroup) -> None:
    pair = pairs("4bit", "4bit", msgspec.structs.replace(LAYOUT, groups=(*LAYOUT.groups, beside)))
    pair.prefill.pool_of(1)[:] = pair.prefill.pool_of(0)[: beside.num_planes]
    pair.offer("a")
    for group in (0, 1):
        pages = [BlockId(page) for page in PAGES]
        pair.prefill.node.send_chunk(
            pair.decode.name, RequestId("a"), Epoch(1), group, 0, NUM_TOKENS, pages, None, group
        )
    assert [pair.decode.wait(ChunkLanded).header.loss for _ in range(2)] == ["4bit", ""]
    assert np.array_equal(pair.prefill.pool_of(1), pair.decode.pool_of(1))
    assert pair.levels == {"4bit"} and pair.stats.levels["raw"].nbytes >= len(PAGES) * beside.block_nbytes


def test_a_level_that_both_ends_name_is_taken_and_the_first_page_stays_exact(pairs) -> None:
    pair = pairs("4bit", "4bit")
    pair.hand_over()
    assert pair.levels == {"4bit"}
    assert pair.stats.levels["4bit"].wire_nbytes < 0.4 * pair.stats.levels["4bit"].nbytes
    assert np.abs(pair.received - pair.sent).max() < 0.2
    assert (pair.received[:, 0] == pair.sent[:, 0]).all()
    assert (pair.received[:, -1] != pair.sent[:, -1]).any()
    assert pair.losses == ["4bit", "4bit"]
    assert pair.decode.node.loss_from(pair.prefill.name) == "4bit"


def test_kv_that_came_inexact_to_prefill_arrives_as_such(pairs) -> None:
    pair = pairs("off", "off")
    pair.hand_over(loss="8bit")
    assert pair.losses == ["8bit", "8bit"]
    assert pair.decode.node.loss_from(pair.prefill.name) == ""


@pytest.mark.parametrize(("ours", "theirs"), [("off", "auto"), ("auto", "off")])
def test_an_end_that_is_off_gets_and_sends_raw_bytes(pairs, ours: str, theirs: str) -> None:
    pair = pairs(ours, theirs)
    pair.hand_over()
    assert (pair.received == pair.sent).all()
    assert pair.stats.levels == {}


def test_a_lossy_level_that_one_end_names_is_not_taken(pairs) -> None:
    pair = pairs("3bit", "auto")
    pair.hand_over()
    assert (pair.received == pair.sent).all()
    assert pair.levels == {"lossless"}
    assert pair.decode.node.loss_from(pair.prefill.name) == ""


def test_a_damaged_payload_is_found_before_a_page_changes(pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = SegmentCodec.encode

    def damage(self: SegmentCodec, *args: Any) -> bytes:
        payload = bytearray(encode(self, *args))
        payload[len(payload) // 2] ^= 4
        return bytes(payload)

    pair = pairs("auto", "auto")
    pair.hand_over("first")  # the link's rate is known from now on
    pair.decode.pool[:] = 7
    monkeypatch.setattr(SegmentCodec, "encode", damage)
    pair.offer("second")
    send(pair.prefill, pair.decode, "second", 0, 0, NUM_TOKENS, PAGES)
    bad = pair.decode.wait(ChunkBad)
    assert "checksum of compressed KV differs" in bad.reason
    assert (pair.decode.pool == 7).all()


def test_settings_name_the_levels_that_there_are() -> None:
    with pytest.raises(ConfigError, match="kv_codec is 'gzip'; it must be one of auto, off, lossless, 8bit"):
        Peer("p", kv_codec="gzip")


def test_bandwidth_is_that_of_times_with_a_queue() -> None:
    link = LinkBandwidth()
    link.observe(1000, 900, 1.0)
    assert link.nbytes_per_s == 0.0
    link.observe(1000, 1800, 1.1)
    assert link.nbytes_per_s == pytest.approx(1000)
    link.observe(0, 0, 5.0)  # the queue ran empty, nobody knows when
    link.observe(500, 400, 6.0)
    assert link.nbytes_per_s == pytest.approx(1000)
    for step in range(100):
        link.observe(200, 400, 6.1 + step / 10)
    assert link.nbytes_per_s == pytest.approx(2000, rel=0.01)
