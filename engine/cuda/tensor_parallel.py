"""The processes of a team that its first member's process started.

It tells them each batch, they launch the same.

A member that is gone would leave the others waiting on their GPUs for good, so a team lives and dies together: when a
follower ends, the first one's process ends too, as a worker does whose core has died; a follower's ends with it
(process.parent_death).
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Pipe
from typing import Any, NoReturn

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from engine.cuda.inputs.batch_inputs import DeviceBatch, SampleBatch
from engine.cuda.runtime.process_group import DistributedProcessGroup, ProcessGroup, hold_store
from engine.model_loader.tensor_parallel_shards import Shard
from engine.settings import EngineSettings
from process.parent_death import die_with_parent

_log = logging.getLogger(__name__)

_END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RankStart:
    """The first thing a follower is told. `reopen`: engine.cuda.loader.OpenModel."""

    settings: EngineSettings
    shard: Shard
    store_port: int
    device: str
    reopen: Callable[..., Any]
    log_level: int


@dataclass(frozen=True)
class RankFailure:
    """A follower's last words."""

    words: str


class TensorParallelGroup:
    """`start`, then `join` the team with them; from then on each batch is told before it is launched here."""

    def __init__(self, store: TCPStore, members: list["_RankProcess"]) -> None:
        self._store, self._members, self._group = store, members, ProcessGroup()
        self._watchers: list[threading.Thread] = []
        self._is_closed = False

    @classmethod
    def start(cls, settings: EngineSettings, device: torch.device, reopen: Callable[..., Any]) -> "TensorParallelGroup":
        """On the GPUs after `device`, one each."""
        size = settings.tensor_parallel
        store = hold_store(size)
        level = logging.getLogger().getEffectiveLevel()
        members = []
        for rank in range(1, size):
            where = f"cuda:{(device.index or 0) + rank}" if device.type == "cuda" else device.type
            begin = RankStart(replace(settings, device=where), Shard(rank, size), store.port, where, reopen, level)
            members.append(_RankProcess(begin))
        return cls(store, members)

    def join(self, device: torch.device) -> ProcessGroup:
        self._watchers = [threading.Thread(target=self._watch, args=(each,), daemon=True) for each in self._members]
        for watcher in self._watchers:
            watcher.start()
        self._group = DistributedProcessGroup(Shard(0, len(self._members) + 1), self._store, device)
        return self._group

    @contextmanager
    def broadcast(self, batch: DeviceBatch | SampleBatch) -> Iterator[None]:
        """Within, the first one launches what all were told.

        If it can't, sums would be of different batches from now on: this process ends.
        """
        try:
            self._tell(batch)
            yield
        except BaseException:
            _log.critical("a batch that the other GPUs of this worker compute was not launched here", exc_info=True)
            end_at_once()

    def close(self) -> None:
        """They have finished what they were told, and are gone on return. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._end(_END_TIMEOUT_S if self._part() else 0.0)

    def abandon(self) -> None:
        """Close in the middle of something.

        They may wait on their GPUs for this process's, which goes no further. Nor may NCCL be asked for its end, which
        waits for theirs.
        """
        self._is_closed = True
        self._end(0.0)

    def _tell(self, batch: DeviceBatch | SampleBatch) -> None:
        """Raises OSError if one is gone and its watcher has not said so yet."""
        try:
            for member in self._members:
                member.pipe.send(batch)
        except OSError:
            for watcher in self._watchers:
                watcher.join(_END_TIMEOUT_S)
            raise

    def _part(self) -> bool:
        """Whether all have left the team: all at once, or NCCL waits for good for those that are missing."""
        if not all([member.dismiss() for member in self._members]):
            return False
        parting = threading.Thread(target=self._group.close, daemon=True)
        parting.start()
        parting.join(_END_TIMEOUT_S)
        if parting.is_alive():
            _log.warning("this worker's GPUs did not part within %.0f s: their processes are killed", _END_TIMEOUT_S)
        return not parting.is_alive()

    def _end(self, timeout_s: float) -> None:
        for member in self._members:
            member.end(timeout_s)

    def _watch(self, member: "_RankProcess") -> None:
        """Ends this process, whose GPU may wait for the follower's, when the follower has ended by itself."""
        words = member.last_words()
        if not self._is_closed:
            _log.critical("the process of GPU %d of this worker ended: %s", member.rank, words)
            end_at_once()


def end_at_once() -> NoReturn:
    """Without cleaning up: giving memory back waits for what the GPU was given, and that for another GPU."""
    logging.shutdown()
    os._exit(1)


class _RankProcess:
    def __init__(self, begin: RankStart) -> None:
        self.rank = begin.shard.rank
        self.pipe, theirs = Pipe()
        with theirs:
            command = die_with_parent([sys.executable, "-m", "engine.cuda.rank_process", str(theirs.fileno())])
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.pipe.send(begin)

    def last_words(self) -> str:
        """When it has ended."""
        try:
            said = self.pipe.recv()
        except (EOFError, OSError):
            said = None
        if isinstance(said, RankFailure):
            return said.words
        return f"exit status {self._process.wait()}"

    def dismiss(self) -> bool:
        """Tell it that it is over. False if it is gone already."""
        try:
            self.pipe.send(None)
        except OSError:
            return False
        return self._process.poll() is None

    def end(self, timeout_s: float) -> None:
        """It is gone on return."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
