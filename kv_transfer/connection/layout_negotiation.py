"""The rules for KV layouts that may differ between sender and receiver.

The tensor-parallel sizes may differ if one divides the other; and prefill's pages are rounded on the way if decode's
are narrower.
"""

import math

import msgspec

from contracts.layout import KVLayout
from kv_transfer.connection.handshake_frames import Terms

TRANSPORTS = ("ucx",)
"""The transports that can round: they pack on a device."""
TP_SIZES = (1, 2, 4, 8)
"""The tensor-parallel sizes that a worker publishes as receivable, besides its own."""
_FROM, _TO = "bfloat16", "float8_e4m3fn"


def num_parts(one: KVLayout, other: KVLayout) -> int:
    """Return how many parts a page is moved in: the shards of the side that has more."""
    return max(one.tp_size, other.tp_size)


def narrows(sender: KVLayout, receiver: KVLayout) -> bool:
    """Return whether pages must be rounded on the way, which only those of a single group are."""
    return _dtype(sender) == _FROM and _dtype(receiver) == _TO


def is_possible(sender: Terms, receiver: Terms) -> bool:
    """Return whether KV of the sender's layout can be written to pages of the receiver's.

    The layouts are the same; or both are in the memory of devices and differ only in their shards, of which one side's
    number divides the other's, and in the number format and its scales, if both operators allow a transport that
    converts.
    """
    ours, theirs = sender.layout, receiver.layout
    if ours == theirs:
        return True
    if not sender.memory == receiver.memory != "host" or not _divide(ours, theirs):
        return False
    if narrows(ours, theirs):
        ours = ours.with_groups(dtype=_TO, scales=theirs.only_group.scales)
        return _same_but_shards(ours, theirs) and _has_scales(receiver) and _round(sender, receiver)
    return _same_but_shards(ours, theirs)


def part_counts(layout: KVLayout) -> list[int]:
    """Return the numbers of parts in which the peers that placement pairs with this layout may want pages."""
    sizes = (msgspec.structs.replace(layout, tp_size=size) for size in TP_SIZES)
    return sorted({num_parts(layout, other) for other in sizes if _divide(layout, other)})


def receivable_layouts(receiver: Terms) -> list[KVLayout]:
    """Return the layouts that it can receive by any transport, its own first.

    The senders are taken to equal it in everything else.
    """
    own, receiver = receiver.layout, msgspec.structs.replace(receiver, transport="auto")
    alike = [own, *(msgspec.structs.replace(own, tp_size=size) for size in TP_SIZES if size != own.tp_size)]
    wider = [layout.with_groups(dtype=_FROM, scales="none") for layout in alike] if _dtype(own) == _TO else []
    return [
        layout
        for layout in [*alike, *wider]
        if is_possible(msgspec.structs.replace(receiver, layout=layout, plane_scales=[]), receiver)
    ]


def can_carry(transport: str, sender: KVLayout, receiver: KVLayout) -> bool:
    """Return whether the transport can carry KV between two layouts that may differ."""
    return transport in TRANSPORTS or not narrows(sender, receiver)


def may_use(terms: Terms, transport: str) -> bool:
    """Return whether a worker has the transport, and its operator allows it."""
    return transport in terms.available and terms.transport in ("auto", transport)


def _dtype(layout: KVLayout) -> str | None:
    """Return the number format of a layout of one group."""
    return layout.groups[0].dtype if len(layout.groups) == 1 else None


def _divide(one: KVLayout, other: KVLayout) -> bool:
    fewer, more = sorted((one.tp_size, other.tp_size))
    return more % fewer == 0 and all(group.num_kv_heads % more == 0 for group in one.groups)


def _same_but_shards(one: KVLayout, other: KVLayout) -> bool:
    return msgspec.structs.replace(one, tp_size=other.tp_size) == other


def _has_scales(terms: Terms) -> bool:
    scales = terms.plane_scales
    return len(scales) == terms.layout.only_group.num_planes and all(
        math.isfinite(scale) and scale > 0 for scale in scales
    )


def _round(sender: Terms, receiver: Terms) -> bool:
    return any(may_use(sender, name) and may_use(receiver, name) for name in TRANSPORTS)
