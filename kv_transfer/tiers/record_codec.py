"""The compression of block records for tiers that are slower than coding, and back."""

import time
from collections.abc import Mapping, Sequence
from itertools import takewhile

import numpy as np

from contracts.errors import Corrupt
from contracts.kv_loss import EXACT
from contracts.kv_store import BlockKey
from contracts.layout import KVGroup, KVLayout
from kv_transfer.chunks import checksum as integrity
from kv_transfer.chunks.block_record import (
    RAW,
    VerifiedBlock,
    begin_record,
    facts_of,
    max_record_nbytes,
    seal_record,
    verify,
)
from kv_transfer.codecs import codec
from kv_transfer.codecs.choice import CodecRate, choose_level
from kv_transfer.codecs.level import BY_NUMBER, LEVELS, accepted_loss
from kv_transfer.codecs.page_format import PageFormat, PageRun

LEVELLED = "levelled"
"""The codec that a record names whose payload is of kv_transfer.codecs, at the level of its number."""
_TRIALS = 3
_FACTS_NBYTES = 64
"""The bytes that a payload must save at least: the facts of a compressed record take some more."""


class RecordCodec:
    """The codec of a worker's records: `levels` are those that it may write, the most exact first.

    A block is coded as one page of each kind of plane, whose heads are those of all layers, of whatever group: sixty
    planes one by one took ten times as long. Groups of another form behind these, such as a draft head's, are a few
    percent of a block, and are appended as they are.
    """

    def __init__(self, layout: KVLayout, levels: Sequence[str]) -> None:
        self.levels, self.accepted_loss = list(levels), accepted_loss(levels)
        self._layout, group = layout, layout.groups[0]
        coded = list(takewhile(lambda each: _form(each) == _form(group), layout.model_part.groups))
        num_layers = sum(each.num_layers for each in coded)
        self._format = PageFormat(group.dtype, group.num_kv_heads * num_layers, group.block_size, group.head_dim)
        self._runs = [PageRun(1, is_key=is_key) for is_key in group.are_keys]
        # The planes lie layer by layer; coded are all keys, then all values.
        num_planes = num_layers * len(group.planes)
        self._order = np.arange(num_planes).reshape(num_layers, len(group.planes)).T.reshape(-1)
        self._coded_nbytes = sum(each.block_nbytes for each in coded)
        self._rates: Mapping[str, CodecRate] | None = None

    def choose(self, record: memoryview, bandwidth: float, may_lose: bool) -> str:
        """Return the level that pays for a record at so many bytes a second; "" for none.

        Not `may_lose`: the first block of a prompt, which every level keeps exact, or one that has lost something
        already. The first call measures how fast coding is.
        """
        if not self.levels or not bandwidth > 0:
            return ""
        if self._rates is None:
            pages = np.frombuffer(record, np.uint8)[-self._layout.block_nbytes :]
            self._rates = self._measure(self._planes(pages[: self._coded_nbytes]))
        allowed = [name for name in self.levels if LEVELS[name].is_lossless or may_lose]
        return choose_level(len(record), len(record), bandwidth, self._rates, allowed)

    def compress(self, record: memoryview, key: BlockKey, level: str, new_key: BlockKey) -> memoryview | None:
        """Return a record of `new_key` with the block at a level; None if that makes it no smaller.

        Raises Corrupt and LayoutMismatch if `record` is no sealed record of `key`.
        """
        block = verify(record, key, self._layout)
        coded, rest = np.split(block.payload, [self._coded_nbytes])
        payload = codec.encode(self._planes(coded), self._runs, self._format, LEVELS[level]) + rest.tobytes()
        kept = self._decode(memoryview(payload))
        facts = facts_of(
            new_key,
            self._layout,
            raw_nbytes=block.facts.raw_nbytes,
            stored_nbytes=len(payload),
            codec=LEVELLED,
            level=LEVELS[level].number,
            raw_checksum=integrity.extend(integrity.seed_of(new_key), kept),
        )
        if len(payload) + _FACTS_NBYTES > len(block.payload):
            return None
        buffer = memoryview(bytearray(max_record_nbytes(self._layout)))
        begin_record(facts, buffer)[:] = np.frombuffer(payload, np.uint8)
        return seal_record(facts, buffer)

    def read(self, block: VerifiedBlock, loss: str = EXACT) -> np.ndarray:
        """Return the KV of a block, uint8 in the order of the pool's planes. `loss`: that of its key.

        Raises Corrupt if it is not what was coded, or has lost what its key does not say.
        """
        facts = block.facts
        if facts.codec == RAW:
            return block.payload
        if facts.codec != LEVELLED or facts.level not in BY_NUMBER:
            raise Corrupt(f"codec is {facts.codec!r} at level {facts.level}, which this worker does not read")
        level = BY_NUMBER[facts.level]
        if not level.is_lossless and level.name != loss:
            raise Corrupt(f"level is '{level.name}', which loses, under the key of {loss or 'exact'} KV")
        kept = self._decode(block.payload.data)
        if integrity.extend(integrity.seed_of(facts.key), kept) != facts.raw_checksum:
            raise Corrupt("raw_checksum differs: the KV is not what was coded")
        return kept

    def _planes(self, pages: np.ndarray) -> np.ndarray:
        """Return a block's bytes in the order in which they are coded."""
        return pages.reshape(len(self._order), -1)[self._order].reshape(-1)

    def _decode(self, payload: memoryview) -> np.ndarray:
        """Return the bytes of a block in the order of the pool's planes. Raises Corrupt."""
        num_raw = self._layout.block_nbytes - self._coded_nbytes
        if len(payload) < num_raw:
            raise Corrupt(f"stored_nbytes is {len(payload)}, of which {num_raw} are not coded")
        end = len(payload) - num_raw
        return np.concatenate([self._decode_planes(payload[:end]), np.frombuffer(payload[end:], np.uint8)])

    def _decode_planes(self, payload: memoryview) -> np.ndarray:
        coded = np.empty(self._coded_nbytes, np.uint8)
        codec.decode(payload, self._runs, self._format, coded)
        pages = np.empty((len(self._order), len(coded) // len(self._order)), np.uint8)
        pages[self._order] = coded.reshape(pages.shape)
        return pages.reshape(-1)

    def _measure(self, planes: np.ndarray) -> Mapping[str, CodecRate]:
        """Return what the levels do to a block here."""
        rates: dict[str, CodecRate] = {}
        for name in self.levels:
            payload, encode_s, decode_s = b"", float("inf"), float("inf")
            for _ in range(_TRIALS):
                start = time.perf_counter()
                payload = codec.encode(planes, self._runs, self._format, LEVELS[name])
                middle = time.perf_counter()
                self._decode_planes(memoryview(payload))
                encode_s, decode_s = min(encode_s, middle - start), min(decode_s, time.perf_counter() - middle)
            encode_s += decode_s  # decoded when it is written too, for the checksum
            rates[name] = CodecRate(len(planes) / len(payload), len(planes) / encode_s, len(planes) / decode_s)
        return rates


def _form(group: KVGroup) -> tuple[object, ...]:
    """Return what two groups have in common whose planes are coded together."""
    return group.planes, group.dtype, group.num_kv_heads, group.block_size, group.head_dim


class WriteRate:
    """How fast a tier takes records: bytes a second of its last ones, which weigh the more the later."""

    MIN_RECORDS = 4
    """The records after which the rate counts as known; the first half does not count, for it connects."""
    KEPT = 0.9

    def __init__(self) -> None:
        self._num, self._nbytes, self._seconds = 0, 0.0, 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a record."""
        self._num += 1
        if self._num > self.MIN_RECORDS // 2:
            self._nbytes = self.KEPT * self._nbytes + nbytes
            self._seconds = self.KEPT * self._seconds + seconds

    @property
    def nbytes_per_s(self) -> float:
        """Return bytes a second; 0.0 while unknown."""
        return self._nbytes / self._seconds if self._num >= self.MIN_RECORDS and self._seconds > 0 else 0.0
