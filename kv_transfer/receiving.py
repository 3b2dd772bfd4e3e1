"""The receiving half of a link: pieces are checked in staging, by a thread of its own, and only then copied to
granted pages.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from contracts.handoff import ChunkHeader, Commit, Fin, Grant, Offer
from contracts.layout import KVLayout
from kv_transfer import integrity, plan
from kv_transfer.device import Pool
from kv_transfer.landing import Landing
from kv_transfer.piece import Piece, read_meta
from kv_transfer.sending import Key
from kv_transfer.transports.base import Inbound, Slot

ALONE_S = 0.25


class Landings:
    """Offers and grants of one link. Any thread grants or ends; one thread lands."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self._layout, self._num_blocks = layout, num_blocks
        self._offers: dict[Key, Offer] = {}
        self._landings: dict[Key, Landing] = {}
        self._fins: dict[Key, Fin] = {}
        self._committed: set[Key] = set()
        self._alone_until = 0.0
        self._writing: Counter[Key] = Counter()
        self._draining: set[Key] = set()
        self._lock = threading.Lock()

    def offered(self, offer: Offer) -> None:
        with self._lock:
            self._offers[offer.request_id, offer.epoch] = offer

    def knows(self, key: Key) -> bool:
        """Offered, or over while a page of it is still being written."""
        with self._lock:
            return key in self._offers or key in self._writing

    def grant(self, grant: Grant) -> bool:
        """False if the offer is gone.

        Raises ValueError if it does not fit the offer or the pool, or a page is landing for another attempt.
        """
        key = grant.request_id, grant.epoch
        with self._lock:
            if key not in self._offers:
                return False
            landing = Landing(self._offers[key], grant, self._layout, self._num_blocks)
            taken = {page for other in self._landings.values() for page in other.grant.pages}
            if taken.intersection(grant.pages):
                raise ValueError(f"a page granted to {grant.request_id} is landing for another attempt")
            self._landings[key] = landing
            self._alone_until = time.monotonic() + ALONE_S
            return True

    def find(self, key: Key) -> Landing | None:
        with self._lock:
            return self._landings.get(key)

    def finished(self, fin: Fin) -> Commit | None:
        """Token 0 has come. What to say now if it was the last that was missing."""
        with self._lock:
            key = fin.request_id, fin.epoch
            if key in self._landings:
                self._fins[key] = fin
            return self._commit(key)

    def landed(self, header: ChunkHeader) -> Commit | None:
        """All bytes of this chunk are right. What to say now if it was the last that was missing."""
        with self._lock:
            key = header.request_id, header.epoch
            if landing := self._landings.get(key):
                landing.landed(header)
            return self._commit(key)

    @property
    def is_alone(self) -> bool:
        """One handoff is under way, since a moment: nothing else keeps this process awake."""
        return len(self._landings.keys() - self._committed) == 1 and time.monotonic() < self._alone_until

    def is_committed(self, key: Key) -> bool:
        """It was said already."""
        with self._lock:
            return key in self._committed

    def enter(self, key: Key) -> bool:
        """Pages of this attempt are about to be written. False: it is over, do not."""
        with self._lock:
            if key in self._landings:
                self._writing[key] += 1
            return key in self._landings

    def leave(self, key: Key) -> bool:
        """A write that was entered is over. True: the attempt was ended meanwhile, and is drained now."""
        with self._lock:
            self._writing[key] -= 1
            if self._writing[key]:
                return False
            del self._writing[key]
            is_drained = key in self._draining
            self._draining.discard(key)
            return is_drained

    def end(self, key: Key) -> bool:
        """Forget the attempt. True: nothing writes its pages now; False: `leave` will say so."""
        with self._lock:
            self._offers.pop(key, None)
            self._landings.pop(key, None)
            self._fins.pop(key, None)
            self._committed.discard(key)
            if key in self._writing:
                self._draining.add(key)
            return key not in self._writing

    def _commit(self, key: Key) -> Commit | None:
        """Under the lock."""
        landing, fin = self._landings.get(key), self._fins.get(key)
        if landing is None or fin is None or key in self._committed or not landing.is_whole(fin.num_chunks):
            return None
        if key in self._writing:
            return None
        self._committed.add(key)
        return Commit(*key, fin.num_chunks, landing.nbytes)


@dataclass(slots=True)
class Arrival:
    """A chunk on its way in. `rows`: of the pool; None if the chunk is thrown away."""

    header: ChunkHeader
    rows: np.ndarray | None
    offset: int
    checksum: int

    @property
    def key(self) -> Key:
        return self.header.request_id, self.header.epoch

    def continues(self, piece: Piece) -> bool:
        ours, theirs = self.header, piece.header
        return piece.offset == self.offset > 0 and (ours.request_id, ours.epoch, ours.index, ours.nbytes) == (
            theirs.request_id,
            theirs.epoch,
            theirs.index,
            theirs.nbytes,
        )


class Receiver:
    """Lands pieces until the channel breaks. The callbacks are called in its thread."""

    def __init__(
        self,
        landings: Landings,
        pool: Pool,
        channel: Inbound,
        checksum: bool,
        on_landed: Callable[[ChunkHeader], None],
        on_bad: Callable[[ChunkHeader, str], None],
        on_drained: Callable[[Key], None],
    ) -> None:
        self._landings, self._pool, self._channel, self._checksum = landings, pool, channel, checksum
        self._on_landed, self._on_bad, self._on_drained = on_landed, on_bad, on_drained
        self._arrival: Arrival | None = None
        self.nbytes = self.num_chunks = self.num_bad = self.num_stale = 0
        self.busy_s = 0.0

    def run(self) -> None:
        """Raises PeerLost when the channel broke, Corrupt when sender and receiver have lost step."""
        while True:
            self._channel.receive(self._take)

    def stop(self) -> None:
        """It never waits but for the channel."""

    def _take(self, slot: Slot) -> None:
        start = time.perf_counter()
        self._put(slot, read_meta(slot.meta))
        self.busy_s += time.perf_counter() - start

    def _put(self, slot: Slot, piece: Piece) -> None:
        arrival = self._arrival
        if arrival is None or not arrival.continues(piece):
            self._cut_short()
            arrival = self._arrival = self._begin(piece)
        if arrival.rows is not None:
            if reason := self._check(arrival, piece, slot):
                self._bad(arrival, piece.header, reason)
            else:
                self._land(arrival, piece, slot)
        arrival.offset += piece.nbytes
        if piece.is_last:
            self._arrival = None

    def _begin(self, piece: Piece) -> Arrival:
        """Decide by the facts in the header whether this chunk may land."""
        header = piece.header
        arrival = Arrival(header, None, piece.offset, integrity.seed(header.epoch))
        landing = self._landings.find(arrival.key)
        if landing is None:
            self.num_stale += 1
            return arrival
        reason = "its first bytes are missing" if piece.offset else landing.check(header)
        if reason:
            self._bad(arrival, header, reason)
        else:
            arrival.rows = plan.row_ids(landing.pages(header), self._pool.num_planes, self._pool.num_blocks)
        return arrival

    def _check(self, arrival: Arrival, piece: Piece, slot: Slot) -> str | None:
        """Why this piece must not be written, or None. Its bytes are read once, while they are warm in the cache."""
        page_nbytes = self._pool.page_nbytes
        if piece.nbytes <= 0 or piece.nbytes % page_nbytes or piece.nbytes > len(slot.payload):
            return f"a message of {piece.nbytes} bytes; pages are {page_nbytes}"
        if piece.offset + piece.nbytes > arrival.header.nbytes:
            return f"more bytes came than the {arrival.header.nbytes} announced"
        if self._checksum:
            arrival.checksum = integrity.extend(arrival.checksum, slot.payload[: piece.nbytes])
            if arrival.checksum != piece.header.checksum:
                return f"checksum differs in the bytes up to {piece.offset + piece.nbytes}"
        return None

    def _land(self, arrival: Arrival, piece: Piece, slot: Slot) -> None:
        assert arrival.rows is not None
        if not self._landings.enter(arrival.key):
            arrival.rows = None
            return
        first, last = piece.offset // self._pool.page_nbytes, (piece.offset + piece.nbytes) // self._pool.page_nbytes
        self._pool.scatter(arrival.rows[first:last], slot.payload[: piece.nbytes])
        whole = piece.is_last and self._complete(arrival.key, piece.header)
        if self._landings.leave(arrival.key):
            self._on_drained(arrival.key)
        elif whole:
            self._on_landed(piece.header)

    def _complete(self, key: Key, header: ChunkHeader) -> bool:
        landing = self._landings.find(key)
        if landing is None:
            return False
        landing.landed(header)
        self.num_chunks += 1
        self.nbytes += header.nbytes
        return True

    def _bad(self, arrival: Arrival, header: ChunkHeader, reason: str) -> None:
        arrival.rows = None
        self.num_bad += 1
        self._on_bad(header, reason)

    def _cut_short(self) -> None:
        """Another chunk begins: was the one before it whole? An attempt that ended is cut short rightly."""
        arrival, self._arrival = self._arrival, None
        if arrival is not None and arrival.rows is not None and self._landings.find(arrival.key):
            self._bad(arrival, arrival.header, f"only {arrival.offset} of {arrival.header.nbytes} bytes came")
