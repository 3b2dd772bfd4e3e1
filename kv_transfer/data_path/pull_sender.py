"""The prefill end of a link whose bytes the receiver fetches.

It reports which pages hold a chunk, and decode's device copies them. If a chunk can be announced before it is computed,
the copies are launched then, and wait on decode's device for a mark that prefill's device sets. When the hosts learn
that the chunk is computed, its copy is under way already.
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
"""How many tokens are copied, at the least, while one is computed.

For Llama 8B with FP8 KV these are 45 to 60 on two H200.
"""


class UnthreadedMover:
    """A mover that works in its callers' threads; the link's data thread only waits for the end."""

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
    """The chunks of one prompt, reported together as late as their copies stay hidden behind computing.

    A link that sleeps leaves its power to the computation. `num_tokens`: of the prompt. Chunks up to token `released`
    are reported once they are computed; `held` ones go with the next of them.
    """

    num_tokens: int
    released: int = 0
    held: list[PullReady | Fin] = field(default_factory=list[PullReady | Fin])

    def releases(self, end: int, num_tokens: int) -> bool:
        """Return whether a chunk of `num_tokens` that ends at token `end` is reported, with all before it.

        It waits if, after another one like it, enough is left to be computed to hide the copies of all.
        """
        left = self.num_tokens - end - num_tokens
        if left * HIDING < end + num_tokens - self.released:
            self.released = max(self.released, end)
        return end <= self.released

    def take(self, message: PullReady | Fin) -> list[PullReady | Fin]:
        """Return the messages to send now, with `message` as the last one, or none."""
        self.held.append(message)
        if isinstance(message, PullReady) and not self.releases(
            message.first_token + message.num_tokens, message.num_tokens
        ):
            return []
        taken, self.held = self.held, []
        return taken


class PullSender(UnthreadedMover):
    """The prefill end: computed chunks are reported at once or in batches, in the caller's thread.

    A message takes microseconds, waking a thread for it 100. Decode may read the pages of an attempt from the first
    chunk that is reported until it says that it no longer does. `tells_fetched`: of answers that move it says which
    chunks it has fetched.
    """

    def __init__(
        self,
        attempts: SendQueue,
        mark: DeviceSemaphore | None,
        send: Callable[[PullScheduled | PullReady | Fin], None],
        on_sent: Callable[[Key, int, float], None],
        tells_fetched: bool = False,
    ) -> None:
        super().__init__()
        self._attempts, self._mark, self._send, self._on_sent = attempts, mark, send, on_sent
        self._tells_fetched = tells_fetched
        self._reported: set[Key] = set()
        self._unfetched: defaultdict[Key, set[int]] = defaultdict(set)
        self._granted: set[Key] = set()
        self._early: defaultdict[Key, list[PullScheduled]] = defaultdict(list)
        self._batches: dict[Key, PullBatch] = {}
        self._num_marks, self._is_marking = 0, False
        self._lock = threading.Lock()

    def begin(self, key: Key, num_tokens: int) -> None:
        """Begin an attempt with a prompt of this many tokens. Without this, chunks are reported one by one."""
        with self._lock:
            self._batches[key] = PullBatch(num_tokens)

    def has_unfetched(self, key: Key) -> bool:
        """Return whether decode has yet to fetch a chunk of an answer that moves.

        Nothing is told of other attempts: of a pull that tiers still fill, what was reported stays until its end.
        """
        with self._lock:
            return bool(self._unfetched.get(key))

    def fetched(self, key: Key, index: int) -> None:
        """Record that decode has fetched a chunk."""
        with self._lock:
            if unfetched := self._unfetched.get(key):
                unfetched.discard(index)

    def chunk_scheduled(
        self, key: Key, first_token: int, num_tokens: int, pages: list[BlockId], early_planes: int, group: int = 0
    ) -> None:
        """Announce a chunk, now or when pages are granted, unless it is to wait for later ones.

        Called by the thread that calls `chunks_launched` when the device has the chunk.
        """
        with self._lock:
            if self._mark is None or not self._attempts.is_alive(key):
                return
            if (batch := self._batches.get(key)) and not batch.releases(first_token + num_tokens, num_tokens):
                return
            self._is_marking = True
            mark = self._num_marks + MARKS_A_BATCH
            request_id, epoch = key
            message = PullScheduled(
                request_id=request_id,
                epoch=epoch,
                first_token=first_token,
                num_tokens=num_tokens,
                pages=pages,
                early_planes=early_planes,
                mark=mark,
                group=group,
            )
            self._early[key].append(message)
            self._send_scheduled(key)

    def granted(self, key: Key) -> None:
        """Send the announcements that waited for this grant, unless the attempt is over.

        An entry for an attempt that is over would stay forever, since the grant comes after decode's last message about
        it.
        """
        with self._lock:
            if self._attempts.is_alive(key):
                self._granted.add(key)
                self._send_scheduled(key)

    def chunks_launched(self, is_all: bool) -> None:
        """Set the mark: the KV of the announced chunks has been launched, or never will be.

        Unless `is_all`, this holds for the early planes only. Repeated calls for the same chunks change nothing.
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
        """Send the message, unless its attempt is over. A PullReady may wait for the next one, or for Fin."""
        key = message.request_id, message.epoch
        with self._lock:
            if not self._attempts.is_alive(key):
                return
            batch = self._batches.get(key)
            due = [message] if batch is None else batch.take(message)
            if any(isinstance(each, PullReady) for each in due):
                self._reported.add(key)
            if batch is None and self._tells_fetched and isinstance(message, PullReady):
                self._unfetched[key].add(message.index)
        for each in due:
            self._send(each)
            if isinstance(each, PullReady):
                self.num_chunks += 1
                self.nbytes += each.nbytes
                self._on_sent(key, each.nbytes, time.perf_counter())

    def end(self, key: Key) -> bool:
        """Drop the attempt; return True if decode has been sent no pages of it, and so reads none."""
        with self._lock:
            self._attempts.forget(key)
            self._granted.discard(key)
            self._early.pop(key, None)
            self._batches.pop(key, None)
            self._unfetched.pop(key, None)
            return key not in self._reported

    def read(self, key: Key) -> bool:
        """Record that decode reads nothing of this attempt any more; return False if it never did."""
        with self._lock:
            return self._read(key)

    def committed(self, key: Key) -> None:
        """Forget an attempt that decode has committed.

        If it was ended first, decode's answer to the Abort is still to come. A thread that calls `end` just after this
        gets True: nothing is read.
        """
        with self._lock:
            if self._attempts.is_alive(key):
                self._attempts.forget(key)
                self._read(key)

    def _read(self, key: Key) -> bool:
        """Do what `read` does, under the lock."""
        was_reported = key in self._reported
        self._reported.discard(key)
        self._granted.discard(key)
        self._batches.pop(key, None)
        self._unfetched.pop(key, None)
        return was_reported

    def _send_scheduled(self, key: Key) -> None:
        """Send the announcements of a granted attempt, under the lock: decode may read its pages from here on."""
        if key in self._granted and self._attempts.is_alive(key):
            for message in self._early.pop(key, []):
                self._reported.add(key)
                self._send(message)
