"""One message on the data path: a part of a chunk, and the words in front of it that say which."""

import msgspec
import numpy as np

from contracts import codec
from contracts.errors import Corrupt
from contracts.handoff import ChunkHeader

META_NBYTES = 512
_LENGTH_NBYTES = 2


class KVSegment(msgspec.Struct, frozen=True, array_like=True):
    """Bytes `[offset, offset + nbytes)` of the chunk.

    `header.checksum` runs: it covers the chunk from its start to this end. `is_after_cut`: the chunk before was given
    up, and the Abort that says so, on the control connection, may be heard later than this.
    """

    header: ChunkHeader
    offset: int
    nbytes: int
    is_after_cut: bool = False

    @property
    def is_last(self) -> bool:
        return self.offset + self.nbytes == self.header.nbytes


_decoder = codec.decoder(KVSegment)


def write_meta(piece: KVSegment, meta: np.ndarray) -> None:
    """Put `piece` into `meta`, uint8 `[META_NBYTES]`. Raises ValueError if its ids are too long."""
    payload = codec.encode(piece)
    if len(payload) > META_NBYTES - _LENGTH_NBYTES:
        raise ValueError(f"request_id of {len(piece.header.request_id)} characters is too long to send")
    framed = len(payload).to_bytes(_LENGTH_NBYTES, "little") + payload
    meta[: len(framed)] = np.frombuffer(framed, dtype=np.uint8)


def read_meta(meta: np.ndarray) -> KVSegment:
    """Raises Corrupt if these are not the words of a piece: sender and receiver have lost step."""
    nbytes = int.from_bytes(meta[:_LENGTH_NBYTES].tobytes(), "little")
    try:
        return _decoder.decode(meta[_LENGTH_NBYTES : _LENGTH_NBYTES + min(nbytes, META_NBYTES)].tobytes())
    except msgspec.DecodeError as error:
        raise Corrupt(f"the head of a data message is unreadable: {error}") from error
