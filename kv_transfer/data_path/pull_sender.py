"""Prefill's end of a link whose bytes the receiver fetches: it tells where a chunk is, decode's device copies it.

Where a chunk can be told before it is computed, the copies are launched then, and wait on decode's device for a mark
that prefill's sets. When the hosts learn that the chunk is computed, it is on its way already.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from contracts.handoff import Fin, PullReady, PullScheduled
from contracts.ids import BlockId
from kv_transfer.chunks.device_pool import DeviceSemaphore
from kv_transfer.data_path.sender import Key, SendQueue

MARKS_A_BATCH = 2
HIDING = 16
"""So many tokens are copied, at the least, while one is computed: of Llama 8B with FP8 KV 45 to 60 on two H200."""


class UnthreadedMover:
    """An end that works in its callers' threads: the one that the link gives it only waits for the link's end."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self.nbytes = self.num_chunks = self.num_bad = self.num_stale = 0
        self.busy_s = 0.0

    def run(self) -> None:
        self._stopped.wait()

    def stop(self) -> None:
        self._stopped.set()


@dataclass(slots=True)
class PullBatch:
    """The chunks of a prompt of `num_tokens`, told of together as late as their copies stay hidden: a link that sleeps
    leaves its power to what computes.

    Up to `released` they are told of once they are computed; `held` goes with the next of them.
    """

    num_tokens: int
    released: int = 0
    held: list[PullReady | Fin] = field(default_factory=list)

    def releases(self, end: int, num_tokens: int) -> bool:
        """Whether a chunk of `num_tokens` up to `end` is told of, with all before it. It waits if another one like it
        leaves enough to be computed beside the copies of all.
        """
        left = self.num_tokens - end - num_tokens
        if left * HIDING < end + num_tokens - self.released:
            self.released = max(self.released, end)
        return end <= self.released

    def take(self, message: PullReady | Fin) -> list[PullReady | Fin]:
        """What is to be sent now, `message` last of it, or nothing."""
        self.held.append(message)
        if isinstance(message, PullReady) and not self.releases(
            message.first_token + message.num_tokens, message.num_tokens
        ):
            return []
        taken, self.held = self.held, []
        return taken


class PullSender(UnthreadedMover):
    """Prefill's end. What is computed is told at once or in bursts, in the caller's thread: a message takes
    microseconds, waking a thread for it 100.

    Decode may read the pages of an attempt from the first chunk that was told until it says that it does not.
    """

    def __init__(
        self,
        attempts: SendQueue,
        mark: DeviceSemaphore | None,
        send: Callable[[PullScheduled | PullReady | Fin], None],
        on_sent: Callable[[Key, int, float], None],
    ) -> None:
        super().__init__()
        self._attempts, self._mark, self._send, self._on_sent = attempts, mark, send, on_sent
        self._told: set[Key] = set()
        self._granted: set[Key] = set()
        self._early: defaultdict[Key, list[PullScheduled]] = defaultdict(list)
        self._batches: dict[Key, PullBatch] = {}
        self._num_marks, self._is_marking = 0, False
        self._lock = threading.Lock()

    def begin(self, key: Key, num_tokens: int) -> None:
        """Of a prompt of so many. Where nobody says so, chunks are told of one by one."""
        with self._lock:
            self._batches[key] = PullBatch(num_tokens)

    def chunk_scheduled(
        self, key: Key, first_token: int, num_tokens: int, pages: list[BlockId], early_planes: int
    ) -> None:
        """Said now, or when pages are granted, unless the chunk is to wait for later ones. By the thread that calls
        `launched` when the device has the chunk.
        """
        with self._lock:
            if self._mark is None or not self._attempts.is_alive(key):
                return
            if (burst := self._batches.get(key)) and not burst.releases(first_token + num_tokens, num_tokens):
                return
            self._is_marking = True
            mark = self._num_marks + MARKS_A_BATCH
            self._early[key].append(PullScheduled(*key, first_token, num_tokens, pages, early_planes, mark))
            self._send_scheduled(key)

    def granted(self, key: Key) -> None:
        """Dropped if its attempt is over: nothing would end it here, where it comes behind decode's last word."""
        with self._lock:
            if self._attempts.is_alive(key):
                self._granted.add(key)
                self._send_scheduled(key)

    def chunks_launched(self, is_all: bool) -> None:
        """The KV of what is coming has been launched, or never will be; unless `is_all`, that of the early planes.
        Said again of the same chunks it changes nothing.
        """
        if self._mark is None or not self._is_marking:
            return
        if not is_all:
            self._mark.set(self._num_marks + MARKS_A_BATCH - 1)
            return
        self._is_marking = False
        self._num_marks += MARKS_A_BATCH
        self._mark.set(self._num_marks)

    def put(self, message: PullReady | Fin) -> None:
        """Dropped if its attempt is over. A PullReady may wait for the next one, or for Fin."""
        key = message.request_id, message.epoch
        with self._lock:
            if not self._attempts.is_alive(key):
                return
            burst = self._batches.get(key)
            due = [message] if burst is None else burst.take(message)
            if any(isinstance(each, PullReady) for each in due):
                self._told.add(key)
        for each in due:
            self._send(each)
            if isinstance(each, PullReady):
                self.num_chunks += 1
                self.nbytes += each.nbytes
                self._on_sent(key, each.nbytes, time.perf_counter())

    def end(self, key: Key) -> bool:
        """Drop the attempt. True: decode has been told of nothing and reads nothing."""
        with self._lock:
            self._attempts.forget(key)
            self._granted.discard(key)
            self._early.pop(key, None)
            self._batches.pop(key, None)
            return key not in self._told

    def read(self, key: Key) -> bool:
        """Decode reads nothing of this attempt any more. False if it never did."""
        with self._lock:
            return self._read(key)

    def committed(self, key: Key) -> None:
        """Decode has all of it. If the attempt was ended first, decode's answer to that is still to come; whoever ends
        it in this very moment is told that nothing is read.
        """
        with self._lock:
            if self._attempts.is_alive(key):
                self._attempts.forget(key)
                self._read(key)

    def _read(self, key: Key) -> bool:
        """Under the lock."""
        is_told = key in self._told
        self._told.discard(key)
        self._granted.discard(key)
        self._batches.pop(key, None)
        return is_told

    def _send_scheduled(self, key: Key) -> None:
        """Under the lock: decode may read from here on."""
        if key in self._granted and self._attempts.is_alive(key):
            for message in self._early.pop(key, []):
                self._told.add(key)
                self._send(message)
