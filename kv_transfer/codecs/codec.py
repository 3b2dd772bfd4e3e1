"""The coding of runs of pages to payloads that stand alone, and back.

A payload says its level, and is checked before anything is made of it. It is a head of HEAD_NBYTES and a body:

    version, level, dtype: uint8   exact pages' code: uint32, bytes   symbols' code: uint32, bytes   checksum: uint64
    flags: uint8 a run, 1 if the run could not be quantized           (lossy levels only)
    parameters of the quantized runs                                  (lossy levels only)
    bits of the exact pages besides their exponents
    code of the exact pages' exponents
    code of the quantized pages' symbols                              (lossy levels only)

Every length but those of the two codes follows from the runs and the format, which both ends know from the chunk's
header. The checksum, XXH3, covers all else, so that no flipped bit goes unnoticed.
"""

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from contracts.errors import Corrupt
from kv_transfer.codecs import entropy
from kv_transfer.codecs.level import BY_NUMBER, CodecLevel
from kv_transfer.codecs.numbers import from_float32, join_bits, split_bits, to_float32
from kv_transfer.codecs.page_format import PageFormat, PageRun
from kv_transfer.codecs.quantizer import QuantizedRun, parameters_nbytes, quantize, read_quantized

VERSION = 1
_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
_HEAD, _CHECKSUM = struct.Struct("<BBBxII"), struct.Struct("<Q")
HEAD_NBYTES = _HEAD.size + _CHECKSUM.size


def encode(data: np.ndarray, runs: Sequence[PageRun], format_: PageFormat, level: CodecLevel) -> bytes:
    """Return the payload of the runs' pages.

    `data`: uint8, the bytes of all pages in the order of the runs. Raises ValueError if they are not as long as the
    runs say.
    """
    _require_length(data, runs, format_)
    quantized: list[QuantizedRun | None] = []
    exact: list[np.ndarray] = []
    for run, pages in zip(runs, _bytes_of_runs(data, runs, format_), strict=True):
        found, num_exact = _quantize(pages, run, format_, level)
        quantized.append(found)
        exact.append(pages[: num_exact * format_.page_nbytes])
    exponents, rest = split_bits(exact[0] if len(exact) == 1 else np.concatenate(exact), format_.item_nbytes)
    exact_code = entropy.compress(exponents) if len(exponents) else b""
    parts = [b"".join(one.parameters() for one in quantized if one), rest, exact_code]
    symbols = [one.symbols.reshape(-1) for one in quantized if one]
    symbol_code = entropy.compress(np.concatenate(symbols)) if symbols else b""
    if not level.is_lossless:
        parts.insert(0, bytes(one is None for one in quantized))
    head = _HEAD.pack(VERSION, level.number, _DTYPES.index(format_.dtype), len(exact_code), len(symbol_code))
    body = b"".join([*parts, symbol_code])
    return b"".join([head, _CHECKSUM.pack(_checksum(head, body)), body])


def decode(payload: memoryview, runs: Sequence[PageRun], format_: PageFormat, out: np.ndarray) -> CodecLevel:
    """Write the pages of a payload to `out`, uint8 of their length, and return the level.

    Raises Corrupt, with parts of `out` written at most, if the payload is not one of these runs; nothing outside it is
    read, and no more is allocated than the pages take. Raises ValueError if `out` has another length than the runs say.
    """
    _require_length(out, runs, format_)
    body = memoryview(payload)[HEAD_NBYTES:]
    level, exact_nbytes, symbols_nbytes = _read_head(memoryview(payload)[:HEAD_NBYTES], body, format_)
    reader = _Reader(body)
    flags = [False] * len(runs) if level.is_lossless else [flag == 1 for flag in reader.take(len(runs)).tolist()]
    if level.is_lossless:
        exact = [run.num_pages for run in runs]
    else:
        exact = [run.num_pages if flag else run.num_exact for run, flag in zip(runs, flags, strict=True)]
    lossy = [run.num_pages - num_exact for run, num_exact in zip(runs, exact, strict=True)]
    parameters = [
        reader.take(parameters_nbytes(run, format_) if some else 0) for run, some in zip(runs, lossy, strict=True)
    ]
    num_exact = sum(exact) * format_.num_items
    rest = reader.take(num_exact * (format_.item_nbytes - 1))
    exponents = entropy.expand(reader.take(exact_nbytes).data, num_exact)
    symbols = entropy.expand(reader.take(symbols_nbytes).data, sum(lossy) * format_.num_items).view(np.int8)
    reader.require_end()
    joined = join_bits(exponents, rest, format_.item_nbytes)
    _write(out, runs, format_, exact, joined, symbols, parameters)
    return level


def level_of(payload: memoryview) -> str:
    """Return the name of the level in a payload's head. Raises Corrupt if it has none."""
    level = BY_NUMBER.get(payload[1]) if len(payload) >= HEAD_NBYTES else None
    if level is None:
        raise Corrupt("the payload names no level of compression")
    return level.name


class _Reader:
    """The bytes of a body, taken from its start to its end."""

    def __init__(self, body: memoryview) -> None:
        self._bytes, self._used = np.frombuffer(body, dtype=np.uint8), 0

    def take(self, nbytes: int) -> np.ndarray:
        """Return the next bytes, without a copy. Raises Corrupt if fewer are left."""
        end = self._used + nbytes
        if end > len(self._bytes):
            raise Corrupt(f"compressed KV ends at byte {len(self._bytes)}; its pages need {end}")
        taken, self._used = self._bytes[self._used : end], end
        return taken

    def require_end(self) -> None:
        if self._used != len(self._bytes):
            raise Corrupt(f"compressed KV has {len(self._bytes) - self._used} bytes more than its pages need")


def _quantize(
    pages: np.ndarray, run: PageRun, format_: PageFormat, level: CodecLevel
) -> tuple[QuantizedRun | None, int]:
    """Return the run quantized, if the level does and can, and how many pages at its start are not."""
    if level.is_lossless or run.num_exact >= run.num_pages:
        return None, run.num_pages
    values = to_float32(pages[run.num_exact * format_.page_nbytes :], format_.dtype)
    found = quantize(values, run, level, format_)
    return found, run.num_pages if found is None else run.num_exact


def _write(
    out: np.ndarray,
    runs: Sequence[PageRun],
    format_: PageFormat,
    exact: Sequence[int],
    joined: np.ndarray,
    symbols: np.ndarray,
    parameters: Sequence[np.ndarray],
) -> None:
    """Write the exact and the quantized pages of each run to their places."""
    used_exact = used_symbols = 0
    for run, pages, num_exact, some in zip(runs, _bytes_of_runs(out, runs, format_), exact, parameters, strict=True):
        size = num_exact * format_.page_nbytes
        pages[:size] = joined[used_exact : used_exact + size]
        used_exact += size
        if count := (run.num_pages - num_exact) * format_.num_items:
            one = read_quantized(symbols[used_symbols : used_symbols + count], some, run, format_)
            with np.errstate(over="ignore", invalid="ignore"):
                pages[size:] = from_float32(one.values(), format_.dtype)
            used_symbols += count


def _read_head(head: memoryview, body: memoryview, format_: PageFormat) -> tuple[CodecLevel, int, int]:
    """Return the level and the lengths of the two codes. Raises Corrupt."""
    if len(head) < HEAD_NBYTES:
        raise Corrupt(f"compressed KV of {len(head)} bytes has no head")
    version, number, dtype, exact_nbytes, symbols_nbytes = _HEAD.unpack(head[: _HEAD.size])
    if version != VERSION:
        raise Corrupt(f"compressed KV is of version {version}; this worker reads {VERSION}")
    if _CHECKSUM.unpack(head[_HEAD.size :])[0] != _checksum(head[: _HEAD.size], body):
        raise Corrupt("the checksum of compressed KV differs")
    level = BY_NUMBER.get(number)
    if level is None:
        raise Corrupt(f"compressed KV has level {number}, which is not known here")
    if dtype >= len(_DTYPES) or _DTYPES[dtype] != format_.dtype:
        raise Corrupt(f"compressed KV is not of dtype {format_.dtype}")
    return level, exact_nbytes, symbols_nbytes


def _checksum(head: bytes | memoryview, body: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(body, xxhash.xxh3_64_intdigest(head))


def _bytes_of_runs(data: np.ndarray, runs: Sequence[PageRun], format_: PageFormat) -> list[np.ndarray]:
    ends = np.cumsum([run.num_pages for run in runs]) * format_.page_nbytes
    return np.split(data, ends[:-1])


def _require_length(data: np.ndarray, runs: Sequence[PageRun], format_: PageFormat) -> None:
    expected = sum(run.num_pages for run in runs) * format_.page_nbytes
    if len(data) != expected or not expected:
        raise ValueError(f"{len(data)} bytes for runs of pages that take {expected}")
