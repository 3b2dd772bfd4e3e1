"""Copies that were launched before there is anything to copy.

Their streams, what waits for them, and how they end.
"""

import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from engine.cuda.kv.page_checksums import DeviceChecksums
from engine.cuda.runtime.semaphores import PeerSemaphore

RELEASE_S = 0.0005
_NUM_LANES = 2


class AwaitedPool(Protocol):
    """A peer's pool, whose mark is waited for."""

    @property
    def is_waiting(self) -> bool: ...


class CopyStreams:
    """Streams that may wait for a peer's mark, each for one peer at a time.

    Two: while four waited, nothing else that this process gave its GPU went on (H200).

    Of high priority: the checksums come before what decode has launched.
    """

    def __init__(self, device: torch.device) -> None:
        self._free = [torch.cuda.Stream(device, priority=-1) for _ in range(_NUM_LANES)]
        self._taken: dict[AwaitedPool, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, remote: AwaitedPool) -> Iterator[torch.cuda.Stream | None]:
        """None if all have others that wait.

        Whoever launches does so within: a lane on which something is being launched looks idle to others.
        """
        with self._lock:
            yield self._of(remote)

    def _of(self, remote: AwaitedPool) -> torch.cuda.Stream | None:
        if remote in self._taken:
            return self._taken[remote]
        for other in [other for other in self._taken if not other.is_waiting]:
            self._free.append(self._taken.pop(other))
        if not self._free:
            return None
        self._taken[remote] = self._free.pop()
        return self._taken[remote]

    def give_back(self, remote: AwaitedPool) -> bool:
        """False while something is on it."""
        with self._lock:
            if remote in self._taken:
                if not self._taken[remote].query():
                    return False
                self._free.append(self._taken.pop(remote))
            return True


class StreamDeferredCopy:
    """Launched on a stream that waits for the peer's mark.

    The peer may be gone, or hang: the mark is ours to set.

    `stamps`: begin and end of each part, recorded on the stream. `is_read` hears of `sums` when nobody needs them.
    """

    def __init__(
        self,
        mark: PeerSemaphore,
        value: int,
        stamps: SequenceOf[torch.cuda.Event],
        sums: DeviceChecksums | None,
        is_read: Callable[[DeviceChecksums], None],
    ) -> None:
        self._mark, self._value, self._stamps, self._sums, self._is_read = mark, value, stamps, sums, is_read
        self._done = stamps[-1]
        self.is_void = False

    @property
    def is_due(self) -> bool:
        return self._mark.value >= self._value

    @property
    def busy_s(self) -> float:
        pairs = zip(self._stamps[::2], self._stamps[1::2], strict=True)
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3

    @property
    def is_done(self) -> bool:
        return self._done.query()

    def wait(self) -> np.ndarray | None:
        """The peer says that it is computed."""
        while (self.is_void or self._mark.value < self._value) and not self.is_done:
            self._mark.raise_to(self._value)
            time.sleep(RELEASE_S)
        self._done.synchronize()
        found = None if self._sums is None else self._sums.read()
        self.drop()
        return found

    def drop(self) -> None:
        sums, self._sums = self._sums, None
        if sums is not None:
            self._is_read(sums)


class HostDeferredCopy:
    """The copy where no stream can wait: made when it is asked for."""

    is_void, is_done, is_due = False, True, False

    def __init__(self, pull: Callable[[], np.ndarray | None]) -> None:
        self._pull = pull
        self.busy_s = 0.0

    def wait(self) -> np.ndarray | None:
        start = time.perf_counter()
        sums = self._pull()
        self.busy_s = time.perf_counter() - start
        return sums

    def drop(self) -> None:
        """It takes nothing."""


DeviceCopy = StreamDeferredCopy | HostDeferredCopy


def stamp() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
