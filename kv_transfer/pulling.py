"""A link whose bytes the receiver fetches by itself: prefill tells where a chunk is, decode's device copies it."""

import threading
import time
from collections.abc import Callable

from contracts.handoff import ChunkHeader, Commit, Fin, Pull
from contracts.ids import BlockId
from contracts.layout import KVLayout
from kv_transfer import integrity
from kv_transfer.device import RemotePool
from kv_transfer.receiving import Landings
from kv_transfer.sending import Key, SendQueue

REHEARSAL_S = 0.005


class _Unthreaded:
    """An end that works in its callers' threads: the one that the link gives it only waits for the link's end."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self.nbytes = self.num_chunks = self.num_bad = self.num_stale = 0
        self.busy_s = 0.0

    def run(self) -> None:
        self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()


class Announcer(_Unthreaded):
    """Prefill's end. What is computed is told at once, in the caller's thread: a message takes microseconds, waking a
    thread for it 100.

    Decode may read the pages of an attempt from the first chunk that was told until it says that it does not.
    """

    def __init__(
        self, attempts: SendQueue, send: Callable[[Pull | Fin], None], on_sent: Callable[[Key, int, float], None]
    ) -> None:
        super().__init__()
        self._attempts, self._send, self._on_sent = attempts, send, on_sent
        self._told: set[Key] = set()
        self._lock = threading.Lock()

    def put(self, message: Pull | Fin) -> None:
        """Dropped if its attempt is over."""
        key = message.request_id, message.epoch
        with self._lock:
            if not self._attempts.is_alive(key):
                return
            if isinstance(message, Pull):
                self._told.add(key)
        self._send(message)
        if isinstance(message, Pull):
            self.num_chunks += 1
            self.nbytes += message.nbytes
            self._on_sent(key, message.nbytes, time.perf_counter())

    def end(self, key: Key) -> bool:
        """Drop the attempt. True: decode has been told of nothing and reads nothing."""
        with self._lock:
            self._attempts.forget(key)
            return key not in self._told

    def read(self, key: Key) -> bool:
        """Decode reads nothing of this attempt any more. False if it never did."""
        with self._lock:
            is_told = key in self._told
            self._told.discard(key)
            return is_told


class Puller(_Unthreaded):
    """Decode's end: chunk after chunk is fetched in the thread that hears of it; waking another one takes longer than
    starting the copies. The callbacks are called in it.

    `checks`: prefill's headers carry checksums.
    """

    def __init__(
        self,
        landings: Landings,
        layout: KVLayout,
        remote: RemotePool,
        checks: bool,
        commit: Callable[[Commit], None],
        on_landed: Callable[[ChunkHeader], None],
        on_bad: Callable[[ChunkHeader, str], None],
        on_drained: Callable[[Key], None],
    ) -> None:
        super().__init__()
        self._landings, self._layout, self._remote, self._checks = landings, layout, remote, checks
        self._commit, self._on_landed, self._on_bad, self._on_drained = commit, on_landed, on_bad, on_drained
        self._next_rehearsal_s = 0.0

    def stay_awake(self) -> None:
        """Pull nothing, now and then: a processor that slept takes twice as long for what is in none of its caches."""
        now = time.perf_counter()
        if now >= self._next_rehearsal_s:
            self._remote.rehearse()
            self._next_rehearsal_s = time.perf_counter() + REHEARSAL_S

    def put(self, pull: Pull) -> None:
        """Returns when the chunk is there, a millisecond or two later.

        Raises TransferError if the device can't copy.
        """
        start = time.perf_counter()
        self._fetch(pull)
        now = time.perf_counter()
        self.busy_s += now - start
        self._next_rehearsal_s = now + REHEARSAL_S  # this was one

    def _fetch(self, pull: Pull) -> None:
        """Decide by the facts in the header whether this chunk may land."""
        header, key = pull.header, (pull.request_id, pull.epoch)
        landing = self._landings.find(key)
        if landing is None:
            self.num_stale += 1
        elif reason := landing.check(header) or self._check_pages(pull):
            self._bad(header, reason)
        elif self._landings.enter(key):
            self._land(pull, landing.pages(header))

    def _check_pages(self, pull: Pull) -> str | None:
        expected = self._layout.num_blocks(pull.num_tokens)
        if len(pull.pages) != expected:
            return f"{len(pull.pages)} pages for {pull.num_tokens} tokens"
        if not 0 <= min(pull.pages) <= max(pull.pages) < self._remote.num_pages:
            return f"pages outside the peer's pool of {self._remote.num_pages}"
        return None

    def _land(self, pull: Pull, into: list[BlockId]) -> None:
        header = pull.header
        try:
            reason = self._copy(pull, into)
        finally:
            drained = self._landings.leave()
        if drained:
            self._on_drained(drained)
        elif reason:
            self._bad(header, reason)
        else:
            self._landed(header)

    def _landed(self, header: ChunkHeader) -> None:
        """Commit is said here: the engine's loop may be a step away, and prefill waits for it."""
        self.num_chunks += 1
        self.nbytes += header.nbytes
        if commit := self._landings.landed(header):
            self._commit(commit)
        self._on_landed(header)

    def _copy(self, pull: Pull, into: list[BlockId]) -> str | None:
        """Why the bytes that are there now are not the chunk's, or None."""
        sums = self._remote.pull(pull.pages, into, self._checks)
        if sums is not None and integrity.of_pages(pull.epoch, sums) != pull.checksum:
            return "checksum differs"
        return None

    def _bad(self, header: ChunkHeader, reason: str) -> None:
        self.num_bad += 1
        self._on_bad(header, reason)
