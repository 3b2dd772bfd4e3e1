"""Reference-counted KV blocks and the prefix cache over them.

Plain accounting: it never sees the bytes.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from contracts.errors import OutOfBlocks
from contracts.hashing import inexact_digest
from contracts.ids import BlockId
from contracts.kv_loss import EXACT
from engine.cache.kv_groups import KVGroups, no_groups

_Cached = tuple[bytes, bytes]
"""Digest, and token ids of 32 bits. As bytes in a plain tuple: numbers would take nine times the memory, and tens of
thousands of other objects are looked at by the garbage collector.
"""


def ignore_emptied(blocks: Sequence[BlockId]) -> None:
    """Nobody keeps anything beside the blocks."""


class BlockPool:
    """A block is held (referenced), cached (unreferenced, findable, evicted when room is needed), or free.

    `generations[block]` counts how often the block lost its content: a stale writer can be told from the present one.
    `num_gains` counts what may make room for somebody: as long as it stays, what did not fit does not.
    `on_emptied` is told of blocks that are allocated: what was known of their content is of no use. `groups`:
    the pages of blocks in groups of layers where they live shorter.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool = True,
        on_emptied: Callable[[Sequence[BlockId]], None] = ignore_emptied,
        groups: KVGroups | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.generations = [0] * num_blocks
        self.groups = groups or no_groups(block_size)
        self._num_gains = 0
        self._prefix_cache, self._on_emptied = prefix_cache, on_emptied
        self._holds = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, _Cached] = {}
        self._by_digest: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_gains(self) -> int:
        return self._num_gains + self.groups.num_gains

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give now: free ones and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> list[BlockId]:
        """Blocks held once, contents undefined.

        Raises OutOfBlocks and takes none if there are fewer than `count`.
        """
        if count > self.num_available:
            raise OutOfBlocks(f"{count} KV blocks wanted, {self.num_available} of {self.num_blocks} available")
        blocks = [self._take() for _ in range(count)]
        self._on_emptied(blocks)
        self.groups.forget(blocks)
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._holds[block] += 1
            self._evictable.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one hold of each.

        The last blocks of a sequence become evictable first: a shorter prefix stays useful.
        """
        for block in reversed(blocks):
            assert self._holds[block] > 0, f"block {block} released more often than held"
            self._holds[block] -= 1
            if self._holds[block] == 0:
                self._let_go(block)

    def find(self, digests: Iterable[bytes], token_ids: Sequence[int], loss: str = EXACT) -> list[BlockId]:
        """The longest cached prefix, to be retained before anything is allocated.

        Each block is compared by its token ids too, not by digest alone. No digest behind the first that is not here is
        asked for. A block that is not here exactly may be one of this `loss`.
        """
        matched: list[BlockId] = []
        for index, digest in enumerate(digests):
            block = self._find(digest, loss)
            start = index * self.block_size
            if block is None or self._cached[block][1] != _bytes_of(token_ids[start : start + self.block_size]):
                break
            matched.append(BlockId(block))
        return matched

    def find_by_digest(self, digests: Iterable[bytes], loss: str = EXACT) -> list[BlockId]:
        """Return the cached blocks up to the first digest that is not here, for who has no token ids."""
        blocks = (self._find(digest, loss) for digest in digests)
        return [BlockId(block) for block in takewhile(lambda block: block is not None, blocks) if block is not None]

    def num_exact(self, blocks: Iterable[int], digests: Sequence[bytes]) -> int:
        """Return how many of these cached blocks, from the first on, have the digests of exact KV."""
        pairs = zip(blocks, digests, strict=False)
        return sum(1 for _ in takewhile(lambda pair: self._cached[pair[0]][0] == pair[1], pairs))

    def fits(self, count: int, beside: Iterable[int]) -> bool:
        """So many can be allocated once those `beside`, cached or held, are held too."""
        return count <= self.num_available - sum(block in self._evictable for block in beside)

    def insert(self, block: int, digest: bytes, token_ids: Sequence[int]) -> bool:
        """Make a held, fully written block findable; return whether it is new.

        A digest that is cached already keeps its first block, unless that lacks a page that this one has.
        """
        assert self._holds[block] > 0, f"block {block} enters the prefix cache without a holder"
        known = self._by_digest.get(digest)
        if known is not None and block not in self._cached and self.groups.lacks(known) > self.groups.lacks(block):
            self._forget(known)
        is_new = self._prefix_cache and digest not in self._by_digest and block not in self._cached
        if is_new:
            self._cached[block] = digest, _bytes_of(token_ids)
            self._by_digest[digest] = block
            self._num_gains += 1
        return is_new

    def holds(self, block: int) -> int:
        return self._holds[block]

    def check(self) -> None:
        """Raises AssertionError, in words, if a block is in two states or in none."""
        states = Counter([*self._free, *self._evictable])
        for block in range(self.num_blocks):
            expected = 0 if self._holds[block] else 1
            assert self._holds[block] >= 0, f"block {block} has {self._holds[block]} holds"
            assert states[block] == expected, f"block {block}: {self._holds[block]} holds, idle {states[block]} times"
        for block in self._evictable:
            assert block in self._cached, f"block {block} is evictable but not cached"
        for block in self._free:
            assert block not in self._cached, f"block {block} is free but cached"
        for digest, block in self._by_digest.items():
            assert self._cached[block][0] == digest, f"block {block} is found by a digest that is not its own"
        assert len(self._by_digest) == len(self._cached), "a cached block can't be found by its digest"

    def _find(self, digest: bytes, loss: str) -> int | None:
        block = self._by_digest.get(digest)
        return self._by_digest.get(inexact_digest(digest, loss)) if block is None and loss else block

    def _take(self) -> BlockId:
        block = self._free.pop() if self._free else self._evict()
        self._holds[block] = 1
        return BlockId(block)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        del self._by_digest[self._cached.pop(block)[0]]
        self.generations[block] += 1
        return block

    def _forget(self, block: int) -> None:
        """Let nobody find a block any more; who holds it has it as long as before."""
        del self._by_digest[self._cached.pop(block)[0]]
        if block in self._evictable:
            del self._evictable[block]
            self.generations[block] += 1
            self._free.append(block)

    def _let_go(self, block: int) -> None:
        self._num_gains += 1
        if block in self._cached:
            self._evictable[block] = None
        else:
            self.generations[block] += 1
            self._free.append(block)
            self.groups.free_idle(block)


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()
