"""The chained hashes of blocks of token ids.

Equal prefixes have equal hashes, on any machine and in any process.
"""

import hashlib
from array import array
from collections.abc import Sequence


def salted(salt: str, adapter: bytes = b"") -> bytes:
    """Return the start of a prompt's hash chain; it is empty without a salt and without an adapter.

    Prompts with different salts share no block, nor do those that different LoRA adapters compute, of which `adapter`
    is the digest of the weights. A start is hashed differently from a block, so that none equals the digest of a block.
    """
    if adapter:
        text = len(adapter).to_bytes(4, "little") + adapter + salt.encode()
        return hashlib.blake2b(text, digest_size=16, person=b"cache adapter").digest()
    return hashlib.blake2b(salt.encode(), digest_size=16, person=b"cache salt").digest() if salt else b""


def block_key(shared_id: bytes, chain_digest: bytes, group: int = 0) -> bytes:
    """Return the 16-byte key under which workers and stores share a block of KV.

    `shared_id` (contracts.layout.KVLayout.shared_id) stands for the model and the form of the bytes, `chain_digest`, as
    `chain_hashes` gives it, for salt, adapter, and all tokens up to the block's end. `group`: of the layout.
    """
    place = shared_id + group.to_bytes(2, "little")
    return hashlib.blake2b(place + chain_digest, digest_size=16, person=b"kv block").digest()


def inexact_digest(chain_digest: bytes, loss: str) -> bytes:
    """Return the digest of a block whose KV, or that of one before it, has lost something.

    `loss`: see contracts.kv_loss. Whoever looks for the block's own digest does not find it.
    """
    return hashlib.blake2b(loss.encode() + b"\0" + chain_digest, digest_size=16, person=b"inexact kv").digest()


def chain_hashes(
    token_ids: Sequence[int], block_size: int, limit: int | None = None, previous: bytes = b""
) -> list[bytes]:
    """Return a 16-byte BLAKE2b digest per full block, over the digest before and the block's ids.

    Ids are 32-bit little-endian. `previous` continues a chain: it is the digest of the block before `token_ids`.
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
