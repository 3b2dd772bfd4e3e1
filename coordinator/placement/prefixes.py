"""The index of prefixes: which workers served a prompt's first blocks lately.

A prefix's entry is a line of holders, `TERM:BLOCKS:DEPTH:HASH`, the newest first: the term of a worker's join, how many
blocks of prompts had been placed on it by then (what has passed through it since is how old the prefix is in its
cache), and the depth and hash at which that prompt ended: a conversation that goes on from there is known to the block.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from contracts.hashing import block_key, chain_hashes
from contracts.held_prefixes import PREFIX_BLOCK_TOKENS as BLOCK_TOKENS
from contracts.held_prefixes import PREFIX_DEPTHS as DEPTHS
from contracts.held_prefixes import marked_blocks

MAX_BLOCKS = DEPTHS[-1]
"""At most so many blocks of a prompt count: enough to tell conversations apart, little enough for one round trip."""
KEPT_S = 600.0
MAX_HOLDERS = 14
"""Holders that one prefix keeps. A claim puts the two that it takes before them."""


class KVForm(NamedTuple):
    """The form of a KV: what the key of a block depends on beside the tokens, and how many these are."""

    shared_id: bytes
    block_size: int

    @property
    def name(self) -> str:
        """Return what stands for the shared store in TierDepths: no term of a worker."""
        return self.shared_id.hex()


class HeldKey(NamedTuple):
    """The key of the block that ends the first `depth` blocks of a prompt, in a form of KV."""

    form: KVForm
    depth: int
    key: bytes


TierDepths = Mapping[str, Mapping[str, int]]
"""How many blocks of a prompt tiers hold, by the term of their worker, and by the tier's name. What is in the store
that workers share is there by the name of its form."""
NO_TIERS: TierDepths = {}


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

    def held_keys(self, forms: Iterable[KVForm]) -> list[HeldKey]:
        """Return the keys by which tiers may hold the prompt's prefixes, the deepest first."""
        found: list[HeldKey] = []
        for form in forms:
            marked = [(n, depth) for n, depth in marked_blocks(form.block_size).items() if depth <= self.num_blocks]
            if marked:
                try:
                    digests = chain_hashes(self._token_ids, form.block_size, marked[-1][0], self._digests[0])
                except OverflowError:  # of 32 bits: the worker refuses such tokens in words
                    break
                found += [HeldKey(form, depth, block_key(form.shared_id, digests[n - 1])) for n, depth in marked]
        return sorted(found, key=lambda held: -held.depth)


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


def tier_depths(keys: Sequence[HeldKey], found: Sequence[bytes], limit: int) -> TierDepths:
    """Return which tiers hold the deepest prefixes, of `limit` workers if there are as many.

    `keys`: what was looked up, the deepest first, and `found`: the tiers that hold each.
    """
    deepest: dict[str, dict[str, int]] = {}
    for held, line in zip(keys, found, strict=True):
        for holder in line.decode().split():
            term, _, tier = holder.partition(":")
            deepest.setdefault(held.form.name if term == "*" else term, {}).setdefault(tier, held.depth)
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
