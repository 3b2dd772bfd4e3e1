"""The conversion of structs to bytes and back (msgpack), and frames on a stream.

A frame is a 4-byte little-endian length, then the payload.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

WIRE_VERSION = 14
"""Version of what services say to each other over a KV link and keep in Redis: those of two versions share neither."""
MAX_FRAME_NBYTES = 64 << 20
HEADER_NBYTES = 4

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder for `kind`, a Struct or a union of tagged ones.

    It is built once and used often, and raises msgspec.DecodeError on bad bytes; UnicodeDecodeError where a text is not
    UTF-8.
    """
    return msgspec.msgpack.Decoder(kind)


def frame(message: object) -> bytes:
    payload = encode(message)
    return len(payload).to_bytes(HEADER_NBYTES, "little") + payload


class FrameReader:
    """The reader that cuts a byte stream into payloads: feed it what arrived, get the complete frames."""

    def __init__(self, max_nbytes: int = MAX_FRAME_NBYTES) -> None:
        self._buffer = bytearray()
        self._max_nbytes = max_nbytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that are complete.

        Raise ValueError on a frame longer than `max_nbytes`, after those before it: the peer does not speak this
        protocol, or is out of step.
        """
        self._buffer += data
        return self._complete()

    def _complete(self) -> Iterator[bytes]:
        start = 0
        try:
            while len(self._buffer) - start >= HEADER_NBYTES:
                nbytes = int.from_bytes(self._buffer[start : start + HEADER_NBYTES], "little")
                if nbytes > self._max_nbytes:
                    raise ValueError(f"a frame of {nbytes} bytes; the limit is {self._max_nbytes}")
                first, end = start + HEADER_NBYTES, start + HEADER_NBYTES + nbytes
                if len(self._buffer) < end:
                    break
                start = end
                yield bytes(self._buffer[first:end])
        finally:
            del self._buffer[:start]
