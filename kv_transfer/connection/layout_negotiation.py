"""The rules for KV layouts that may differ between sender and receiver.

The tensor-parallel sizes may differ if one divides the other; and prefill's pages are rounded on the way if decode's
are narrower. A group of layers whose weights are not the model's, such as a draft head's KV, moves if both ends have
it, equal in every field; else it is left out.

A latent has one head, which each GPU of a group has whole, so the layout of its model has one shard whatever the number
of GPUs: between groups of other sizes nothing is cut, and each GPU of the receiver gets a copy of the same pages.
"""

import math

import msgspec

from contracts.kv_loss import EXACT, of_rounding
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
    converts. Optional groups don't count.
    """
    ours, theirs = sender.layout.model_part, receiver.layout.model_part
    if ours == theirs:
        return True
    if not sender.memory == receiver.memory != "host" or not _divide(ours, theirs):
        return False
    if narrows(ours, theirs):
        ours = ours.with_groups(dtype=_TO, scales=theirs.only_group.scales)
        return _same_but_shards(ours, theirs) and _has_scales(receiver) and _round(sender, receiver)
    return _same_but_shards(ours, theirs)


def shared_groups(sender: KVLayout, receiver: KVLayout) -> list[tuple[int, int]]:
    """Return the groups that move between two layouts whose model parts fit.

    Each has its index in either layout; they are in the sender's order. The model's own groups all move. Pages that are
    re-sharded or rounded on the way take no optional group along.
    """
    needed = [_where(layout, is_optional=False) for layout in (sender, receiver)]
    pairs = list(zip(*needed, strict=True))
    if sender.tp_size != receiver.tp_size or narrows(sender, receiver):
        return pairs
    theirs = {receiver.groups[index]: index for index in _where(receiver, is_optional=True)}
    ours = _where(sender, is_optional=True)
    return pairs + [(index, theirs[group]) for index in ours if (group := sender.groups[index]) in theirs]


def rounding_loss(sender: KVLayout, receiver: KVLayout) -> str:
    """Return the loss that the sender's KV has for the receiver, which may compute other values."""
    return EXACT if sender.rounding == receiver.rounding else of_rounding(sender.rounding)


def why_left_out(ours: KVLayout, theirs: KVLayout) -> str:
    """Return why an optional group, of either end, does not move; empty if none is left out."""
    num_moved = len(shared_groups(ours, theirs))
    if num_moved == len(ours.groups) == len(theirs.groups):
        return ""
    field, here, there = ours.difference(theirs) or ("groups", ours.groups, theirs.groups)
    return f"{field} is {here} here, {there} there"


def part_counts(layout: KVLayout) -> list[int]:
    """Return the numbers of parts in which the peers that placement pairs with this layout may want pages."""
    sizes = (msgspec.structs.replace(layout, tp_size=size) for size in TP_SIZES)
    return sorted({num_parts(layout, other) for other in sizes if _divide(layout, other)})


def receivable_layouts(receiver: Terms) -> list[KVLayout]:
    """Return the layouts that it can receive by any transport, its own first.

    The senders are taken to equal it in everything else. Optional groups are left out, on both sides.
    """
    own, receiver = receiver.layout.model_part, msgspec.structs.replace(receiver, transport="auto")
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
    """Return the number format of a model whose layers are one group."""
    needed = layout.model_part.groups
    return needed[0].dtype if len(needed) == 1 else None


def _where(layout: KVLayout, is_optional: bool) -> list[int]:
    return [index for index, group in enumerate(layout.groups) if group.is_optional == is_optional]


def _divide(one: KVLayout, other: KVLayout) -> bool:
    fewer, more = sorted((one.tp_size, other.tp_size))
    return more % fewer == 0 and all(group.num_kv_heads % more == 0 for group in one.groups)


def _same_but_shards(one: KVLayout, other: KVLayout) -> bool:
    return msgspec.structs.replace(one, tp_size=other.tp_size) == other


def _has_scales(terms: Terms) -> bool:
    scales = terms.plane_scales
    return len(scales) == terms.layout.model_part.only_group.num_planes and all(
        math.isfinite(scale) and scale > 0 for scale in scales
    )


def _round(sender: Terms, receiver: Terms) -> bool:
    return any(may_use(sender, name) and may_use(receiver, name) for name in TRANSPORTS)
