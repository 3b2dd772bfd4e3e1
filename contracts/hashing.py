"""Chained block hashes: equal prefixes of token ids have equal hashes, on any machine and in any process."""

import hashlib
from array import array
from collections.abc import Sequence
from itertools import islice


def salted(salt: str) -> bytes:
    """Where the chain of a prompt begins: prompts with different salts share no block. Empty for no salt.

    No block's digest is one, or a salt with the bytes of a block's ids would begin where that block ends.
    """
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"cache salt").digest() if salt else b""


def chain_hashes(
    token_ids: Sequence[int], block_size: int, limit: int | None = None, previous: bytes = b""
) -> list[bytes]:
    """One 16-byte BLAKE2b digest per full block: over the one before and the block's ids (32-bit little-endian).

    `previous` continues a chain: the digest of the block before `token_ids`.
    """
    hashes: list[bytes] = []
    for start in islice(range(0, len(token_ids) - block_size + 1, block_size), limit):
        block = array("i", token_ids[start : start + block_size]).tobytes()
        previous = hashlib.blake2b(previous + block, digest_size=16).digest()
        hashes.append(previous)
    return hashes
