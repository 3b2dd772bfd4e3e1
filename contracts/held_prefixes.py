"""The prefixes of prompts that a tier of the KV cache holds, as placement hears of them.

A prefix is known by the key (contracts.kv_store.BlockKey) of the block that ends it, at a few depths only. So placement
knows to within some blocks how much of a prompt a worker has, by one small read, and a tier of a hundred thousand
blocks has some thousand marks.
"""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeVar

import msgspec

PREFIX_BLOCK_TOKENS = 64
"""Tokens in a block of the prefixes that placement knows, whatever the size of blocks in a cache."""
PREFIX_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Such blocks after which a prompt's prefixes are written and looked up. Of what prompts of two conversations have in
common four fifths are found, two thirds if it is short."""
MAX_MARKS = 16_384
"""The marks that one tier keeps, the newest: some 2 MB in Redis."""

Key = TypeVar("Key", bound=bytes)


class HeldChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The news that a tier, by its name, holds the prefix that ends with a block, or holds it no more."""

    tier: str
    key: bytes
    is_held: bool


@lru_cache(maxsize=16)
def marked_blocks(block_size: int) -> dict[int, int]:
    """Return the depths that are marked, by how many blocks of `block_size` tokens they are.

    It is empty for 0, a cache of which nothing is known.
    """
    tokens = {depth: depth * PREFIX_BLOCK_TOKENS for depth in PREFIX_DEPTHS}
    return {n // block_size: depth for depth, n in tokens.items() if n % block_size == 0} if block_size else {}


def prefix_lengths(parents: Mapping[Key, Key | None]) -> dict[Key, int]:
    """Return of each block how many blocks its prefix has, itself counted, if all of them are there.

    `parents`: the block before each, None for the first of a prompt.
    """
    children: defaultdict[Key | None, list[Key]] = defaultdict(list)
    for key, parent in parents.items():
        children[parent].append(key)
    lengths: dict[Key, int] = {}
    ends, num_blocks = children[None], 0
    while ends:
        num_blocks += 1
        lengths.update(dict.fromkeys(ends, num_blocks))
        ends = [child for end in ends for child in children.get(end, ())]
    return lengths


class HeldPrefixes:
    """The marks of one tier, and those that changed since they were last taken.

    `block_size`: the tokens of its blocks; 0 marks nothing. `is_shared`: others write to it, and it forgets by its own
    rules, so each sight of a block is news. Any thread may call.
    """

    def __init__(self, block_size: int = 0, is_shared: bool = False, max_marks: int = MAX_MARKS) -> None:
        self._marked, self._is_shared, self._max_marks = marked_blocks(block_size), is_shared, max_marks
        self._marks: OrderedDict[bytes, None] = OrderedDict()
        self._changes: OrderedDict[bytes, bool] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, key: bytes, num_blocks: int) -> None:
        """Note that the block which ends a prefix of so many is held; 0 for one whose place is not known."""
        if num_blocks not in self._marked:
            return
        with self._lock:
            is_known = key in self._marks and not self._is_shared
            self._marks[key] = None
            self._marks.move_to_end(key)
            if not is_known:
                self._changed(key, True)
            if len(self._marks) > self._max_marks:
                oldest, _ = self._marks.popitem(last=False)
                self._changed(oldest, False)

    def remove(self, key: bytes) -> None:
        """Note that a block is held no more; most were never marked."""
        with self._lock:
            if key in self._marks:
                del self._marks[key]
                self._changed(key, False)

    def clear(self) -> None:
        """Note that nothing is held."""
        with self._lock:
            for key in self._marks:
                self._changed(key, False)
            self._marks.clear()

    def take_changes(self) -> list[tuple[bytes, bool]]:
        """Return each mark that changed since the last call, and whether it is held now."""
        if not self._changes:
            return []
        with self._lock:
            changes, self._changes = self._changes, OrderedDict()
            return list(changes.items())

    def _changed(self, key: bytes, is_held: bool) -> None:
        self._changes[key] = is_held
        if len(self._changes) > 2 * self._max_marks:  # nobody takes them
            self._changes.popitem(last=False)
