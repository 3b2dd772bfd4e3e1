"""Blocks of KV for the tests of the tiers."""

import hashlib

import numpy as np

from contracts.kv_store import BlockKey, BlockWorth
from contracts.layout import KVLayout
from kv_transfer.chunks.block_record import begin_record, facts_of, max_record_nbytes, seal_record
from kv_transfer.chunks.page_sums import page_sums

LAYOUT = KVLayout.uniform(model="m", num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
RECORD_NBYTES = max_record_nbytes(LAYOUT)


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest())


def bytes_of(number: int, layout: KVLayout = LAYOUT) -> np.ndarray:
    """Return the KV of block `number`: random bytes, always the same."""
    return np.random.default_rng(number).integers(0, 256, layout.block_nbytes, dtype=np.uint8)


def record_of(number: int, layout: KVLayout = LAYOUT) -> memoryview:
    """Return the sealed record of block `number`."""
    buffer = memoryview(bytearray(max_record_nbytes(layout)))
    facts = facts_of(key_of(number), layout, raw_nbytes=layout.block_nbytes, stored_nbytes=layout.block_nbytes)
    begin_record(facts, buffer)[:] = bytes_of(number, layout)
    return seal_record(facts, buffer)


def summed_record_of(number: int, layout: KVLayout = LAYOUT) -> memoryview:
    """Return the record of block `number` as a worker with a GPU seals it: its pages have checksums of their own."""
    sums = page_sums(bytes_of(number, layout).reshape(layout.only_group.num_planes, -1))
    buffer = memoryview(bytearray(max_record_nbytes(layout)))
    facts = facts_of(
        key_of(number),
        layout,
        raw_nbytes=layout.block_nbytes,
        stored_nbytes=layout.block_nbytes,
        plane_sums=sums.astype("<u4").tobytes(),
    )
    begin_record(facts, buffer)[:] = bytes_of(number, layout)
    return seal_record(facts, buffer)


def worth_of(number: int, parent: int | None = None) -> BlockWorth:
    """Return the worth of a block that takes a millisecond to compute."""
    return BlockWorth(compute_s=0.001, parent=None if parent is None else key_of(parent))


def buffers(count: int) -> list[memoryview]:
    """Return room for so many records."""
    return [memoryview(bytearray(RECORD_NBYTES)) for _ in range(count)]
