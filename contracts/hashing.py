"""Chained block hashes: equal prefixes of token ids have equal hashes, on any machine and in any process."""

import hashlib
from array import array
from collections.abc import Sequence


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
    num_blocks = len(token_ids) // block_size
    if limit is not None:
        num_blocks = min(num_blocks, limit)
    ids = array("i", token_ids[: num_blocks * block_size])
    data, nbytes = ids.tobytes(), block_size * ids.itemsize
    for start in range(0, len(data), nbytes):
        previous = hashlib.blake2b(previous + data[start : start + nbytes], digest_size=16).digest()
        hashes.append(previous)
    return hashes
