"""The cache as a transfer to another process sees it: pages that the peer's copy engine reads, and their checksums.

Two devices meet here, without their hosts. Prefill's stream sets a mark behind a chunk's KV; decode's transfer stream,
which was given the copies before, waits for it. A chunk's checksums are made on a stream of their own, beside what the
engine's stream holds behind the KV: the last attention, the head and the draw.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from contracts.errors import TransferError
from contracts.layout import KVLayout
from engine.cuda.checksums import BUCKETS, Checksums, Summings
from engine.cuda.cuts import Cut
from engine.cuda.memory import Grid, Mapping, Mark, Marks, Memory, RemoteMark, attach, synchronize
from engine.cuda.parts import Part, grid, spans
from engine.cuda.staging import StagingBuffer
from kernels.registry import Registry

_NUM_PROBES = 16
_NUM_READY = 4  # chunks that wait for their marks without new memory for their checksums
_RELEASE_S = 0.0005
_NUM_LANES = 2
_log = logging.getLogger(__name__)

Way = tuple[Mapping, Grid, Tensor, Grid]
"""From a peer's memory to one of ours: a part of each page."""


class Sharing(msgspec.Struct, frozen=True):
    """A pool in words: `memories` open its shards, `device` is the name of the first one's GPU, `num_pages` those of
    one plane, `page_nbytes` of one shard.
    """

    memories: list[bytes]
    device: str
    num_planes: int
    num_pages: int
    page_nbytes: int


class DevicePages:
    """kv_transfer.device.DevicePool over the memories of a group of workers, `[num_planes, num_blocks + 1,
    page_nbytes]` each: ours, and those of our followers, of whom these are the words of Memory.share, in the order of
    the heads.

    `checks`: chunks that are handed over get checksums. `scales`: what each plane's values were divided by before they
    were rounded to e4m3; none of a cache that is not rounded. All work is done by our device, which reaches the other
    ones' memory. Raises TransferError if a follower's can't be mapped.
    """

    def __init__(
        self,
        memory: Memory,
        layout: KVLayout,
        num_blocks: int,
        registry: Registry,
        scales: SequenceOf[float] = (),
        followers: SequenceOf[bytes] = (),
    ) -> None:
        assert layout.tp_size == 1 + len(followers), f"{layout.tp_size} shards, {len(followers)} followers"
        self.memory, self.scales, self._followers = memory, list(scales), list(followers)
        self.num_planes, self.num_blocks, self.page_nbytes = layout.num_planes, num_blocks, layout.page_nbytes
        self.block_nbytes = layout.block_nbytes
        self.device = memory.tensor.device
        self.checks = True
        self._staging = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # Of a team nobody knows when all have written before they meet again.
        self._summing = torch.cuda.Stream(self.device) if self._staging is not None and not followers else None
        self._written = torch.cuda.Event() if self._summing is not None else None
        self._mappings = _attach_all(followers, self.device)
        tensors = [memory.tensor, *(mapping.tensor(len(memory.tensor)) for mapping in self._mappings)]
        self._shards = [tensor.view(self.num_planes, num_blocks + 1, self.page_nbytes) for tensor in tensors]
        self._registry, self._narrows = registry, layout.dtype == "bfloat16"
        self._cuts: dict[int, Cut] = {}
        self._summed = [len(tensors)]  # the numbers of parts that chunks are summed up in; only ever longer
        self._lock = threading.Lock()
        self._own = self.cut_into(len(tensors), warms=False)
        self.lanes = Lanes(self.device) if self.device.type == "cuda" else None
        self._marks: Marks | None = None

    @property
    def kind(self) -> str:
        return self.device.type

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Planes, shards, bytes of a shard's page."""
        return self.num_planes, self.num_shards, self.page_nbytes

    def expect(self, part_counts: SequenceOf[int]) -> None:
        """Peers may want pages in so many parts: what that takes is compiled now, and not in their handshakes. Before
        anything else launches kernels of ours. Raises TransferError as `cut_into`.
        """
        start = time.perf_counter()
        fresh = {count: self._cut(count) for count in part_counts if count not in self._cuts}
        self._warm_up(list(fresh.values()))
        self._cuts |= fresh
        if fresh:
            _log.info("pages in %s parts: ready in %.1f s", ", ".join(map(str, fresh)), time.perf_counter() - start)

    def cut_into(self, num_parts: int, warms: bool = True) -> Cut:
        """Compiles what is needed for it, if that was not expected. Raises TransferError if it can't be cut so."""
        with self._lock:
            if num_parts not in self._cuts:
                fresh = self._cut(num_parts)
                if warms:
                    self.enter()
                    fresh.warm_up()
                self._cuts[num_parts] = fresh
            return self._cuts[num_parts]

    def agreed(self, num_parts: int, sends: bool) -> None:
        """Pages go to a peer, or come from one, in so many parts."""
        self.cut_into(num_parts)
        with self._lock:
            if sends and num_parts not in self._summed:
                self._summed.append(num_parts)

    def share(self) -> bytes:
        """Raises TransferError where the device does not let others in."""
        memories = [self.memory.share(), *self._followers]
        num_pages = self._shards[0].shape[1]
        sharing = Sharing(memories, _name(self.device), self.num_planes, num_pages, self.page_nbytes)
        return msgspec.msgpack.encode(sharing)

    def mark(self) -> Mark | None:
        """One of its own for each peer."""
        try:
            with self._lock:
                self._marks = self._marks or Marks(self.device)
                return self._marks.next()
        except TransferError as error:
            _log.warning("chunks are told of after they are computed, not before: %s", error)
            return None

    def close(self) -> None:
        """Nothing is launched any more: nobody finds the marks from now on, and the followers' memory is unmapped.
        Idempotent.
        """
        if self._marks is not None:
            self._marks.close()
        for mapping in self._mappings:
            mapping.close()

    def attach(self, shared: bytes, mark: bytes = b"") -> "RemotePages":
        """A peer's pool, from what its `share` said. Raises TransferError if it can't be read from here."""
        try:
            sharing = msgspec.msgpack.decode(shared, type=Sharing)
        except msgspec.DecodeError as error:
            raise TransferError(f"the peer does not say where its pages are: {error}") from error
        return RemotePages(self, sharing, mark)

    def checksums(self, pages: SequenceOf[int]) -> Checksums | Summings:
        """Launched on the current stream, behind what writes these pages. By shard; where a peer's shards are finer, by
        those too.
        """
        if len(self._summed) == 1:
            return self._launched(self._own, pages)
        return Summings([self._launched(self._cuts[num_parts], pages) for num_parts in list(self._summed)])

    def written(self) -> None:
        """What `checksums_aside` is asked for next is written by what the current stream holds."""
        if self._written is not None:
            self._written.record()

    def checksums_aside(self, pages: SequenceOf[int]) -> Checksums | Summings:
        """Behind what `written` was said of, beside what the current stream was given since."""
        if self._summing is None or self._written is None:
            return self.checksums(pages)
        # Their memory is that stream's too: it is nobody else's before the device has used it.
        with torch.cuda.stream(self._summing):
            self._summing.wait_event(self._written)
            return self.checksums(pages)

    def in_parts(self, sums: np.ndarray, pages: SequenceOf[int], num_parts: int) -> np.ndarray:
        """Those of what `checksums` gave of `pages` that are by so many parts. What was not known to be wanted when it
        was launched is summed up now.
        """
        ways = list(self._summed)
        first = sum(ways[: ways.index(num_parts)]) * self.num_planes
        last = first + num_parts * self.num_planes
        if sums.shape[1] >= last:
            return sums[:, first:last]
        with self._aside():
            return self._cuts[num_parts].verifier.sums(pages)

    def enter(self) -> None:
        """The calling thread works with this device from now on."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def lend(self, nbytes: int) -> StagingBuffer:
        return self._own.packer.lend(nbytes)

    def take_back(self, buffer: StagingBuffer) -> None:
        buffer.free()

    def pack(self, pages: np.ndarray, into: StagingBuffer, num_parts: int) -> None:
        """Copy `pages` to its start, each in its parts, all planes of each part in turn; they are there on return."""
        self.cut_into(num_parts).packer.pack(pages, into)

    def unpack(self, buffer: StagingBuffer, pages: np.ndarray, checks: bool, num_parts: int) -> np.ndarray | None:
        """The other way round. Returns the checksums of `pages` if `checks`, `[pages, parts * planes]`, as they are
        then.
        """
        return self.cut_into(num_parts).packer.unpack(buffer, pages, checks)

    def narrowing(self, scales: SequenceOf[float]) -> Tensor:
        """What `narrow` takes, for a peer with these scales. As the kernel that writes e4m3 caches has them: inverted
        in double precision, then rounded.
        """
        return torch.tensor([1.0 / scale for scale in scales], dtype=torch.float32, device=self.device)

    def narrow(self, pages: np.ndarray, into: StagingBuffer, narrowing: Tensor, num_parts: int) -> np.ndarray:
        """As `pack`, each plane divided by the peer's scale and rounded to e4m3."""
        return self.cut_into(num_parts).packer.narrow(pages, into, narrowing)

    def warm_up(self) -> None:
        """Compile the kernels of checksums and of packing, one for all numbers of pages; before anything else launches
        kernels of ours.
        """
        self._warm_up([self._own])

    @torch.inference_mode()
    def gather(self, rows: np.ndarray, out: np.ndarray, num_parts: int = 1) -> None:
        """Copy parts of pages into `out` on the host; `rows` as kv_transfer.plan.row_ids counts them."""
        with self._aside():
            for part, index, chosen in self._by_part(rows, num_parts):
                found = part.rows.index_select(0, index)
                torch.from_numpy(out.reshape(-1, part.width)[chosen]).copy_(found)

    @torch.inference_mode()
    def scatter(self, rows: np.ndarray, data: np.ndarray, num_parts: int = 1) -> None:
        with self._aside():
            for part, index, chosen in self._by_part(rows, num_parts):
                pages = torch.from_numpy(data.reshape(-1, part.width)[chosen]).to(self.device)
                part.rows.index_copy_(0, index, pages)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def _cut(self, num_parts: int) -> Cut:
        return Cut(self._shards, num_parts, self._registry, self._narrows)

    def _warm_up(self, cuts: SequenceOf[Cut]) -> None:
        self.enter()
        if self.device.type == "cuda":
            from kernels.compiling import compiled_ahead  # imports Triton, which a CPU does without

            with compiled_ahead():
                for each in cuts:
                    each.run_all()
        for each in cuts:
            each.warm_up()

    def _launched(self, cut: Cut, pages: SequenceOf[int]) -> Checksums:
        sums = cut.checksums_of(len(pages))
        sums.launch(pages)
        return sums

    def _by_part(self, rows: np.ndarray, num_parts: int) -> Iterator[tuple[Part, Tensor, slice]]:
        """Each part that is among `rows`, which of its rows, and where among all: they come part by part. Each plane
        has a page more than blocks.
        """
        parts, inner = np.divmod(rows, self.num_planes * self.num_blocks)
        index = inner + inner // self.num_blocks
        for number, part in enumerate(self.cut_into(num_parts).parts):
            first, last = np.searchsorted(parts, (number, number + 1)).tolist()
            if first < last:
                yield part, torch.from_numpy(index[first:last]).to(self.device), slice(first, last)

    def _aside(self) -> AbstractContextManager[object]:
        """Beside the engine's stream, for any thread."""
        return torch.cuda.stream(self._staging) if self._staging is not None else nullcontext()


class RemotePages:
    """A peer's pool, mapped here. One thread pulls at a time."""

    def __init__(self, ours: DevicePages, sharing: Sharing, mark: bytes) -> None:
        self._ours, self.num_pages = ours, sharing.num_pages
        self._cut = _common_cut(ours, sharing)
        # Of high priority: the checksums come before what decode has launched.
        self._stream = torch.cuda.Stream(ours.device, priority=-1) if ours.device.type == "cuda" else None
        self._thread = 0
        self._mark: RemoteMark | None = None
        self._waiting: list[WaitingPull] = []
        self._ready: list[Checksums] = []
        self._last_mark = self._hurried_to = 0
        self._mappings = _attach_all(sharing.memories, ours.device)
        try:
            self._ways = _ways(self._mappings, sharing, self._cut.parts)
            self.detail = self._open(sharing, mark)
        except TransferError:
            self.close()
            raise

    def _open(self, sharing: Sharing, mark: bytes) -> str:
        """Returns `detail`."""
        self._mark = self._open_mark(mark) if mark else None
        num_ready = _NUM_READY if self._mark else 0
        self._ready += [self._cut.checksums_of(BUCKETS[-1], is_mapped=True) for _ in range(num_ready)]
        where = "on one GPU" if sharing.device == _name(self._ours.device) else "between two GPUs"
        if len(self._ways) > 1:
            where = f"from {len(sharing.memories)} shards into {self._ours.num_shards}"
        return f"pulled {where}, {self._probe() / 1e9:.0f} GB/s"

    def pull(self, pages: SequenceOf[int], into: SequenceOf[int], checks: bool) -> np.ndarray | None:
        """Copy the peer's `pages` to `into`; they are there on return. Returns their checksums if `checks`.

        The calling thread keeps this pool's stream as its own. Raises TransferError.
        """
        ours = self._ours
        if self._stream is not None and self._thread != threading.get_ident():
            torch.cuda.set_stream(self._stream)
            self._thread = threading.get_ident()
        self._copy(pages, into, range(ours.num_planes))
        if checks:
            return self._cut.verifier.sums(into)
        if self._stream is not None:
            synchronize(self._stream.cuda_stream)
        return None

    def pull_later(
        self, pages: SequenceOf[int], into: SequenceOf[int], checks: bool, early_planes: int, mark: int
    ) -> "Later | None":
        """Launch what waits for the peer's mark. None if there is no mark to wait for, if the mark says no more that
        the peer has computed it, or if a later one is waited for, behind which it would come. Raises TransferError.
        """
        if self._mark is None or 0 < mark <= self._hurried_to or 0 < mark < self._last_mark:
            return None
        if self._ours.lanes is None:
            self._last_mark = max(self._last_mark, mark)
            return LazyPull(self, pages, into, checks)
        with self._ours.lanes.lent(self) as lane:
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
    ) -> "WaitingPull":
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
                    stamps.append(_stamp())
                    self._copy(pages, into, part)
                    stamps.append(_stamp())
            if sums is not None:
                sums.go()
            stamps[-1] = _stamp()
        later = WaitingPull(self._mark, mark, stamps, sums, self._is_read)
        self._waiting = [other for other in self._waiting if not other.is_done] + [later]
        return later

    def _copy(self, pages: SequenceOf[int], into: SequenceOf[int], planes: range) -> None:
        for mapping, source, target, target_grid in self._ways:
            mapping.copy_pages(source, pages, target, target_grid, into, planes)

    def _checksums(self, num_pages: int) -> Checksums:
        if num_pages > BUCKETS[-1]:
            return self._cut.checksums_of(num_pages, is_mapped=True)
        return self._ready.pop() if self._ready else self._cut.checksums_of(BUCKETS[-1], is_mapped=True)

    def _is_read(self, sums: Checksums) -> None:
        """Its memory can serve the next. It is kept as long as the link is: giving it back would wait for all streams,
        those that wait for marks too.
        """
        if sums.max_pages == BUCKETS[-1]:
            self._ready.append(sums)

    def hurry(self) -> None:
        """Nothing waits for a mark any more: what did is void, and done soon."""
        for pull in self._waiting:
            pull.is_void = pull.is_void or not pull.is_done
        self._raise_to(self._last_mark)

    def _raise_to(self, mark: int) -> None:
        """In the peer's place: up to here the mark tells nothing of what is computed."""
        self._hurried_to = max(self._hurried_to, mark)
        if self._mark is not None:
            self._mark.raise_to(mark)

    @property
    def is_waiting(self) -> bool:
        return any(not pull.is_done for pull in self._waiting)

    def rehearse(self) -> None:
        """Pull what belongs to nobody: the next pull finds the caches as it needs them."""
        self.pull([self.num_pages - 1], [self._ours.num_blocks], True)

    def close(self) -> None:
        """Waits for what was launched. Idempotent."""
        self.hurry()
        while self._ours.lanes is not None and not self._ours.lanes.give_back(self):
            time.sleep(_RELEASE_S)
            self.hurry()  # again: a mark that the peer had launched before may have come behind ours
        if self._stream is not None:
            self._stream.synchronize()
        for mapping in self._mappings:
            mapping.close()
        if self._mark is not None:
            self._mark.close()

    def _open_mark(self, shared: bytes) -> RemoteMark | None:
        try:
            return RemoteMark(shared, self._ours.device)
        except TransferError as error:
            _log.warning("chunks are pulled after they are told of, not before: %s", error)
            return None

    def _probe(self) -> float:
        """Bytes a second of the way that is really taken, between the pages that belong to nobody. Opens it, too."""
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


def _common_cut(ours: DevicePages, sharing: Sharing) -> Cut:
    """As fine as the finer of the two. Raises TransferError if there is none."""
    num_parts = max(len(sharing.memories), ours.num_shards)
    theirs, our_shape = (sharing.num_planes, len(sharing.memories), sharing.page_nbytes), ours.shape
    if theirs[0] != our_shape[0] or theirs[1] * theirs[2] != our_shape[1] * our_shape[2]:
        raise TransferError(f"the peer's pages are {theirs} (planes, shards, bytes), ours {our_shape}")
    spans(len(sharing.memories), sharing.page_nbytes, num_parts)
    return ours.cut_into(num_parts)


def _attach_all(memories: SequenceOf[bytes], device: torch.device) -> list[Mapping]:
    mappings: list[Mapping] = []
    try:
        for shared in memories:
            mappings.append(attach(shared, device))
    except TransferError:
        for mapping in mappings:
            mapping.close()
        raise
    return mappings


def _ways(mappings: SequenceOf[Mapping], sharing: Sharing, parts: SequenceOf[Part]) -> list[Way]:
    """Of each part, from the peer's shard to ours."""
    ways = []
    for part, (shard, offset, width) in zip(parts, spans(len(mappings), sharing.page_nbytes, len(parts)), strict=True):
        source = grid(sharing.num_planes, sharing.num_pages, sharing.page_nbytes, width, offset)
        ways.append((mappings[shard], source, part.planes.view(-1), part.grid))
    return ways


class Lanes:
    """Streams that may wait for a peer's mark, each for one peer at a time. Two: while four waited, nothing else that
    this process gave its GPU went on (H200).

    Of high priority: the checksums come before what decode has launched.
    """

    def __init__(self, device: torch.device) -> None:
        self._free = [torch.cuda.Stream(device, priority=-1) for _ in range(_NUM_LANES)]
        self._taken: dict[RemotePages, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, remote: RemotePages) -> Iterator[torch.cuda.Stream | None]:
        """None if all have others that wait. Whoever launches does so within: a lane on which something is being
        launched looks idle to others.
        """
        with self._lock:
            yield self._of(remote)

    def _of(self, remote: RemotePages) -> torch.cuda.Stream | None:
        if remote in self._taken:
            return self._taken[remote]
        for other in [other for other in self._taken if not other.is_waiting]:
            self._free.append(self._taken.pop(other))
        if not self._free:
            return None
        self._taken[remote] = self._free.pop()
        return self._taken[remote]

    def give_back(self, remote: RemotePages) -> bool:
        """False while something is on it."""
        with self._lock:
            if remote in self._taken:
                if not self._taken[remote].query():
                    return False
                self._free.append(self._taken.pop(remote))
            return True


class WaitingPull:
    """Launched on a stream that waits for the peer's mark. The peer may be gone, or hang: the mark is ours to set.

    `stamps`: begin and end of each part, recorded on the stream. `is_read` hears of `sums` when nobody needs them.
    """

    def __init__(
        self,
        mark: RemoteMark,
        value: int,
        stamps: SequenceOf[torch.cuda.Event],
        sums: Checksums | None,
        is_read: Callable[[Checksums], None],
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
            time.sleep(_RELEASE_S)
        self._done.synchronize()
        found = None if self._sums is None else self._sums.read()
        self.drop()
        return found

    def drop(self) -> None:
        sums, self._sums = self._sums, None
        if sums is not None:
            self._is_read(sums)


class LazyPull:
    """Where no stream can wait: copied when it is asked for."""

    is_void, is_done, is_due = False, True, False

    def __init__(self, remote: RemotePages, pages: SequenceOf[int], into: SequenceOf[int], checks: bool) -> None:
        self._pull = partial(remote.pull, pages, into, checks)
        self.busy_s = 0.0

    def wait(self) -> np.ndarray | None:
        start = time.perf_counter()
        sums = self._pull()
        self.busy_s = time.perf_counter() - start
        return sums

    def drop(self) -> None:
        """It takes nothing."""


Later = WaitingPull | LazyPull


def _stamp() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "host"
