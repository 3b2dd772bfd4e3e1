"""The index of prefixes: which workers served a prompt's first blocks lately.

A prefix's entry is a line of holders, `TERM:BLOCKS:DEPTH:HASH`, the newest first: the term of a worker's join, how many
blocks of prompts had been placed on it by then (what has passed through it since is how old the prefix is in its
cache), and the depth and hash at which that prompt ended: a conversation that goes on from there is known to the block.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

BLOCK_TOKENS = 64
"""Tokens in a block of the prefixes that placement remembers."""
MAX_BLOCKS = 128
"""At most so many blocks of a prompt count: enough to tell conversations apart, little enough for one round trip."""
KEPT_S = 600.0
MAX_HOLDERS = 14
"""Holders that one prefix keeps. A claim puts the two that it takes before them."""

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Blocks after which a prompt's prefixes are written and looked up. Of what prompts of two conversations have in common
four fifths are found, two thirds if it is short."""


class PromptPrefixes:
    """The hashes of a prompt's first blocks, each made when it is first asked for.

    Equal prefixes have equal hashes, in any process. `salt`: prompts of different salts have no hash in common.
    """

    def __init__(self, token_ids: Sequence[int], salt: bytes = b"") -> None:
        self.num_blocks = min(len(token_ids) // BLOCK_TOKENS, MAX_BLOCKS)
        self._token_ids = token_ids
        self._digests = {0: salt}

    @property
    def looked_up(self) -> list[bytes]:
        """The prefixes that are written and looked up, the shortest first."""
        return [self.digest(depth) for depth in DEPTHS if depth <= self.num_blocks]

    @property
    def tail(self) -> str:
        """What a holder says of where its prompt ended."""
        return f"{self.num_blocks}:{self.digest(self.num_blocks)[:4].hex()}" if self.num_blocks else ""

    def digest(self, depth: int) -> bytes:
        """Return the 16-byte BLAKE2b digest of the first `depth` blocks.

        It is made over that of the next shorter one of DEPTHS and the tokens behind it: a fifth of the work that a
        digest for each block takes. MessagePack has one form for a token id, which is soon written.
        """
        if depth not in self._digests:
            known = bisect_left(DEPTHS, depth)
            before = DEPTHS[known - 1] if known else 0
            behind = _encode(list(self._token_ids[before * BLOCK_TOKENS : depth * BLOCK_TOKENS]))
            self._digests[depth] = hashlib.blake2b(self.digest(before) + behind, digest_size=16).digest()
        return self._digests[depth]


NO_PREFIXES = PromptPrefixes(())


class Holder(NamedTuple):
    """A worker that served a prefix of `depth` blocks.

    `served_blocks` of prompts had been placed on it by then. `is_continued`: the prompt that it served is all in this
    one, so it may hold the answer that comes next as well.
    """

    depth: int
    served_blocks: int
    is_continued: bool


def holders(prompt: PromptPrefixes, found: Sequence[bytes], limit: int) -> dict[str, Holder]:
    """Return some terms that hold the deepest prefixes, `limit` if there are as many.

    `found`: the entries of what is looked up.
    """
    deepest: dict[str, Holder] = {}
    seen = b""
    for depth, entry in zip(reversed(DEPTHS[: len(found)]), reversed(found), strict=True):
        if entry != seen:  # else a deeper one is of the same holders
            seen = entry
            for holder in entry.decode().split():
                term, blocks, *ended = holder.split(":")
                end = _end(prompt, ended)
                deepest.setdefault(term, Holder(end or depth, int(blocks), end > 0))
        if len(deepest) >= limit:
            break
    return deepest


def others(found: Sequence[bytes]) -> list[bytes]:
    """Return the holders that stay in each entry, behind new ones."""
    kept = {entry: _kept(entry) for entry in set(found)}
    return [kept[entry] for entry in found]


def is_cached(served_blocks: int, num_served_blocks: int, capacity_tokens: int) -> bool:
    """Return whether a worker's cache can still hold a prefix, by what was placed there since."""
    return (num_served_blocks - served_blocks) * BLOCK_TOKENS < max(capacity_tokens, MAX_BLOCKS * BLOCK_TOKENS)


def _end(prompt: PromptPrefixes, ended: Sequence[str]) -> int:
    """Return the depth at which a holder's prompt ended, if this one begins with all of it; else 0."""
    depth = int(ended[0])
    return depth if depth <= prompt.num_blocks and prompt.digest(depth)[:4].hex() == ended[1] else 0


_encode = msgspec.msgpack.Encoder().encode


def _kept(entry: bytes) -> bytes:
    terms: dict[bytes, bytes] = {}
    for holder in entry.split():
        terms.setdefault(holder.partition(b":")[0], holder)
    return b"".join(b" " + holder for holder in list(terms.values())[:MAX_HOLDERS])
