"""The tier on a disk: a folder with a limit of bytes, which outlives the worker.

record_files writes and reads its files.
"""

import errno
import fcntl
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from contracts.held_prefixes import HeldPrefixes, prefix_lengths
from contracts.kv_store import BlockKey, BlockWorth
from kv_transfer.tiers.eviction_policy import EvictionPolicy
from kv_transfer.tiers.record_files import ForeignFile, RecordFile, RecordFiles
from kv_transfer.tiers.tier_stats import TierStats

RETRY_S = 10.0
"""The seconds after which a disk that failed is tried again."""
PROGRESS_S = 5.0
CLOSE_TIMEOUT_S = 5.0
"""How long the end of a worker waits for a disk that hangs while it is indexed."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = logging.getLogger(__name__)


class DiskTier:
    """The records in a folder, of which this process is the only writer.

    The index is made by a thread at start; until then nothing is found and nothing kept. A disk that is full or read
    only is read from; one that can't be read is off. Both are tried again after RETRY_S, and logged once each time that
    they change. `num_folders`: where the folder is another writer's, those named after it by a number may be taken.
    `block_size`: tokens of a block, for `held`. `is_direct`: see RecordFiles.
    """

    name = "disk"
    is_local = True

    def __init__(
        self,
        folder: Path,
        layout_id: str,
        capacity_nbytes: int,
        clock: Callable[[], float] = time.monotonic,
        num_folders: int = 1,
        block_size: int = 0,
        is_direct: bool = False,
    ) -> None:
        self.held = HeldPrefixes(block_size)
        others = (folder.with_name(f"{folder.name}.{number}") for number in range(2, num_folders + 1))
        self._folders, self._clock = [RecordFiles(path, layout_id, is_direct) for path in (folder, *others)], clock
        self._files = self._folders[0]
        self._capacity_nbytes = capacity_nbytes
        self._policy = EvictionPolicy(capacity_nbytes)
        self._places: dict[BlockKey, str] = {}
        self._foreign: deque[ForeignFile] = deque()
        self._foreign_nbytes = 0
        self._doomed: list[str] = []  # files of blocks that were evicted
        self._stuck: dict[str, int] = {}  # bytes of files that could not be removed: so much less room has the policy
        self._stats = TierStats()
        self._lock = threading.Lock()
        self._lock_file: TextIO | None = None
        self._is_indexed = self._is_closed = False
        self._unreadable = self._unwritable = ""
        self._retry_at_s = 0.0
        self._indexer = threading.Thread(target=self._open, name="kv-disk-index", daemon=True)
        self._indexer.start()

    @property
    def is_on(self) -> bool:
        return self._is_indexed and not self._unreadable

    def wait_until_indexed(self, timeout_s: float) -> bool:
        """Wait for the index; return whether it is there."""
        self._indexer.join(timeout_s)
        return self._is_indexed

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        if not self.is_on:
            self._try_again_if_due()
            return 0
        with self._lock:
            return next((index for index, key in enumerate(keys) if key not in self._places), len(keys))

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[int]:
        with self._lock:
            places = [self._places[key] for key in keys if key in self._places]
        if len(places) != len(keys) or not self.is_on:
            places = []
        sizes: list[int] = []
        with self._stats.load() as loading:
            try:
                sizes.extend(self._files.read(places, into[: len(places)]))
            except OSError as error:
                self._on_read_error(error, keys[len(sizes)])
            with self._lock:
                self._policy.use(keys[: len(sizes)])
            loading.found(sizes, len(keys))
        return sizes

    def store(self, key: BlockKey, record: memoryview, worth: BlockWorth) -> bool:
        if not self._may_write():
            self._stats.refused["off"] += 1
            return False
        if self._stuck and (self._unwritable or self._retry_is_due()):
            self._try_stuck()
        with self._lock:
            if key in self._places:
                return True
            policy = self._policy
            gone = policy.add(key, len(record), worth)
            self._doomed += filter(None, [self._places.pop(other, "") for other in gone])
        for other in gone:
            self.held.remove(other)
        place = self._files.place(key, worth)
        try:
            failed = self._remove_doomed()
            if failed is not None and self._policy.nbytes + self._foreign_nbytes > self._policy.capacity_nbytes:
                raise failed
            with self._lock:
                is_kept = key in self._policy
            if is_kept:
                self._files.write(place, record)
        except OSError as error:
            self._on_write_error(error)
            with self._lock:
                self._policy.remove(key)
            return False
        if not is_kept:
            return False
        self._on_written()
        with self._lock:
            is_counted = self._policy is policy
            if is_counted:
                self._places[key] = place
                policy.capacity_nbytes += self._stuck.pop(place, 0)  # it was written over
        if not is_counted:  # the folder was indexed anew meanwhile, maybe before this file was in it
            self._forget_file(key, place)
            return False
        self.held.add(key, worth.num_blocks)
        self._stats.stored(len(record))
        return True

    def evict(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self.held.remove(key)
            with self._lock:
                self._policy.remove(key)
                place = self._places.pop(key, None)
            if place is not None:
                try:
                    self._files.remove(place)
                except OSError:
                    with self._lock:
                        self._doomed.append(place)

    def _forget_file(self, key: BlockKey, place: str) -> None:
        """Remove a record of which it is not known whether the index has it."""
        self.evict([key])
        with suppress(OSError):  # it is gone, or the next index counts it
            self._files.remove(place)

    def stats(self) -> dict[str, float]:
        with self._lock:
            return self._stats.report(len(self._places), self._policy.nbytes) | {
                "foreign_blocks": len(self._foreign),
                "on": float(self.is_on),
                "writable": float(self.is_on and not self._unwritable),
            }

    def close(self) -> None:
        self._is_closed = True
        self._indexer.join(CLOSE_TIMEOUT_S)
        if self._indexer.is_alive():
            _log.warning("KV on disk: %s does not answer; its index is given up", self._files.folder)
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    # Opening.

    def _open(self) -> None:
        """Take the folder, and index what is in it."""
        try:
            if self._lock_file is not None:  # a folder that came back may be another one
                self._lock_file.close()
                self._lock_file = None
            if any(map(self._take, self._folders)):
                self._index()
            else:
                self._unreadable = "another process uses it; give each worker a folder of its own"
        except Exception as error:  # whatever is in the folder: the tier is off then, and says so
            if not isinstance(error, OSError):
                _log.error("KV on disk: what is in %s can't be indexed", self._files.folder, exc_info=error)
            self._unreadable = str(error) or type(error).__name__
        if self._unreadable:
            self._retry_at_s = self._clock() + RETRY_S
            _log.warning(
                "KV on disk (kv_disk) is off: %s: %s; tried again every %.0f s",
                self._files.folder,
                self._unreadable,
                RETRY_S,
            )

    def _take(self, files: RecordFiles) -> bool:
        """Return whether this process is the folder's writer from now on."""
        files.make_folder()
        file = (files.folder / "writer.lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._lock_file, self._files = file, files
        return True

    def _index(self) -> None:
        """Enter what is in the folder, the longest unused first; what is too much for the limit goes."""
        found: list[RecordFile] = []
        told_s = start_s = self._clock()
        for record in self._files.scan():
            if self._is_closed:
                return
            found.append(record)
            if self._clock() - told_s > PROGRESS_S:
                told_s = self._clock()
                _log.info("KV on disk: %d blocks found in %s so far", len(found), self._files.folder)
        found.sort(key=lambda record: (record.used_at_s, record.key))
        too_much: list[str] = []
        for record in found:  # nobody else looks before it is indexed
            self._places[record.key] = record.place
            gone = self._policy.add(record.key, record.nbytes, record.worth)
            too_much += [self._places.pop(key) for key in gone]
        self._foreign = deque(sorted(self._files.scan_foreign()))
        self._foreign_nbytes = sum(file.nbytes for file in self._foreign)
        self._doomed += too_much
        self._remove_doomed()
        self._mark(found)
        if self._foreign:
            _log.warning(
                "KV on disk: %d blocks in %s are of another model, number format, block size or release; they are not "
                "used, and stay while there is room",
                len(self._foreign), self._files.folder,
            )  # fmt: skip
        if others := self._files.others():
            _log.warning(
                "KV on disk: %s holds what this release does not use, and does not count: %s",
                self._files.folder, ", ".join(others[:5]),
            )  # fmt: skip
        _log.info(
            "KV on disk: %d blocks, %.2f GiB, found in %s in %.1f s",
            len(self._places), self._policy.nbytes / 2**30, self._files.folder, self._clock() - start_s,
        )  # fmt: skip
        self._is_indexed = True

    def _mark(self, found: Sequence[RecordFile]) -> None:
        """Note which prefixes there are: blocks all of whose predecessors are here."""
        parents = {record.key: record.worth.parent for record in found if record.key in self._places}
        for key, num_blocks in prefix_lengths(parents).items():
            self.held.add(key, num_blocks)

    def _remove_doomed(self) -> OSError | None:
        """Remove the files of what was evicted, and what can't be used here where there is no room for it.

        A file that can't be removed keeps its room, and others go for it. Returns the first error.
        """
        first: OSError | None = None
        stuck = self._stuck
        while places := self._take_doomed():
            for place in places:
                try:
                    self._files.remove(place)
                    self._stats.num_evicted += 1
                except OSError as error:
                    first = first or error
                    self._keep_room(place, error, stuck)
        return first

    def _take_doomed(self) -> list[str]:
        with self._lock:
            taken, self._doomed = [*self._doomed, *self._make_foreign_room()], []
            return taken

    def _keep_room(self, place: str, error: OSError, stuck: dict[str, int]) -> None:
        """Let the others have less room than before by that of a file that can't be removed."""
        nbytes = self._files.nbytes(place)
        with self._lock:
            if self._stuck is not stuck:  # the folder was indexed anew meanwhile, and it is in that index
                return
            if not stuck:
                _log.warning("KV on disk: a file can't be removed, and takes room: %s", error)
                self._retry_at_s = self._clock() + RETRY_S
            self._policy.capacity_nbytes -= nbytes - stuck.get(place, 0)
            stuck[place] = nbytes

    def _try_stuck(self) -> None:
        """Try again to remove what could not be removed."""
        stuck = self._stuck
        for place, nbytes in list(stuck.items()):
            with suppress(OSError):  # it was logged, and stays where it is
                self._files.remove(place)
                self._stats.num_evicted += 1
                del stuck[place]
                with self._lock:
                    self._policy.capacity_nbytes += nbytes if self._stuck is stuck else 0

    def _make_foreign_room(self) -> list[str]:
        """Forget what can't be used here until all is within the limit, and return the places.

        It has only the room that our own records leave, but a worker that comes back to its former model finds some.
        """
        gone: list[str] = []
        while self._foreign and self._policy.nbytes + self._foreign_nbytes > self._policy.capacity_nbytes:
            file = self._foreign.popleft()
            self._foreign_nbytes -= file.nbytes
            gone.append(file.place)
        return gone

    # Bad luck.

    def _may_write(self) -> bool:
        if self._unreadable:
            self._try_again_if_due()
            return False
        return self._is_indexed and (not self._unwritable or self._retry_is_due())

    def _retry_is_due(self) -> bool:
        """Return whether to try again now; True for one caller in RETRY_S."""
        with self._lock:
            if self._clock() < self._retry_at_s or self._is_closed:
                return False
            self._retry_at_s = self._clock() + RETRY_S
            return True

    def _try_again_if_due(self) -> None:
        """Go on if the folder can be used again, with what it holds then; a thread finds out."""
        if not self._unreadable or self._indexer.is_alive() or not self._retry_is_due():
            return
        with self._lock:
            self._policy = EvictionPolicy(self._capacity_nbytes)
            self._places.clear()
            self._doomed, self._stuck = [], {}  # the index finds what is still there
            self.held.clear()
        self._is_indexed, self._unreadable = False, ""
        self._indexer = threading.Thread(target=self._open, name="kv-disk-index", daemon=True)
        self._indexer.start()

    def _on_read_error(self, error: OSError, key: BlockKey) -> None:
        self._stats.refused["unreadable"] += 1
        self.evict([key])
        if error.errno == errno.ENOENT and self._files.exists():
            return  # one file is missing: somebody tidied up
        self._unreadable, self._retry_at_s = str(error), self._clock() + RETRY_S
        _log.warning("KV on disk (kv_disk) is off: it can't be read: %s; tried again every %.0f s", error, RETRY_S)

    def _on_write_error(self, error: OSError) -> None:
        self._stats.refused["full" if error.errno in _FULL else "unwritable"] += 1
        if not self._files.exists():
            self._on_read_error(error, BlockKey(b""))
            return
        if not self._unwritable:
            _log.warning(
                "KV on disk (kv_disk) keeps nothing new: %s; what is there is read, and writing tried every %.0f s",
                error, RETRY_S,
            )  # fmt: skip
        self._unwritable, self._retry_at_s = str(error), self._clock() + RETRY_S

    def _on_written(self) -> None:
        if self._unwritable:
            _log.info("KV on disk keeps blocks again in %s", self._files.folder)
            self._unwritable = ""
