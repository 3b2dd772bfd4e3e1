"""Which layouts may differ: prefill's pages are rounded on the way where decode's are narrower."""

import math

import msgspec

from kv_transfer.frames import Terms

TRANSPORTS = ("ucx",)
"""Those that pack on a device."""
_FROM, _TO = "bfloat16", "float8_e4m3fn"


def is_possible(sender: Terms, receiver: Terms) -> bool:
    """Layouts of devices differ in nothing but the numbers' format and its scales, and both operators let a transport
    that converts be taken.
    """
    return _narrows(sender, receiver) and any(_takes(sender, name) and _takes(receiver, name) for name in TRANSPORTS)


def _narrows(sender: Terms, receiver: Terms) -> bool:
    scales, theirs = receiver.plane_scales, receiver.layout
    return (
        sender.memory == receiver.memory != "host"
        and (sender.layout.dtype, theirs.dtype) == (_FROM, _TO)
        and msgspec.structs.replace(sender.layout, dtype=_TO, scales=theirs.scales) == theirs
        and len(scales) == theirs.num_planes
        and all(math.isfinite(scale) and scale > 0 for scale in scales)
    )


def _takes(terms: Terms, name: str) -> bool:
    return name in terms.available and terms.transport in ("auto", name)
