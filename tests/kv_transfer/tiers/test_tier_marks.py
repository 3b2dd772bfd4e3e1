"""Tiers tell which prefixes they hold, whatever comes and goes."""

from pathlib import Path
from random import Random

from contracts.kv_store import BlockWorth, KVStore
from kv_transfer.tiers.disk import DiskTier
from kv_transfer.tiers.host_memory import HostMemoryTier
from kv_transfer.tiers.remote_store import open_remote_store
from tests.kv_transfer.tiers.block_samples import LAYOUT, RECORD_NBYTES, buffers, key_of, record_of

BLOCK = 64
"""The tokens that a block is said to have: the first four blocks of a prompt are all marked."""
SLOTS = 20


def worth(number: int) -> BlockWorth:
    """Return the worth of a block of a prompt of four: a prompt's blocks are 4 n to 4 n + 3."""
    place = number % 4
    return BlockWorth(compute_s=0.001, parent=key_of(number - 1) if place else None, num_blocks=place + 1)


def open_disk(folder: Path, nbytes: int = SLOTS * RECORD_NBYTES) -> DiskTier:
    tier = DiskTier(folder, LAYOUT.shared_id.hex(), nbytes, block_size=BLOCK)
    assert tier.wait_until_indexed(30)
    return tier


def follow(tier: KVStore, known: dict[bytes, bool]) -> None:
    known.update(tier.held.take_changes())


def assert_followed(tier: KVStore, seed: int) -> None:
    """Store, use and evict at random: what was told is what is held."""
    random, known = Random(seed), {}
    for turn in range(400):
        number = random.randrange(80)
        if random.random() < 0.7:
            tier.store(key_of(number), record_of(number), worth(number))
        elif random.random() < 0.5:
            tier.load([key_of(number)], buffers(1))
        else:
            tier.evict([key_of(number)])
        if turn % 7 == 0:
            follow(tier, known)
            held = {number for number in range(80) if tier.lookup([key_of(number)])}
            assert {key for key, is_held in known.items() if is_held} == {key_of(number) for number in held}
    assert any(known.values()) and not all(known.values())


def test_host_memory_tells_what_it_holds() -> None:
    assert_followed(HostMemoryTier(SLOTS * RECORD_NBYTES, RECORD_NBYTES, block_size=BLOCK), 1)


def test_a_disk_tells_what_it_holds(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    assert_followed(tier, 2)
    tier.close()


def test_a_disk_that_is_opened_tells_what_it_finds(tmp_path: Path) -> None:
    """It does not tell of the end of a prompt whose start is gone."""
    tier = open_disk(tmp_path)
    for number in (0, 1, 2, 4, 5):
        assert tier.store(key_of(number), record_of(number), worth(number))
    tier.evict([key_of(4)])
    tier.close()
    again = open_disk(tmp_path)
    assert again.held.take_changes() and not again.held.take_changes()
    again.close()
    third = open_disk(tmp_path)
    assert dict(third.held.take_changes()) == {key_of(number): True for number in (0, 1, 2)}
    third.close()


def test_blocks_of_another_model_are_not_told(tmp_path: Path) -> None:
    tier = open_disk(tmp_path)
    assert tier.store(key_of(0), record_of(0), worth(0))
    tier.close()
    other = DiskTier(tmp_path, "00" * 16, SLOTS * RECORD_NBYTES, block_size=BLOCK)
    assert other.wait_until_indexed(30)
    assert other.stats()["foreign_blocks"] == 1 and other.held.take_changes() == []
    other.close()


def test_a_store_tells_what_was_written_and_what_was_refused(tmp_path: Path) -> None:
    tier = open_remote_store(f"file://{tmp_path}", BLOCK)
    assert tier.store(key_of(0), record_of(0), worth(0))
    assert tier.held.take_changes() == [(key_of(0), True)]
    tier.evict([key_of(0)])
    assert tier.held.take_changes() == [(key_of(0), False)]
    absent = open_remote_store(f"file://{tmp_path}/absent", BLOCK)
    assert not absent.store(key_of(0), record_of(0), worth(0)) and absent.held.take_changes() == []
