"""The tier in host memory: bounded, consistent under threads, and believed only after the verifier."""

import threading

import numpy as np
import pytest

from contracts.errors import Corrupt
from kv_transfer.chunks.block_record import verify
from kv_transfer.tiers.host_memory import HostMemoryTier
from tests.kv_transfer.tiers.block_samples import LAYOUT, RECORD_NBYTES, buffers, bytes_of, key_of, record_of, worth_of


def make_tier(num_slots: int) -> HostMemoryTier:
    return HostMemoryTier(num_slots * RECORD_NBYTES, RECORD_NBYTES)


def test_gives_back_what_it_took_up_to_the_first_that_is_missing():
    tier = make_tier(8)
    for number in (0, 1, 3):
        assert tier.store(key_of(number), record_of(number), worth_of(number, number - 1 if number else None))
    keys, into = [key_of(number) for number in range(4)], buffers(4)
    assert tier.lookup(keys) == 2
    sizes = tier.load(keys, into)
    assert len(sizes) == 2
    for number, nbytes in enumerate(sizes):
        block = verify(into[number][:nbytes], key_of(number), LAYOUT)
        assert np.array_equal(block.payload, bytes_of(number))
    assert tier.stats()["hit_blocks"] == tier.stats()["missed_blocks"] == 2


def test_never_holds_more_than_its_slots():
    tier = make_tier(4)
    for number in range(50):
        tier.store(key_of(number), record_of(number), worth_of(number))
        assert tier.stats()["blocks"] <= 4
    assert tier.stats()["blocks"] == 4


def test_refuses_what_is_larger_than_a_slot():
    tier = make_tier(2)
    assert not tier.store(key_of(1), memoryview(bytes(RECORD_NBYTES + 1)), worth_of(1))
    assert tier.lookup([key_of(1)]) == 0
    with pytest.raises(ValueError, match="do not hold one block"):
        HostMemoryTier(RECORD_NBYTES - 1, RECORD_NBYTES)


def test_forgets_what_was_found_faulty():
    tier = make_tier(2)
    tier.store(key_of(1), record_of(1), worth_of(1))
    tier.evict([key_of(1), key_of(9)])
    assert tier.lookup([key_of(1)]) == 0
    assert tier.store(key_of(1), record_of(1), worth_of(1))


@pytest.mark.parametrize("bit", [5, 8 * 100, 8 * RECORD_NBYTES - 1])
def test_a_bit_that_flips_in_memory_is_not_believed(bit: int):
    arena = bytearray(2 * RECORD_NBYTES)
    tier = HostMemoryTier(len(arena), RECORD_NBYTES, lambda nbytes: memoryview(arena))
    record = record_of(1)
    tier.store(key_of(1), record, worth_of(1))
    start = arena.index(bytes(record))
    arena[start + min(bit // 8, len(record) - 1)] ^= 1 << bit % 8
    into = buffers(1)
    (nbytes,) = tier.load([key_of(1)], into)
    with pytest.raises(Corrupt):
        verify(into[0][:nbytes], key_of(1), LAYOUT)


def test_a_record_that_is_being_read_is_never_overwritten():
    """Writers turn four slots over while readers check every record that they get."""
    tier, faults, stop = make_tier(4), [], threading.Event()
    records = {number: record_of(number) for number in range(12)}

    def read() -> None:
        into = buffers(1)
        while not stop.is_set():
            for number in records:
                for nbytes in tier.load([key_of(number)], into):
                    if bytes(into[0][:nbytes]) != bytes(records[number]):
                        faults.append(number)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(60):
        for number, record in records.items():
            tier.store(key_of(number), record, worth_of(number))
    stop.set()
    for reader in readers:
        reader.join()
    assert not faults
    assert tier.stats()["blocks"] <= 4


def test_a_record_that_is_lent_stays_until_it_is_given_back():
    tier = make_tier(2)
    for number in range(2):
        tier.store(key_of(number), record_of(number), worth_of(number))
    lent = tier.lend([key_of(0), key_of(1), key_of(2)])
    assert [bytes(record) for _, record in lent] == [bytes(record_of(0)), bytes(record_of(1))]
    tier.evict([key_of(0), key_of(1)])
    assert not tier.store(key_of(3), record_of(3), worth_of(3))
    assert [bytes(record) for _, record in lent] == [bytes(record_of(0)), bytes(record_of(1))]
    tier.give_back(slot for slot, _ in lent)
    assert tier.store(key_of(3), record_of(3), worth_of(3))
    assert tier.lend([key_of(0)]) == []
