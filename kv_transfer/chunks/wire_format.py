"""One message on the data path: a segment of a chunk behind the header that identifies it."""

import msgspec
import numpy as np

from contracts import codec
from contracts.errors import Corrupt
from contracts.handoff import ChunkHeader

META_NBYTES = 512
_LENGTH_NBYTES = 2


class KVSegment(msgspec.Struct, frozen=True, array_like=True):
    """The bytes `[offset, offset + nbytes)` of a chunk.

    `header.checksum` is a running one: it covers the chunk from its start to the end of this segment. `is_after_cut`:
    the chunk before was given up, and the Abort for it, on the control connection, may arrive later than this. `level`:
    of the codec (kv_transfer.codecs), whose payload of `coded_nbytes` the message carries in place of the bytes; empty
    for the bytes themselves. Offsets, sizes and the checksum are those of the decoded bytes.
    """

    header: ChunkHeader
    offset: int
    nbytes: int
    is_after_cut: bool = False
    level: str = ""
    coded_nbytes: int = 0

    @property
    def wire_nbytes(self) -> int:
        """Return the bytes that the message carries behind its meta."""
        return self.coded_nbytes if self.level else self.nbytes

    @property
    def is_last(self) -> bool:
        return self.offset + self.nbytes == self.header.nbytes


_decoder = codec.decoder(KVSegment)


def write_meta(piece: KVSegment, meta: np.ndarray) -> None:
    """Write `piece` into `meta`, uint8 `[META_NBYTES]`. Raises ValueError if its ids are too long."""
    payload = codec.encode(piece)
    if len(payload) > META_NBYTES - _LENGTH_NBYTES:
        raise ValueError(f"request_id of {len(piece.header.request_id)} characters is too long to send")
    framed = len(payload).to_bytes(_LENGTH_NBYTES, "little") + payload
    meta[: len(framed)] = np.frombuffer(framed, dtype=np.uint8)


def read_meta(meta: np.ndarray) -> KVSegment:
    """Return the segment in `meta`. Raises Corrupt if there is none: the two ends have lost step."""
    nbytes = int.from_bytes(meta[:_LENGTH_NBYTES].tobytes(), "little")
    try:
        return _decoder.decode(meta[_LENGTH_NBYTES : _LENGTH_NBYTES + min(nbytes, META_NBYTES)].tobytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the head of a data message is unreadable: {error}") from error
