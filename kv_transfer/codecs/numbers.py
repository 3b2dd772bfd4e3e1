"""The number formats of pages: their values in float32, and back; and their bits in planes."""

from collections.abc import Callable

import numpy as np

FINITE_MAX = {"float32": 3.4028234e38, "bfloat16": 3.3895314e38, "float16": 65504.0, "float8_e4m3fn": 448.0}
"""The largest number of each format."""
RELATIVE_STEP = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float8_e4m3fn": 2.0**-3}
"""The distance of neighbouring numbers of each format, as a share of the smaller one."""
SMALLEST_STEP = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24, "float8_e4m3fn": 2.0**-9}
"""The distance of neighbouring numbers next to zero."""


def _e4m3_values() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (8 + mantissa) * np.exp2(exponent - 10.0)
    values = np.where(exponent > 0, normal, mantissa * 2.0**-9)
    values[(codes & 127) == 127] = np.nan
    return np.where(codes & 128, -values, values).astype(np.float32)


_E4M3 = _e4m3_values()


def to_float32(data: np.ndarray, dtype: str) -> np.ndarray:
    """Return the values of uint8 `data`, bytes of `dtype`, flat."""
    if dtype == "float32":
        return data.view(np.float32)
    if dtype == "float16":
        return data.view(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        wide = data.view(np.uint16).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return _E4M3[data]


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return finite `values`, flat, as uint8 bytes of `dtype`.

    They are rounded to nearest, even, and held at its largest.
    """
    return _ROUND[dtype](np.ascontiguousarray(values)).view(np.uint8)


def _to_float16(values: np.ndarray) -> np.ndarray:
    most = FINITE_MAX["float16"]
    return np.clip(values, -most, most).astype(np.float16)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    most = np.float32(FINITE_MAX["bfloat16"])
    bits = np.clip(values, -most, most).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _to_e4m3(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    size = np.minimum(np.abs(values), np.float32(448))
    # The bits of a float32 of which 3 of the mantissa stay, with an exponent of the smaller bias.
    normal = size.view(np.uint32)
    normal = ((normal + 0x7FFFF + (normal >> 20 & 1)) >> 20) - (120 << 3)
    small = np.rint(size * np.float32(512)).astype(np.uint32)  # 8 of these are the smallest normal number, code 8
    codes = np.where(size < 2.0**-6, small, normal)
    return (codes | (bits >> 24 & 128)).astype(np.uint8)


_ROUND: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float32": lambda values: values,
    "float16": _to_float16,
    "bfloat16": _to_bfloat16,
    "float8_e4m3fn": _to_e4m3,
}


def split_bits(data: np.ndarray, item_nbytes: int) -> tuple[np.ndarray, bytes]:
    """Return the bytes with the exponents, uint8 one a number, and all other bits.

    `data`: uint8. A number's bits are turned by one first, so that the sign, which is random, goes to the other bits.
    Numbers of one byte have no other bits.
    """
    if item_nbytes == 1:
        return data, b""
    if item_nbytes == 2:
        word = data.view(np.uint16)
        word = word << 1 | word >> 15
        return (word >> 8).astype(np.uint8), word.astype(np.uint8).tobytes()
    word = data.view(np.uint32)
    word = word << 1 | word >> 31
    low, middle = word.astype(np.uint16), (word >> 16).astype(np.uint8)
    return (word >> 24).astype(np.uint8), low.tobytes() + middle.tobytes()


def join_bits(exponents: np.ndarray, rest: np.ndarray, item_nbytes: int) -> np.ndarray:
    """Return the bytes that `split_bits` took apart.

    `rest`: uint8 of `len(exponents) * (item_nbytes - 1)`.
    """
    if item_nbytes == 1:
        return exponents
    if item_nbytes == 2:
        word = exponents.astype(np.uint16)
        word <<= 8
        word |= rest
        return (word >> 1 | word << 15).view(np.uint8)
    count = len(exponents)
    word = exponents.astype(np.uint32)
    word <<= 8
    word |= rest[2 * count :]
    word <<= 16
    word |= np.frombuffer(rest[: 2 * count], dtype=np.uint16)
    return (word >> 1 | word << 31).view(np.uint8)
