"""A peer's pool, mapped here.

Its pages are pulled by the copy engine, once it has computed them or on its mark.
"""

import logging
import threading
import time
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from contracts.errors import TransferError
from engine.cuda.kv.deferred_copies import (
    RELEASE_S,
    CopyStreams,
    DeviceCopy,
    HostDeferredCopy,
    StreamDeferredCopy,
    stamp,
)
from engine.cuda.kv.page_checksums import BUCKETS, DeviceChecksums
from engine.cuda.kv.part_kernels import Resharding
from engine.cuda.kv.resharding import HeadPart, grid, spans
from engine.cuda.runtime.launch_recording import synchronize
from engine.cuda.runtime.semaphores import PeerSemaphore
from engine.cuda.runtime.shared_memory import Grid, Mapping, attach
from engine.cuda.runtime.topology import joined_by

_NUM_PROBES = 16
_NUM_READY = 4  # chunks that wait for their marks without new memory for their checksums
_log = logging.getLogger(__name__)

Way = tuple[Mapping, Grid, Tensor, Grid]
"""From a peer's memory to one of ours: a part of each page."""


class PoolExport(msgspec.Struct, frozen=True):
    """A pool in words.

    `memories` open its shards, one of each, `device` is the name of the first one's GPU, `num_pages` those of one
    plane, `page_nbytes` of one shard.
    """

    memories: list[bytes]
    device: str
    num_planes: int
    num_pages: int
    page_nbytes: int


class LocalPool(Protocol):
    """The pool that pages are pulled into: engine.cuda.kv.transfer_pool.DeviceTransferPool."""

    device: torch.device
    num_planes: int
    num_blocks: int
    block_nbytes: int
    copy_streams: CopyStreams | None

    @property
    def num_shards(self) -> int: ...

    @property
    def num_copies(self) -> int: ...

    @property
    def shape(self) -> tuple[int, int, int]: ...

    def cut_into(self, num_parts: int) -> Resharding: ...


class PeerPool:
    """A peer's pool, mapped here. One thread pulls at a time."""

    def __init__(self, ours: LocalPool, sharing: PoolExport, mark: bytes) -> None:
        self._ours, self.num_pages = ours, sharing.num_pages
        self._resharding = _common_resharding(ours, sharing)
        # Of high priority: the checksums come before what decode has launched.
        self._stream = torch.cuda.Stream(ours.device, priority=-1) if ours.device.type == "cuda" else None
        self._thread = 0
        self._mark: PeerSemaphore | None = None
        self._waiting: list[StreamDeferredCopy] = []
        self._ready: list[DeviceChecksums] = []
        self._last_mark = self._expired_to = 0
        self._mappings = attach_all(sharing.memories, ours.device)
        try:
            self._ways = [way for parts in self._resharding.copies for way in _ways(self._mappings, sharing, parts)]
            self.detail = self._open(sharing, mark)
        except TransferError:
            self.close()
            raise

    def _open(self, sharing: PoolExport, mark: bytes) -> str:
        """Returns `detail`."""
        self._mark = self._open_mark(mark) if mark else None
        num_ready = _NUM_READY if self._mark else 0
        self._ready += [self._resharding.checksums_of_landed(BUCKETS[-1]) for _ in range(num_ready)]
        where = way_between(sharing.device, device_name(self._ours.device))
        if len(self._ways) > 1:
            where = f"from {len(sharing.memories)} shards into {self._ours.num_shards}"
        if self._ours.num_copies > 1:
            where += f", {self._ours.num_copies} GPUs each"
        return f"pulled {where}, {self._probe() / 1e9:.0f} GB/s"

    def pull(self, pages: SequenceOf[int], into: SequenceOf[int], checks: bool) -> np.ndarray | None:
        """Copy the peer's `pages` to `into`; they are there on return. Returns their checksums if `checks`.

        The calling thread keeps this pool's stream as its own. Raises TransferError.
        """
        self._take_stream()
        self._copy(pages, into, range(self._ours.num_planes))
        if checks:
            return self._resharding.verifier.sums(into)
        if self._stream is not None:
            synchronize(self._stream.cuda_stream)
        return None

    def _take_stream(self) -> None:
        if self._stream is not None and self._thread != threading.get_ident():
            torch.cuda.set_stream(self._stream)
            self._thread = threading.get_ident()

    def pull_later(
        self, pages: SequenceOf[int], into: SequenceOf[int], checks: bool, early_planes: int, mark: int
    ) -> DeviceCopy | None:
        """Launch what waits for the peer's mark.

        None if there is no mark to wait for, if the mark says no more that the peer has computed it, or if a later one
        is waited for, behind which it would come. Raises TransferError.
        """
        if self._mark is None or 0 < mark <= self._expired_to or 0 < mark < self._last_mark:
            return None
        if self._ours.copy_streams is None:
            self._last_mark = max(self._last_mark, mark)
            return HostDeferredCopy(partial(self.pull, pages, into, checks))
        with self._ours.copy_streams.lent(self) as lane:
            if lane is None:
                return None
            try:
                return self._launch_later(lane, pages, into, checks, early_planes, mark)
            except TransferError:
                self._raise_to(mark)
                raise

    def _launch_later(
        self,
        lane: torch.cuda.Stream,
        pages: SequenceOf[int],
        into: SequenceOf[int],
        checks: bool,
        early_planes: int,
        mark: int,
    ) -> StreamDeferredCopy:
        assert self._mark is not None
        self._last_mark = max(self._last_mark, mark)
        sums, planes = self._checksums(len(into)) if checks else None, range(self._ours.num_planes)
        early_planes = max(early_planes, 0)
        parts = (planes[:early_planes], mark - 1), (planes[early_planes:], mark)
        with torch.cuda.stream(lane):
            if sums is not None:
                sums.prepare(into)
            stamps = []
            for part, value in parts:
                if part:
                    self._mark.wait(value)
                    stamps.append(stamp())
                    self._copy(pages, into, part)
                    stamps.append(stamp())
            if sums is not None:
                sums.go()
            stamps[-1] = stamp()
        later = StreamDeferredCopy(self._mark, mark, stamps, sums, self._is_read)
        self._waiting = [other for other in self._waiting if not other.is_done] + [later]
        return later

    def _copy(self, pages: SequenceOf[int], into: SequenceOf[int], planes: range) -> None:
        for mapping, source, target, target_grid in self._ways:
            mapping.copy_pages(source, pages, target, target_grid, into, planes)

    def _checksums(self, num_pages: int) -> DeviceChecksums:
        """Return the checksums' launch of the least size that holds so many."""
        fitting = [each for each in self._ready if each.max_pages >= num_pages]
        if not fitting:
            max_pages = max(BUCKETS[-1], 1 << (num_pages - 1).bit_length())
            return self._resharding.checksums_of_landed(max_pages)
        least = min(fitting, key=lambda each: each.max_pages)
        self._ready.remove(least)
        return least

    def _is_read(self, sums: DeviceChecksums) -> None:
        """Its memory can serve the next.

        It is kept as long as the link is: giving it back would wait for all streams, those that wait for marks too.
        """
        self._ready.append(sums)

    def expire(self) -> None:
        """Nothing waits for a mark any more: what did is void, and done soon."""
        for pull in self._waiting:
            pull.is_void = pull.is_void or not pull.is_done
        self._raise_to(self._last_mark)

    def _raise_to(self, mark: int) -> None:
        """In the peer's place: up to here the mark tells nothing of what is computed."""
        self._expired_to = max(self._expired_to, mark)
        if self._mark is not None:
            self._mark.raise_to(mark)

    @property
    def is_waiting(self) -> bool:
        return any(not pull.is_done for pull in self._waiting)

    def close(self) -> None:
        """AwaitedPool for what was launched. Idempotent."""
        self.expire()
        while self._ours.copy_streams is not None and not self._ours.copy_streams.give_back(self):
            time.sleep(RELEASE_S)
            self.expire()  # again: a mark that the peer had launched before may have come behind ours
        if self._stream is not None:
            self._stream.synchronize()
        for mapping in self._mappings:
            mapping.close()
        if self._mark is not None:
            self._mark.close()

    def _open_mark(self, shared: bytes) -> PeerSemaphore | None:
        try:
            return PeerSemaphore(shared, self._ours.device)
        except TransferError as error:
            _log.warning("chunks are pulled after they are told of, not before: %s", error)
            return None

    def _probe(self) -> float:
        """Bytes a second of the way that is really taken, between the pages that belong to nobody.

        Opens it, too.
        """
        spare = [self.num_pages - 1] * _NUM_PROBES
        into = [self._ours.num_blocks] * _NUM_PROBES
        took_s = []
        for _ in range(4):  # the first one pays for what is opened
            begin = time.perf_counter()
            self.pull(spare, into, False)
            took_s.append(time.perf_counter() - begin)
            # What is loaded while a stream waits would wait for it.
            if later := self.pull_later(spare, into, True, 1, 0):
                later.wait()
        return _NUM_PROBES * self._ours.block_nbytes / min(took_s)


def _common_resharding(ours: LocalPool, sharing: PoolExport) -> Resharding:
    """Return a partition as fine as the finer of the two. Raises TransferError if there is none."""
    num_parts = max(len(sharing.memories), ours.num_shards)
    theirs, our_shape = (sharing.num_planes, len(sharing.memories), sharing.page_nbytes), ours.shape
    if theirs[0] != our_shape[0] or theirs[1] * theirs[2] != our_shape[1] * our_shape[2]:
        raise TransferError(f"the peer's pages are {theirs} (planes, shards, bytes), ours {our_shape}")
    spans(len(sharing.memories), sharing.page_nbytes, num_parts)
    return ours.cut_into(num_parts)


def attach_all(memories: SequenceOf[bytes], device: torch.device) -> list[Mapping]:
    mappings: list[Mapping] = []
    try:
        for shared in memories:
            mappings.append(attach(shared, device))
    except TransferError:
        for mapping in mappings:
            mapping.close()
        raise
    return mappings


def _ways(mappings: SequenceOf[Mapping], sharing: PoolExport, parts: SequenceOf[HeadPart]) -> list[Way]:
    """Return the way of each part, from the peer's shard to ours."""
    ways = []
    for part, (shard, offset, width) in zip(parts, spans(len(mappings), sharing.page_nbytes, len(parts)), strict=True):
        source = grid(sharing.num_planes, sharing.num_pages, sharing.page_nbytes, width, offset)
        ways.append((mappings[shard], source, part.planes.view(-1), part.grid))
    return ways


def way_between(theirs: str, ours: str) -> str:
    if theirs == ours:
        return "on one GPU"
    way = joined_by(theirs, ours)
    if way == "PCIe":
        _log.warning("no NVLink joins this GPU and the peer's: their handoffs go by PCIe")
    return f"between two GPUs by {way}" if way else "between two GPUs"


def device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "host"
