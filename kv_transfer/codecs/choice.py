"""The choice of a level: what saves more time on the link than it takes at both ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_NBYTES_PER_S = 1e9
"""A link that moves this many bytes a second is never compressed for: a coder on one core is slower than that."""


@dataclass(frozen=True, slots=True)
class CodecRate:
    """What a level does here: how many times smaller it makes KV, and raw bytes a second of each end."""

    ratio: float
    encode_nbytes_per_s: float
    decode_nbytes_per_s: float


def choose_level(
    nbytes: int, message_nbytes: int, bandwidth: float, rates: Mapping[str, CodecRate], allowed: Sequence[str]
) -> str:
    """Return the allowed level with which `nbytes` of KV are at the other end soonest; "" for none.

    `bandwidth`: bytes a second that the link takes, 0.0 while unknown, with which nothing is compressed. Levels that
    take equally long go by the order of `allowed`, the most exact first. Coding and sending of different messages
    overlap, so what counts is the slowest of the three stages, and the first message's way through the other two. For
    one message this is: bytes * (1 - 1 / ratio) / bandwidth > encoding + decoding.
    """
    if not 0 < bandwidth < MAX_NBYTES_PER_S or nbytes <= 0:
        return ""
    best, least_s = "", nbytes / bandwidth
    for name in allowed:
        if name in rates and (time_s := transfer_s(nbytes, message_nbytes, bandwidth, rates[name])) < least_s:
            best, least_s = name, time_s
    return best


def transfer_s(nbytes: int, message_nbytes: int, bandwidth: float, rate: CodecRate) -> float:
    """Return the seconds from the first byte encoded to the last decoded.

    `message_nbytes`: raw bytes of a message, at most.
    """
    stages = [1 / rate.encode_nbytes_per_s, 1 / rate.ratio / bandwidth, 1 / rate.decode_nbytes_per_s]
    slowest = max(stages)
    return nbytes * slowest + min(nbytes, message_nbytes) * (sum(stages) - slowest)
