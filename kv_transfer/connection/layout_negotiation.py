"""Which layouts may differ: the shards of the two groups, of which one side's are parts of the other's; and prefill's
pages are rounded on the way where decode's are narrower.
"""

import math

import msgspec

from contracts.layout import KVLayout
from kv_transfer.connection.frames import Terms

TRANSPORTS = ("ucx",)
"""Those that round: they pack on a device."""
TP_SIZES = (1, 2, 4, 8)
"""Of the groups that a worker says it can take KV from, beside its own."""
_FROM, _TO = "bfloat16", "float8_e4m3fn"


def num_parts(one: KVLayout, other: KVLayout) -> int:
    """What moves of a page moves in so many parts: the shards of the finer one."""
    return max(one.tp_size, other.tp_size)


def narrows(sender: KVLayout, receiver: KVLayout) -> bool:
    return (sender.dtype, receiver.dtype) == (_FROM, _TO)


def is_possible(sender: Terms, receiver: Terms) -> bool:
    """The layouts are the same, or those of devices and differ in nothing but their shards, of which one side's divide
    into the other's, and in the numbers' format and its scales, where both operators let a transport that converts be
    taken.
    """
    ours, theirs = sender.layout, receiver.layout
    if ours == theirs:
        return True
    if not sender.memory == receiver.memory != "host" or not _divide(ours, theirs):
        return False
    if narrows(ours, theirs):
        ours = msgspec.structs.replace(ours, dtype=_TO, scales=theirs.scales)
        return _same_but_shards(ours, theirs) and _has_scales(receiver) and _round(sender, receiver)
    return _same_but_shards(ours, theirs)


def part_counts(layout: KVLayout) -> list[int]:
    """How many parts pages of this layout may be wanted in, by the peers that placement pairs it with."""
    sizes = (msgspec.structs.replace(layout, tp_size=size) for size in TP_SIZES)
    return sorted({num_parts(layout, other) for other in sizes if _divide(layout, other)})


def receivable_layouts(receiver: Terms) -> list[KVLayout]:
    """What it can land, its own first, of senders that are as it is in everything else, by what transport ever."""
    own, receiver = receiver.layout, msgspec.structs.replace(receiver, transport="auto")
    alike = [own, *(msgspec.structs.replace(own, tp_size=size) for size in TP_SIZES if size != own.tp_size)]
    wider = (
        [msgspec.structs.replace(layout, dtype=_FROM, scales="none") for layout in alike] if own.dtype == _TO else []
    )
    return [
        layout
        for layout in [*alike, *wider]
        if is_possible(msgspec.structs.replace(receiver, layout=layout, plane_scales=[]), receiver)
    ]


def can_carry(transport: str, sender: KVLayout, receiver: KVLayout) -> bool:
    """Of two layouts that may differ."""
    return transport in TRANSPORTS or not narrows(sender, receiver)


def may_use(terms: Terms, transport: str) -> bool:
    return transport in terms.available and terms.transport in ("auto", transport)


def _divide(one: KVLayout, other: KVLayout) -> bool:
    fewer, more = sorted((one.tp_size, other.tp_size))
    return more % fewer == 0 and one.num_kv_heads % more == 0


def _same_but_shards(one: KVLayout, other: KVLayout) -> bool:
    return msgspec.structs.replace(one, tp_size=other.tp_size) == other


def _has_scales(terms: Terms) -> bool:
    scales = terms.plane_scales
    return len(scales) == terms.layout.num_planes and all(math.isfinite(scale) and scale > 0 for scale in scales)


def _round(sender: Terms, receiver: Terms) -> bool:
    return any(may_use(sender, name) and may_use(receiver, name) for name in TRANSPORTS)
