"""The stored form of a block of KV, and the one function that decides whether it may be used.

    0   magic     4 bytes  "TKVB"
    4   version   u16
    6   reserved  u16      0
    8   offset    u32      of the payload; a multiple of ALIGNMENT
    12  meta      u32      bytes of the BlockFacts, in msgpack, that follow
    16  checksum  u64      XXH3 of all other bytes, seeded with the key; without the payload if there are `plane_sums`
    24  BlockFacts, zeros up to the payload, payload

Numbers are little-endian. A GPU sums up pages where they lie (`plane_sums`), so that neither those that leave it nor
those that come back are read by a processor. Records lie in memory, on disks and in stores of several workers, where
bits flip, writes tear, and other models, layouts and releases leave theirs.
"""

import struct
from functools import lru_cache
from typing import Any, cast

import msgspec
import numpy as np
from msgspec import to_builtins

from contracts import codec
from contracts.errors import Corrupt, LayoutMismatch
from contracts.kv_store import BlockKey
from contracts.layout import KVLayout
from kv_transfer.chunks import checksum as integrity
from kv_transfer.chunks.page_sums import page_sums

VERSION = 4
ALIGNMENT = 64
RAW = "raw"
"""The codec of a payload that is the block's bytes as they are."""
MAGIC = b"TKVB"
PREFIX = struct.Struct("<4sHHIIQ")
_NUM_BEFORE_CHECKSUM = 16
_DIFFERS = "checksum differs: the record is not what was written"


class BlockFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a record states about its payload.

    The payload is the block's pages, group by group and in each plane by plane. `layout` has the fields of the layout
    and of each group, so that one which differs can be named; `group` is 0. `codec` and `level` say how `raw_nbytes` of
    KV became `stored_nbytes` of payload; `raw_checksum`, XXH3 seeded with the key, is of the KV that a payload which is
    not raw is decoded to. `plane_sums`: the uint32 of each page of a raw payload (page_sums); empty where the record's
    checksum covers the payload.
    """

    key: bytes
    layout: dict[str, Any]
    group: int
    num_tokens: int
    codec: str
    level: int
    raw_nbytes: int
    stored_nbytes: int
    raw_checksum: int
    plane_sums: bytes = b""


class StatedBlock(msgspec.Struct, frozen=True):
    """A block whose record is right, and whose payload is yet to be compared.

    `sums`, uint32: what the checksums of the pages in `payload`, uint8, should be; None where the payload is right too.
    """

    facts: BlockFacts
    payload: np.ndarray
    sums: np.ndarray | None


class VerifiedBlock(msgspec.Struct, frozen=True):
    """A block that may be used: `payload`, uint8, lies in the record."""

    facts: BlockFacts
    payload: np.ndarray


_decoder = codec.decoder(BlockFacts)


def facts_of(
    key: BlockKey,
    layout: KVLayout,
    *,
    raw_nbytes: int,
    stored_nbytes: int,
    codec: str = RAW,
    level: int = 0,
    raw_checksum: int = 0,
    plane_sums: bytes = b"",
) -> BlockFacts:
    """Return the facts of a full block of `layout`."""
    return BlockFacts(
        key=key,
        layout=shared_fields(layout),
        group=0,
        num_tokens=layout.block_size,
        codec=codec,
        level=level,
        raw_nbytes=raw_nbytes,
        stored_nbytes=stored_nbytes,
        raw_checksum=raw_checksum,
        plane_sums=plane_sums,
    )


@lru_cache(maxsize=64)  # a GPU's loads verify thousands of records a second
def shared_fields(layout: KVLayout) -> dict[str, Any]:
    """Return the fields that decide the meaning of a block's bytes, whatever the number of shards.

    The dictionary is shared: nobody changes it.
    """
    fields: dict[str, Any] = {name: getattr(layout, name) for name in ("model", "rounding", "block_size")}
    for index, group in enumerate(layout.groups):
        described: dict[str, Any] = to_builtins(group)
        if not group.span:  # so that a record without says the same as ever
            del described["span"]
        for name, value in described.items():
            # Lists, as they are decoded.
            plain = list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value
            fields[f"groups[{index}].{name}"] = plain
    return fields


def max_record_nbytes(layout: KVLayout) -> int:
    """Return the size of the largest record of a block of `layout`, whose payload is raw."""
    return summed_payload_offset(BlockKey(bytes(64)), layout) + layout.block_nbytes


def summed_payload_offset(key: BlockKey, layout: KVLayout) -> int:
    """Return where the payload of a raw record with `plane_sums` begins, before they are known.

    It is the same for all keys of one length.
    """
    nbytes, sums = layout.block_nbytes, bytes(4 * _num_pages(layout))
    facts = facts_of(key, layout, raw_nbytes=nbytes, stored_nbytes=nbytes, plane_sums=sums)
    return _payload_offset(codec.encode(facts))


def begin_record(facts: BlockFacts, into: memoryview) -> np.ndarray:
    """Write all but the payload and the checksum.

    Returns where the payload belongs, uint8 `[stored_nbytes]`. Raises ValueError if `into` is too short.
    """
    meta = codec.encode(facts)
    offset = _payload_offset(meta)
    if offset + facts.stored_nbytes > len(into):
        raise ValueError(f"a record of {offset + facts.stored_nbytes} bytes does not fit {len(into)}")
    PREFIX.pack_into(into, 0, MAGIC, VERSION, 0, offset, len(meta), 0)
    into[PREFIX.size : offset] = meta.ljust(offset - PREFIX.size, b"\0")
    return np.frombuffer(into, np.uint8)[offset : offset + facts.stored_nbytes]


def seal_record(facts: BlockFacts, record: memoryview) -> memoryview:
    """Write the checksum over a payload that is complete; return the record, without what lies behind it."""
    offset = PREFIX.unpack_from(record)[3]
    whole = record[: offset + facts.stored_nbytes]
    struct.pack_into("<Q", record, _NUM_BEFORE_CHECKSUM, _checksum(facts, whole, offset))
    return whole


def verify(record: memoryview, key: BlockKey, layout: KVLayout) -> VerifiedBlock:
    """Return the block in a record, if it is that of `key` in `layout` to the last bit.

    Raises Corrupt, which names the field that is at fault, and LayoutMismatch if it is another layout's.
    """
    block = read_stated(record, key, layout)
    if block.sums is not None and not np.array_equal(sums_of_pages(block.payload, layout), block.sums):
        raise Corrupt(_DIFFERS)
    return VerifiedBlock(block.facts, block.payload)


def read_stated(record: memoryview, key: BlockKey, layout: KVLayout) -> StatedBlock:
    """Return the block in a record whose pages a device will sum up, if all else is right.

    Raises as `verify` does.

    `key`, and the checksum behind it, stand first: what is not what was written has no other field to be named.
    """
    facts, offset, checksum = _read_facts(record)
    if bytes(facts.key) != key:
        _require("key", bytes(facts.key).hex(), key.hex())
    if checksum != _checksum(facts, record, offset):
        raise Corrupt(_DIFFERS)
    _require("group", facts.group, 0)
    ours = shared_fields(layout)
    if facts.layout != ours:
        for field, value in ours.items():
            if (theirs := facts.layout.get(field)) != value:
                raise LayoutMismatch(field, value, theirs)
        _require("layout", sorted(facts.layout), sorted(ours))
    _require("num_tokens", facts.num_tokens, layout.block_size)
    _require("raw_nbytes", facts.raw_nbytes, layout.block_nbytes)
    if facts.codec == RAW:
        _require("stored_nbytes", facts.stored_nbytes, facts.raw_nbytes)
    return StatedBlock(facts, np.frombuffer(record, np.uint8)[offset:], _stated_sums(facts, layout))


def _stated_sums(facts: BlockFacts, layout: KVLayout) -> np.ndarray | None:
    if not facts.plane_sums:
        return None
    _require("codec", facts.codec, RAW)
    _require("plane_sums", len(facts.plane_sums), 4 * _num_pages(layout))
    return np.frombuffer(facts.plane_sums, "<u4")


def sums_of_pages(payload: np.ndarray, layout: KVLayout) -> np.ndarray:
    """Return the checksums of a raw payload's pages, uint32, group by group; see page_sums."""
    sizes = [layout.group_nbytes(index) for index in range(len(layout.groups))]
    parts = np.split(payload, np.cumsum(sizes)[:-1])
    return np.concatenate(
        [page_sums(part.reshape(-1, group.page_nbytes(1))) for part, group in zip(parts, layout.groups, strict=True)]
    )


def _num_pages(layout: KVLayout) -> int:
    """Return the pages of a block in all planes of all groups, where one shard has all heads."""
    return sum(layout.group_nbytes(index) // group.page_nbytes(1) for index, group in enumerate(layout.groups))


def _read_facts(record: memoryview) -> tuple[BlockFacts, int, int]:
    """Return facts, the payload's offset and the stated checksum. Raises Corrupt if they can't be read."""
    if len(record) < PREFIX.size:
        raise Corrupt(f"nbytes is {len(record)}, shorter than the head of a record")
    magic, version, _, offset, meta_nbytes, checksum = PREFIX.unpack_from(record)
    _require("magic", magic, MAGIC)
    _require("version", version, VERSION)
    if not PREFIX.size + meta_nbytes <= offset <= len(record):
        raise Corrupt(f"offset is {offset}, of a record of {len(record)} bytes with {meta_nbytes} of facts")
    try:
        facts: BlockFacts = _decoder.decode(record[PREFIX.size : PREFIX.size + meta_nbytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"the facts of the record can't be read: {error}") from error
    _require("nbytes", len(record), offset + facts.stored_nbytes)
    return facts, offset, checksum


def _require(field: str, found: object, expected: object) -> None:
    if found != expected:
        raise Corrupt(f"{field} is {found!r}, expected {expected!r}")


def _checksum(facts: BlockFacts, record: memoryview, offset: int) -> int:
    data = np.frombuffer(record, np.uint8)
    before = integrity.extend(integrity.seed_of(facts.key), data[:_NUM_BEFORE_CHECKSUM])
    return integrity.extend(before, data[PREFIX.size : offset if facts.plane_sums else len(data)])


def _payload_offset(meta: bytes) -> int:
    return -(-(PREFIX.size + len(meta)) // ALIGNMENT) * ALIGNMENT
