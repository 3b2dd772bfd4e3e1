"""A prefill worker that does not keep to the protocol: what it changes in a chunk before it goes out."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from kv_transfer.chunks import chunk_plan as plan
from kv_transfer.chunks.wire_format import META_NBYTES, KVSegment, write_meta
from kv_transfer.data_path.sender import ChunkJob, Sender
from tests.kv_transfer.kv_owner import CHUNK_TOKENS, MESSAGE_NBYTES


@dataclass(frozen=True)
class Said:
    """One message: its words, None for noise, and its bytes."""

    piece: KVSegment | None
    data: np.ndarray


def lie_once(crime: str) -> None:
    """In this process the next chunk goes out as `CRIMES[crime]` makes it."""
    honest = Sender._send_chunk

    def lying(sender: Sender, job: ChunkJob) -> int:
        Sender._send_chunk = honest  # type: ignore[method-assign]
        for said in CRIMES[crime](_honest_words(sender, job)):
            _say(sender, said)
        return job.header.nbytes

    Sender._send_chunk = lying  # type: ignore[method-assign]


def _honest_words(sender: Sender, job: ChunkJob) -> list[Said]:
    staging, words = sender._stagings[job.header.group], []
    page_nbytes, units, checksum = staging.unit_nbytes, staging.units(job.pages), staging.begin(job.header).checksum
    for span in plan.split(len(units), MESSAGE_NBYTES // page_nbytes):
        data = np.empty(span.num_units * page_nbytes, dtype=np.uint8)
        checksum = staging.pack(units[span.first : span.last], data, checksum)
        header = msgspec.structs.replace(job.header, checksum=checksum)
        words.append(Said(KVSegment(header, span.first * page_nbytes, len(data)), data))
    return words


def _say(sender: Sender, said: Said) -> None:
    slot = sender._channel.acquire()
    slot.payload[: len(said.data)] = said.data
    if said.piece is None:
        slot.meta[:] = np.frombuffer(b"\xff" * META_NBYTES, dtype=np.uint8)
    else:
        write_meta(said.piece, slot.meta)
    sender._channel.send(slot, said.piece.nbytes if said.piece else len(said.data))


def _with_header(**changes: object) -> Callable[[list[Said]], list[Said]]:
    def change(words: list[Said]) -> list[Said]:
        return [_changed(said, header=msgspec.structs.replace(_header(said), **changes)) for said in words]

    return change


def _changed(said: Said, **changes: object) -> Said:
    assert said.piece is not None
    return Said(msgspec.structs.replace(said.piece, **changes), said.data)


def _header(said: Said):
    assert said.piece is not None
    return said.piece.header


def _flip(words: list[Said]) -> list[Said]:
    words[-1].data[-1] ^= 1
    return words


CRIMES: dict[str, Callable[[list[Said]], list[Said]]] = {
    "one bit changed": _flip,
    "messages swapped": lambda words: [words[0], words[2], words[1], words[3]],
    "first message missing": lambda words: words[1:],
    "said twice": lambda words: words * 2,
    "an old epoch": _with_header(epoch=0),
    "a future epoch": _with_header(epoch=7),
    "a request that nobody offered": _with_header(request_id="somebody else's"),
    "another layout": _with_header(layout_id="another"),
    "tokens beyond the offer": _with_header(first_token=100 * CHUNK_TOKENS),
    "tokens before the first": _with_header(first_token=-CHUNK_TOKENS),
    "tokens from inside a block": _with_header(first_token=3),
    "more bytes than the tokens have": _with_header(nbytes=1 << 40),
    "a message of half a page": lambda words: [_changed(words[0], nbytes=100)],
    "a message out of place": lambda words: [*words[:3], _changed(words[2], offset=3 * MESSAGE_NBYTES - 8192)],
    "noise for words": lambda words: [Said(None, words[0].data)],
}
