"""Faults of KV that is kept in a worker's memory, on its disk, and in a store of several workers.

Whoever damages a record keeps to what memory, disks and careless operators do: a bit turns over, a file ends too early,
a record lies under another's key, or is whole but another layout's.
"""

import asyncio
import random
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
import redis.asyncio as redis

from bench.serving.kept_kv import KeptKV
from kv_transfer.chunks.block_record import ALIGNMENT, MAGIC, PREFIX, BlockFacts, begin_record, seal_record

_SCAN_NBYTES = 16 << 20
_NUM_DAMAGED = 16
"""How many records a fault damages: of one alone, most are never asked for again."""
_LONGER_FACTS_NBYTES = 512
"""A slot of a tier has room for so much longer facts: the checksums of all planes are the most of it."""


def record_files(disk: Path) -> list[Path]:
    return sorted(disk.rglob("*.kv"))


def turned(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with one bit turned over."""
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def torn(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def of_another_layout(data: bytes, rng: random.Random) -> bytes:
    """Return a whole record of the same key and a right checksum.

    Its bytes mean another dtype or block size. A record that was damaged before gets another bit turned.
    """
    name = rng.choice(["groups[0].dtype", "block_size"])
    try:
        facts, payload = _read(data)
        other = "bfloat16" if name.endswith("dtype") else 2 * facts.layout[name]
        changed = msgspec.structs.replace(facts, layout=facts.layout | {name: other})
        into = memoryview(bytearray(len(data) + ALIGNMENT))
        begin_record(changed, into)[:] = memoryview(payload)
        return bytes(seal_record(changed, into))
    except (struct.error, msgspec.DecodeError, LookupError, TypeError, ValueError):
        return turned(data, rng)


def _read(data: bytes) -> tuple[BlockFacts, bytes]:
    _, _, _, offset, num_facts, _ = PREFIX.unpack_from(data)
    return msgspec.msgpack.decode(data[PREFIX.size : PREFIX.size + num_facts], type=BlockFacts), data[offset:]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a bit turned": turned,
    "torn": torn,
    "another layout's": of_another_layout,
}


def damage_disk(disk: Path, rng: random.Random, damage: Callable[[bytes, random.Random], bytes]) -> bool:
    """Damage some records in a folder; False if there is none."""
    num_damaged, files = 0, record_files(disk)
    for file in rng.sample(files, min(len(files), _NUM_DAMAGED)):
        with suppress(OSError):  # it was evicted meanwhile, or the disk has another fault
            if data := file.read_bytes():
                file.write_bytes(damage(data, rng))
                num_damaged += 1
    return num_damaged > 0


def exchange_on_disk(disk: Path, rng: random.Random) -> bool:
    """Give some records the place of others; False if there are no two."""
    num_exchanged, files = 0, record_files(disk)
    chosen = rng.sample(files, min(len(files), 2 * _NUM_DAMAGED))
    for one, other in zip(chosen[::2], chosen[1::2], strict=False):
        with suppress(OSError):
            one.write_bytes(other.read_bytes())
            num_exchanged += 1
    return num_exchanged > 0


async def damage_store(kept: KeptKV, rng: random.Random, damage: Callable[[bytes, random.Random], bytes]) -> bool:
    """Damage some records in the store; False if there is none, or the store does not answer."""
    num_damaged = 0
    with suppress(redis.RedisError):
        async with redis.Redis.from_url(kept.places.store.url, socket_timeout=5) as client:
            for key in {await client.randomkey() for _ in range(_NUM_DAMAGED)}:
                if key is not None and (data := await client.get(key)):
                    assert isinstance(data, bytes)
                    await client.set(key, damage(data, rng))
                    num_damaged += 1
    return num_damaged > 0


def turn_bit_of(pid: int, rng: random.Random, arena_nbytes: int) -> bool:
    """Turn a bit of some records in the arena of a memory tier, in an engine core; False if none is found.

    Buffers outside the arena are spared: a record in one may be unfinished, or verified already.
    """
    with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for start, end in sorted(_mappings(pid, arena_nbytes), key=lambda span: span[1] - span[0]):
            pieces = list(range(start, end, _SCAN_NBYTES))
            for piece in rng.sample(pieces, len(pieces)):
                if slots := _slots(memory, piece, end):
                    for place, nbytes in rng.sample(slots, min(len(slots), _NUM_DAMAGED)):
                        at = place + rng.randrange(nbytes)
                        memory.seek(at)
                        byte = memory.read(1)[0]
                        memory.seek(at)
                        memory.write(bytes([byte ^ 1 << rng.randrange(8)]))
                    return True
    return False


def _mappings(pid: int, least_nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of the private writable mappings without a file that could be the arena."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights, *_, inode = line.split()[:5]
        start, end = (int(number, 16) for number in span.split("-"))
        if rights == "rw-p" and inode == "0" and end - start >= least_nbytes:
            yield start, end


def _slots(memory: BinaryIO, start: int, end: int) -> list[tuple[int, int]]:
    """Return address and size of the records in a part of a mapping.

    Each has another one exactly a slot away, as in an arena.
    """
    memory.seek(start)
    data = memory.read(min(end - start, _SCAN_NBYTES))
    records: dict[int, int] = {}
    slots: set[int] = set()
    found = data.find(MAGIC)
    while 0 <= found <= len(data) - PREFIX.size:
        offset = PREFIX.unpack_from(data, found)[3]
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError, struct.error):  # it was damaged before
            facts, _ = _read(data[found : found + offset])
            records[start + found] = offset + facts.stored_nbytes
            slots |= {offset + facts.raw_nbytes + more for more in range(0, _LONGER_FACTS_NBYTES, ALIGNMENT)}
        found = data.find(MAGIC, found + len(MAGIC))
    distances = slots | {-slot for slot in slots}
    return [(at, nbytes) for at, nbytes in records.items() if any(at + one in records for one in distances)]


async def damage_memory(kept: KeptKV, rng: random.Random) -> bool:
    """Turn a bit in the memory of a worker that is alive; False if none has a record there."""
    alive = [name for name in kept.services.workers if kept.services.is_alive(name)]
    if not alive:
        return False
    try:
        pid = kept.services.facts(rng.choice(alive))["core_pid"]
    except FileNotFoundError:  # it is being started again
        return False
    return await asyncio.to_thread(turn_bit_of, pid, rng, int(kept.places.host_nbytes * 0.9))


def _on_disk(damage: Callable[[bytes, random.Random], bytes]) -> "Fault":
    async def make(kept: KeptKV, rng: random.Random) -> bool:
        return damage_disk(kept.places.disk, rng, damage)

    return make


def _in_store(damage: Callable[[bytes, random.Random], bytes]) -> "Fault":
    return lambda kept, rng: damage_store(kept, rng, damage)


async def _exchange(kept: KeptKV, rng: random.Random) -> bool:
    return exchange_on_disk(kept.places.disk, rng)


Fault = Callable[[KeptKV, random.Random], Awaitable[bool]]
"""Makes a fault; returns whether there was something to damage."""
DAMAGED: dict[str, Fault] = {
    "memory: a bit turned": damage_memory,
    "disk: another key's": _exchange,
    **{f"disk: {name}": _on_disk(damage) for name, damage in DAMAGES.items()},
    **{f"store: {name}": _in_store(damage) for name, damage in DAMAGES.items()},
}
