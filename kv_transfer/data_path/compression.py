"""The compression of a link's segments: which pages they hold, and when a level pays."""

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from contracts.handoff import ChunkHeader
from contracts.layout import KVLayout
from kv_transfer.codecs import codec
from kv_transfer.codecs.choice import MAX_NBYTES_PER_S, CodecRate, choose_level
from kv_transfer.codecs.level import EXACT_PAGES, LEVELS
from kv_transfer.codecs.numbers import from_float32
from kv_transfer.codecs.page_format import PageFormat, PageRun, runs_of
from kv_transfer.events import LevelStats

RAW = "raw"
"""The name under which messages that were not compressed are counted."""
_TRIAL_PAGES = 32
_TRIALS = 4  # of which the best counts: the first loads what it needs, others may be disturbed
_MEMORY_S = 0.5
"""The seconds after which a look at the link's bandwidth counts for half."""
log = logging.getLogger(__name__)


class SegmentCodec:
    """The codec of one link's segments, at either end: `levels` are those that both ends allow.

    Units are parts of pages of one plane, part by part and in each plane by plane, as HostStaging orders them. The
    first pages of a prompt keep every bit at every level, and so do optional groups, which are small beside the model's
    and hold more than numbers, and states, whose error every later token would inherit. `stats`: by level, of the
    messages that were counted.
    """

    def __init__(self, layout: KVLayout, num_parts: int, levels: Sequence[str]) -> None:
        self.levels = list(levels)
        self.formats = [
            PageFormat(group.dtype, group.num_kv_heads // num_parts, group.rows, group.head_dim)
            for group in layout.groups
        ]
        self._is_key = [group.are_keys * (group.num_layers * num_parts) for group in layout.groups]
        self._layout = layout
        self.stats: dict[str, LevelStats] = {}

    def count(self, level: str, nbytes: int, wire_nbytes: int, seconds: float) -> None:
        """Count a message; `level` is empty for one that was not compressed."""
        name = level or RAW
        self.stats[name] = self.stats.get(name, LevelStats()).plus(nbytes, wire_nbytes, seconds)

    @property
    def format(self) -> PageFormat:
        """Return the format of the first group's pages."""
        return self.formats[0]

    def may_code(self, header: ChunkHeader) -> bool:
        """Return whether the segments of a chunk may be compressed: those of a model's KV may."""
        group = self._layout.groups[header.group]
        return not (group.is_optional or group.is_state)

    def encode(self, header: ChunkHeader, first: int, pages: np.ndarray, level: str) -> bytes:
        """Return the payload of the chunk's units from `first` on. `pages`: uint8, their bytes."""
        form = self.formats[header.group]
        return codec.encode(pages, self._runs(header, first, len(pages) // form.page_nbytes), form, LEVELS[level])

    def decode(self, header: ChunkHeader, first: int, payload: np.ndarray, out: np.ndarray) -> None:
        """Write the units from `first` on to `out`, uint8 of their bytes. Raises Corrupt."""
        form = self.formats[header.group]
        codec.decode(payload.data, self._runs(header, first, len(out) // form.page_nbytes), form, out)

    def rates(self) -> dict[str, CodecRate]:
        """Return what the levels do here, by a trial of some milliseconds on random values."""
        values = np.random.default_rng(0).normal(size=_TRIAL_PAGES * self.format.num_items).astype(np.float32)
        data, out = from_float32(values, self.format.dtype), np.empty(_TRIAL_PAGES * self.format.page_nbytes, np.uint8)
        return {name: self._rate(name, data.copy(), out) for name in self.levels}

    def _rate(self, name: str, data: np.ndarray, out: np.ndarray) -> CodecRate:
        run = [PageRun(_TRIAL_PAGES, is_key=True)]
        payload, encode_s, decode_s = b"", float("inf"), float("inf")
        for _ in range(_TRIALS):
            start = time.perf_counter()
            payload = codec.encode(data, run, self.format, LEVELS[name])
            middle = time.perf_counter()
            codec.decode(memoryview(payload), run, self.format, out)
            encode_s, decode_s = min(encode_s, middle - start), min(decode_s, time.perf_counter() - middle)
        if not LEVELS[name].is_lossless:  # decoded at the sender too, for the checksum of what the receiver will have
            encode_s += decode_s
        return CodecRate(len(data) / len(payload), len(data) / encode_s, len(data) / decode_s)

    def _runs(self, header: ChunkHeader, first: int, count: int) -> list[PageRun]:
        group = self._layout.groups[header.group]
        num_exact = max(0, EXACT_PAGES - header.first_token // group.block_size)
        is_key = self._is_key[header.group]
        return runs_of(first, first + count, group.num_blocks(header.num_tokens), is_key, num_exact)


class LinkBandwidth:
    """The bytes a second that a link takes, from how fast its socket's queue drains.

    Only times count at whose start and end there was a queue: then the link was the limit.
    """

    def __init__(self) -> None:
        self._sent = self._drained = 0
        self._was_queued, self._last_s = False, 0.0
        self._nbytes = self._seconds = 0.0

    @property
    def nbytes_per_s(self) -> float:
        """Return bytes a second; 0.0 while unknown."""
        return self._nbytes / self._seconds if self._seconds > 0 else 0.0

    def observe(self, sent_nbytes: int, queued_nbytes: int, now_s: float) -> None:
        """Record that so many more bytes were given to the socket, and how many it still has."""
        self._sent += sent_nbytes
        drained = self._sent - queued_nbytes
        if self._was_queued and queued_nbytes and now_s > self._last_s:
            passed_s = now_s - self._last_s
            kept = 0.5 ** (passed_s / _MEMORY_S)
            self._nbytes = kept * self._nbytes + drained - self._drained
            self._seconds = kept * self._seconds + passed_s
        self._drained, self._was_queued, self._last_s = drained, queued_nbytes > 0, now_s


class Compressor:
    """The sender's choice of a level for each message of a link.

    `peer`: who receives, for the log. `queued_nbytes()`: how much of what was sent is still in the socket.
    """

    def __init__(
        self, peer: str, segments: SegmentCodec, message_nbytes: int, queued_nbytes: Callable[[], int]
    ) -> None:
        self.segments, self.bandwidth, self._message_nbytes = segments, LinkBandwidth(), message_nbytes
        self._peer, self._queued_nbytes = peer, queued_nbytes
        self._rates: dict[str, CodecRate] | None = None
        self._scratch = np.empty(message_nbytes, dtype=np.uint8)

    def compress(self, header: ChunkHeader, first: int, pages: np.ndarray, left_nbytes: int) -> tuple[str, bytes]:
        """Return the level that pays for this message, and its payload; ("", b"") if none does.

        For a lossy level `pages` become what the receiver will have. `left_nbytes`: of the chunk, from here on.
        """
        start = time.perf_counter()
        level, payload = self._try(header, first, pages, left_nbytes)
        seconds = time.perf_counter() - start if level else 0.0
        self._log_first(level)
        self.segments.count(level, len(pages), len(payload) if level else len(pages), seconds)
        return level, payload

    def sent(self, nbytes: int) -> None:
        """Record a message as it was given to the socket."""
        self.bandwidth.observe(nbytes, self._queued_nbytes(), time.perf_counter())

    def _try(self, header: ChunkHeader, first: int, pages: np.ndarray, left_nbytes: int) -> tuple[str, bytes]:
        bandwidth = self.bandwidth.nbytes_per_s
        if not 0 < bandwidth < MAX_NBYTES_PER_S or not self.segments.may_code(header):
            return "", b""
        if self._rates is None:
            self._rates = self.segments.rates()
        level = choose_level(left_nbytes, self._message_nbytes, bandwidth, self._rates, self.segments.levels)
        payload = self.segments.encode(header, first, pages, level) if level else b""
        if not level or len(payload) >= len(pages):
            return "", b""
        if not LEVELS[level].is_lossless:
            decoded = self._scratch[: len(pages)]
            self.segments.decode(header, first, np.frombuffer(payload, dtype=np.uint8), decoded)
            pages[:] = decoded
        return level, payload

    def _log_first(self, level: str) -> None:
        """Log the first message of each level."""
        if level and level not in self.segments.stats:
            rate = 8 * self.bandwidth.nbytes_per_s / 1e6
            log.info("KV to %s is compressed, level %s: the link takes %.0f Mbit/s", self._peer, level, rate)
