"""The loss of KV: how it differs from what a worker computes for the same tokens.

It is the name of a level of compression that loses something, or says in which other number format the KV was computed,
and is empty for KV that is exact. KV that is computed after inexact KV is inexact, too. The loss is a part of a block's
identity, so that nobody who asks for exact KV gets another (contracts.hashing.inexact_digest).
"""

EXACT = ""
UNCHECKED = "unchecked"
"""The loss of KV that nobody compared with its checksum. No request takes it from a cache."""
MIXED = "mixed"
"""The loss of KV that went through several levels. No request takes it from a cache."""


def of_rounding(rounding: str) -> str:
    """Return the loss of KV that is computed in another number format than one's own (KVLayout.rounding)."""
    return f"as {rounding}"


def joined(one: str, other: str) -> str:
    """Return the loss of KV that has suffered both."""
    if not one or not other or one == other:
        return one or other
    return UNCHECKED if UNCHECKED in (one, other) else MIXED
