"""The decode end of a link whose bytes decode fetches itself.

pull_sender has the prefill end, and how the two work together. The device's copies are
engine.cuda.kv.peer_pool's.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from contracts.errors import TransferError
from contracts.handoff import ChunkHeader, Commit, PullReady, PullScheduled
from contracts.ids import BlockId
from contracts.kv_loss import EXACT, UNCHECKED, joined
from contracts.layout import KVLayout
from kv_transfer.chunks import checksum as integrity
from kv_transfer.chunks import chunk_plan as plan
from kv_transfer.chunks.device_pool import DeferredCopy, RemotePool
from kv_transfer.data_path.grant import GrantedPages, GrantTable
from kv_transfer.data_path.pull_sender import UnthreadedMover
from kv_transfer.data_path.sender import Key

MAX_EARLY = 256
LATE_S = 1.0
"""The seconds after which a copy stops waiting for its mark: a device that hangs must not hold another's pages."""
DRAINING_S, WATCHING_S = 0.002, 0.25


@dataclass(slots=True)
class EarlyPull:
    """A chunk whose copies wait for its mark.

    `digest`: the checksum of what was copied, once that is read and if checksums are compared.
    """

    key: Key
    first_token: int
    num_tokens: int
    pages: list[BlockId]
    group: int
    deferred: DeferredCopy
    since_s: float
    is_read: bool = False
    digest: int | None = None
    busy_s: float = 0.0

    def read(self) -> None:
        """Wait for the copies, and read their checksum."""
        if self.is_read:
            return
        sums, self.is_read = self.deferred.wait(), True
        self.digest = None if sums is None else integrity.of_pages(self.key[1], sums, self.group)
        self.busy_s = self.deferred.busy_s

    def forget(self) -> None:
        """Release copies that are done and whose chunk is not wanted any more."""
        if not self.is_read:
            self.deferred.drop()

    def overlaps(self, pull: PullReady) -> bool:
        is_before = self.first_token + self.num_tokens <= pull.first_token
        is_after = pull.first_token + pull.num_tokens <= self.first_token
        is_same = self.group == pull.group and self.key == (pull.request_id, pull.epoch)
        return is_same and not is_before and not is_after

    def is_of(self, pull: PullReady) -> bool:
        announced = self.key, self.group, self.first_token, self.num_tokens, self.pages
        return announced == ((pull.request_id, pull.epoch), pull.group, pull.first_token, pull.num_tokens, pull.pages)


class PullReceiver(UnthreadedMover):
    """The decode end: chunks are fetched one after another in the thread that receives their messages.

    Waking another thread takes longer than starting the copies. The callbacks are called in the same thread. `checks`:
    prefill's headers carry checksums. `remotes`: the peer's pool of each group. `is_left`: prefill has closed the link,
    which it does before it gives pages to other requests.
    """

    def __init__(
        self,
        grants: GrantTable,
        layout: KVLayout,
        remotes: Sequence[RemotePool],
        checks: bool,
        is_left: Callable[[], bool],
        commit: Callable[[Commit], None],
        on_arrived: Callable[[ChunkHeader], None],
        on_bad: Callable[[ChunkHeader, str], None],
        on_drained: Callable[[Key], None],
    ) -> None:
        super().__init__()
        self._grants, self._layout, self._remotes, self._checks = grants, layout, remotes, checks
        self._commit, self._on_arrived, self._on_bad, self._on_drained = commit, on_arrived, on_bad, on_drained
        self._early: list[EarlyPull] = []
        self._is_left = is_left

    def on_pull_scheduled(self, scheduled: PullScheduled) -> None:
        """Launch the copies of a chunk that is about to be computed.

        A chunk that does not fit the grant is left to its PullReady to report. Raises TransferError if the device can't
        copy.
        """
        key = scheduled.request_id, scheduled.epoch
        granted = self._grants.find(key)
        if granted is None or len(self._early) >= MAX_EARLY:
            return
        pull = self._expected(scheduled, granted)
        if pull is None or granted.check(pull.header) or self._check_pages(pull):
            return
        if any(early.overlaps(pull) for early in self._early) or not self._grants.enter(key):
            return
        into, when = granted.pages(pull.header), (scheduled.early_planes, scheduled.mark)
        deferred = self._remotes[pull.group].pull_later(pull.pages, into, self._checks, *when)
        if deferred is None:
            self._leave(key)
        else:
            place = pull.first_token, pull.num_tokens, pull.pages, pull.group
            self._early.append(EarlyPull(key, *place, deferred, time.monotonic()))

    def tend(self) -> float:
        """Check the copies that wait for a mark. Returns the seconds until the next check is due."""
        if not self._early:
            return math.inf
        ended = [early for early in self._early if self._grants.find(early.key) is None]
        for early in ended:
            if early.deferred.is_done:
                early.forget()
                self._drop(early)
        now = time.monotonic()
        if any(now - early.since_s > LATE_S and not early.deferred.is_done for early in self._early):
            self._expire()
        if not self._early:
            return math.inf
        return DRAINING_S if ended else WATCHING_S

    def look_ahead(self) -> None:
        """Read what has been copied before its PullReady comes: only a comparison is left to do then."""
        for early in self._early:
            if not early.is_read and not early.deferred.is_void and early.deferred.is_due and early.deferred.is_done:
                early.read()

    def put(self, pull: PullReady) -> None:
        """Fetch the chunk, which takes a millisecond or two.

        Raises TransferError if the device can't copy, or if prefill has left.
        """
        start = time.perf_counter()
        self._fetch(pull)
        self.busy_s += time.perf_counter() - start

    def _fetch(self, pull: PullReady) -> None:
        """Decide by the header whether this chunk may be written."""
        header, key = pull.header, (pull.request_id, pull.epoch)
        granted = self._grants.find(key)
        if granted is None:
            self.num_stale += 1
        elif reason := granted.check(header) or self._check_pages(pull):
            self._bad(header, reason)
        else:
            self._write(pull, granted.pages(header))

    def _check_pages(self, pull: PullReady) -> str | None:
        if not 0 <= pull.group < len(self._remotes):
            return f"group is {pull.group}; the layout has {len(self._remotes)}"
        expected, remote = self._layout.groups[pull.group].num_blocks(pull.num_tokens), self._remotes[pull.group]
        if len(pull.pages) != expected:
            return f"{len(pull.pages)} pages for {pull.num_tokens} tokens"
        if not 0 <= min(pull.pages) <= max(pull.pages) < remote.num_pages:
            return f"pages outside the peer's pool of {remote.num_pages}"
        return None

    def _expected(self, scheduled: PullScheduled, granted: GrantedPages) -> PullReady | None:
        """Return the PullReady that is expected for it, cut to the granted tokens; None if there are none.

        Its index and checksum are unknown yet.
        """
        if not 0 <= scheduled.group < len(self._remotes):
            return None
        first = max(scheduled.first_token, granted.grant.skips()[scheduled.group])
        num_tokens = scheduled.first_token + scheduled.num_tokens - first
        if num_tokens <= 0:
            return None
        skipped = (first - scheduled.first_token) // self._layout.groups[scheduled.group].block_size
        return PullReady(
            request_id=scheduled.request_id,
            epoch=scheduled.epoch,
            index=-1,
            first_token=first,
            num_tokens=num_tokens,
            layout_id=self._layout.layout_id,
            nbytes=plan.chunk_nbytes(self._layout, num_tokens, scheduled.group),
            checksum=0,
            group=scheduled.group,
            pages=scheduled.pages[skipped:],
        )

    def _write(self, pull: PullReady, into: list[BlockId]) -> None:
        header, key = pull.header, (pull.request_id, pull.epoch)
        if not self._grants.enter(key):
            return
        # No `leave` if the device fails, which ends the link: earlier copies may still write there.
        reason = self._copy(pull, into)
        self._require_held()
        if self._grants.leave(key):
            self._on_drained(key)
        elif self._grants.find(key) is None:
            return
        elif reason:
            self._bad(header, reason)
        else:
            self._count_arrived(header)

    def _require_held(self) -> None:
        """Raise TransferError unless the pages were still the chunk's while they were copied.

        A process that was stopped until prefill gave it up finds all the messages of prefill in its socket, and the KV
        of other prompts on those pages.
        """
        if self._is_left():
            raise TransferError("prefill has closed the link, and may have given its pages to others")

    def _count_arrived(self, header: ChunkHeader) -> None:
        """Count a chunk that arrived, and send Commit if it was the last.

        Commit is sent from here because the engine's loop may be a step away, and prefill waits for it.
        """
        self.num_chunks += 1
        self.nbytes += header.nbytes
        if commit := self._grants.chunk_received(header):
            self._commit(commit)
        loss = joined(header.loss, EXACT if self._checks else UNCHECKED)
        self._on_arrived(msgspec.structs.replace(header, loss=loss))

    def _copy(self, pull: PullReady, into: list[BlockId]) -> str | None:
        """Copy the chunk; return why the bytes that are there now are not the chunk's, or None."""
        is_here, digest = self._take_early(pull)
        if not is_here:
            sums = self._remotes[pull.group].pull(pull.pages, into, self._checks)
            digest = None if sums is None else integrity.of_pages(pull.epoch, sums, pull.group)
        return None if digest in (None, pull.checksum) else "checksum differs"

    def _take_early(self, pull: PullReady) -> tuple[bool, int | None]:
        """Return whether the chunk was copied early, and its checksum.

        Nothing that was launched early writes to its pages after this.
        """
        found = [early for early in self._early if early.overlaps(pull)]
        if any(not early.is_of(pull) for early in found):
            self._expire()
        for early in found:
            start = time.perf_counter()
            early.read()
            self._drop(early)
            if not early.deferred.is_void:  # the device's own time instead of the time spent waiting here
                self.busy_s += early.busy_s - (time.perf_counter() - start)
            if early.is_of(pull) and not early.deferred.is_void:
                return True, early.digest
        return False, None

    def _expire(self) -> None:
        for remote in self._remotes:
            remote.expire()

    def _drop(self, early: EarlyPull) -> None:
        self._early.remove(early)
        self._leave(early.key)

    def _leave(self, key: Key) -> None:
        if self._grants.leave(key):
            self._on_drained(key)

    def _bad(self, header: ChunkHeader, reason: str) -> None:
        self.num_bad += 1
        self._on_bad(header, reason)
