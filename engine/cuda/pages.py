"""The cache as a transfer to another process sees it: pages that the peer's copy engine reads, and their checksums.

Two devices meet here, without their hosts. Prefill's stream sets a mark behind a chunk; decode's transfer stream, which
was given the copies before, waits for it. A chunk's checksums are launched behind the chunk on the engine's own stream.
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
from engine.cuda.checksums import BUCKETS, Checksums, Verifier
from engine.cuda.memory import Grid, Mark, Marks, Memory, RemoteMark, attach, synchronize
from engine.cuda.staging import Packer, StagingBuffer
from kernels.registry import Registry
from kernels.specs import MoveSpec

_NUM_PROBES = 16
_NUM_READY = 4  # chunks that wait for their marks without new memory for their checksums
_RELEASE_S = 0.0005
_NUM_LANES = 2
_log = logging.getLogger(__name__)


class Sharing(msgspec.Struct, frozen=True):
    """A pool in words: `memory` opens it, `device` is its GPU's name, `num_pages` those of one plane."""

    memory: bytes
    device: str
    num_planes: int
    num_pages: int
    page_nbytes: int


class DevicePages:
    """kv_transfer.device.DevicePool over the cache's memory, `[num_planes, num_blocks + 1, page_nbytes]`.

    `checks`: chunks that are handed over get checksums. `scales`: what each plane's values were divided by before they
    were rounded to e4m3; none of a cache that is not rounded.
    """

    def __init__(
        self,
        memory: Memory,
        layout: KVLayout,
        num_blocks: int,
        registry: Registry,
        scales: SequenceOf[float] = (),
    ) -> None:
        self.memory, self.scales = memory, list(scales)
        self.num_planes, self.num_blocks, self.page_nbytes = layout.num_planes, num_blocks, layout.page_nbytes
        self.device = memory.tensor.device
        self.checks = True
        self._staging = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._planes = memory.tensor.view(self.num_planes, num_blocks + 1, self.page_nbytes)
        spec = MoveSpec(self.num_planes, self.page_nbytes, checksum=True)
        self._sum = partial(registry.get("kv_sums", spec), self._planes)
        self._is_kernel = registry.resolve("kv_sums", spec).impl.name == "triton"
        self.verifier = Verifier(self._sum, self.num_planes, num_blocks, self.device)
        self._packer = Packer(self._planes, self._sum, registry, layout.dtype == "bfloat16")
        self.lanes = Lanes(self.device) if self.device.type == "cuda" else None
        self._marks: Marks | None = None
        self._lock = threading.Lock()

    @property
    def kind(self) -> str:
        return self.device.type

    @property
    def grid(self) -> Grid:
        return Grid(self.page_nbytes, self.num_planes, self._planes.stride(0))

    def share(self) -> bytes:
        """Raises TransferError where the device does not let others in."""
        sharing = Sharing(
            self.memory.share(), _name(self.device), self.num_planes, self._planes.shape[1], self.page_nbytes
        )
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
        """Nobody finds the marks from now on. Idempotent."""
        if self._marks is not None:
            self._marks.close()

    def attach(self, shared: bytes, mark: bytes = b"") -> "RemotePages":
        """A peer's pool, from what its `share` said. Raises TransferError if it can't be read from here."""
        try:
            sharing = msgspec.msgpack.decode(shared, type=Sharing)
        except msgspec.DecodeError as error:
            raise TransferError(f"the peer does not say where its pages are: {error}") from error
        return RemotePages(self, sharing, mark)

    def checksums(self, pages: SequenceOf[int]) -> Checksums:
        """Launched on the current stream, behind what writes these pages."""
        sums = self.checksums_of(len(pages))
        sums.launch(pages)
        return sums

    def checksums_of(self, max_pages: int, is_mapped: bool = False) -> Checksums:
        """Of pages that will be named."""
        return Checksums(self._sum, self.num_planes, max_pages, self.device, is_mapped)

    def enter(self) -> None:
        """The calling thread works with this device from now on."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def lend(self, nbytes: int) -> StagingBuffer:
        return self._packer.lend(nbytes)

    def take_back(self, buffer: StagingBuffer) -> None:
        buffer.free()

    def pack(self, pages: np.ndarray, into: StagingBuffer) -> None:
        """Copy `pages` to its start, all planes of each in turn; they are there on return."""
        self._packer.pack(pages, into)

    def unpack(self, buffer: StagingBuffer, pages: np.ndarray, checks: bool) -> np.ndarray | None:
        """The other way round. Returns the checksums of `pages` if `checks`, `[pages, planes]`, as they are then."""
        return self._packer.unpack(buffer, pages, checks)

    def narrowing(self, scales: SequenceOf[float]) -> Tensor:
        """What `narrow` takes, for a peer with these scales. As the kernel that writes e4m3 caches has them: inverted
        in double precision, then rounded.
        """
        return torch.tensor([1.0 / scale for scale in scales], dtype=torch.float32, device=self.device)

    def narrow(self, pages: np.ndarray, into: StagingBuffer, narrowing: Tensor) -> np.ndarray:
        """As `pack`, each plane divided by the peer's scale and rounded to e4m3."""
        return self._packer.narrow(pages, into, narrowing)

    def warm_up(self) -> None:
        """Compile the kernels of checksums and of packing, one for all numbers of pages."""
        self._packer.warm_up()
        self.checksums([0]).wait()
        if self._is_kernel:
            self.verifier.capture()

    @torch.inference_mode()
    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy pages into `out` on the host; `rows` as kv_transfer.plan.row_ids counts them."""
        with self._aside():
            found = self._planes.view(-1, self.page_nbytes).index_select(0, self._index(rows))
            torch.from_numpy(out.reshape(-1, self.page_nbytes)).copy_(found)

    @torch.inference_mode()
    def scatter(self, rows: np.ndarray, data: np.ndarray) -> None:
        with self._aside():
            pages = torch.from_numpy(data.reshape(-1, self.page_nbytes)).to(self.device)
            self._planes.view(-1, self.page_nbytes).index_copy_(0, self._index(rows), pages)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def _index(self, rows: np.ndarray) -> Tensor:
        """Each plane has a page more than blocks."""
        return torch.from_numpy(rows + rows // self.num_blocks).to(self.device)

    def _aside(self) -> AbstractContextManager[object]:
        """Beside the engine's stream, for any thread."""
        return torch.cuda.stream(self._staging) if self._staging is not None else nullcontext()


class RemotePages:
    """A peer's pool, mapped here. One thread pulls at a time."""

    def __init__(self, ours: DevicePages, sharing: Sharing, mark: bytes) -> None:
        self._grid = Grid(sharing.page_nbytes, sharing.num_planes, sharing.page_nbytes * sharing.num_pages)
        if (self._grid.width, self._grid.height) != (ours.grid.width, ours.grid.height):
            raise TransferError(f"the peer's pages are {self._grid}, ours {ours.grid}")
        self._ours, self.num_pages = ours, sharing.num_pages
        # Of high priority: the checksums come before what decode has launched.
        self._stream = torch.cuda.Stream(ours.device, priority=-1) if ours.device.type == "cuda" else None
        self._thread = 0
        self._mapping = attach(sharing.memory, ours.device)
        self._mark = self._open_mark(mark) if mark else None
        self._waiting: list[WaitingPull] = []
        self._last_mark = self._hurried_to = 0
        self._ready = [ours.checksums_of(BUCKETS[-1], is_mapped=True) for _ in range(_NUM_READY if self._mark else 0)]
        where = "on one GPU" if sharing.device == _name(ours.device) else "between two GPUs"
        self.detail = f"pulled {where}, {self._probe() / 1e9:.0f} GB/s"

    def pull(self, pages: SequenceOf[int], into: SequenceOf[int], checks: bool) -> np.ndarray | None:
        """Copy the peer's `pages` to `into`; they are there on return. Returns their checksums if `checks`.

        The calling thread keeps this pool's stream as its own. Raises TransferError.
        """
        ours = self._ours
        if self._stream is not None and self._thread != threading.get_ident():
            torch.cuda.set_stream(self._stream)
            self._thread = threading.get_ident()
        self._copy(pages, into, range(self._grid.height))
        if checks:
            return ours.verifier.sums(into)
        if self._stream is not None:
            synchronize(self._stream.cuda_stream)
        return None

    def pull_later(
        self, pages: SequenceOf[int], into: SequenceOf[int], checks: bool, early_planes: int, mark: int
    ) -> "Later | None":
        """Launch what waits for the peer's mark. None if there is no mark to wait for, or if the mark says no more that
        the peer has computed it. Raises TransferError.
        """
        if self._mark is None or 0 < mark <= self._hurried_to:
            return None
        if self._ours.lanes is None:
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
        sums, planes = self._checksums(len(into)) if checks else None, range(self._grid.height)
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
        later = WaitingPull(self._mark, mark, stamps, partial(self._read, sums))
        self._waiting = [other for other in self._waiting if not other.is_done] + [later]
        return later

    def _copy(self, pages: SequenceOf[int], into: SequenceOf[int], planes: range) -> None:
        self._mapping.copy_pages(self._grid, pages, self._ours.memory.tensor, self._ours.grid, into, planes)

    def _checksums(self, num_pages: int) -> Checksums:
        if num_pages > BUCKETS[-1]:
            return self._ours.checksums_of(num_pages, is_mapped=True)
        return self._ready.pop() if self._ready else self._ours.checksums_of(BUCKETS[-1], is_mapped=True)

    def _read(self, sums: Checksums | None) -> np.ndarray | None:
        """Its memory can serve the next."""
        if sums is None:
            return None
        found = sums.read()
        if len(self._ready) < _NUM_READY and sums.max_pages == BUCKETS[-1]:
            self._ready.append(sums)
        return found

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
        self._mapping.close()
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
        return _NUM_PROBES * self._grid.width * self._grid.height / min(took_s)


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

    `stamps`: begin and end of each part, recorded on the stream.
    """

    def __init__(
        self,
        mark: RemoteMark,
        value: int,
        stamps: SequenceOf[torch.cuda.Event],
        read: Callable[[], np.ndarray | None],
    ) -> None:
        self._mark, self._value, self._stamps, self._read = mark, value, stamps, read
        self._done = stamps[-1]
        self.is_void = False

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
        return self._read()


class LazyPull:
    """Where no stream can wait: copied when it is asked for."""

    is_void, is_done = False, True

    def __init__(self, remote: RemotePages, pages: SequenceOf[int], into: SequenceOf[int], checks: bool) -> None:
        self._pull = partial(remote.pull, pages, into, checks)
        self.busy_s = 0.0

    def wait(self) -> np.ndarray | None:
        start = time.perf_counter()
        sums = self._pull()
        self.busy_s = time.perf_counter() - start
        return sums


Later = WaitingPull | LazyPull


def _stamp() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _name(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "host"
