"""The transport by UCX through ucxx's core layer: TCP, or RDMA where UCX finds it.

This is the only file that imports ucxx. The following decides speed and safety, all of it seen on ucxx 0.52 with UCX
1.22:

* Endpoint error handling is on: without it a dead peer is never reported. It excludes UCX's own shared memory, for
  which there is the shm transport. Over TCP it also excludes direct writes into the receiver's memory.
* TCP segments have 1 MiB, which holds a whole message: the defaults (8 and 64 KiB) halve the throughput of large
  messages, and messages of half that size wake the receiver twice as often, up to 1.5 times the CPU.
* put_zcopy: direct writes where the network has them (RDMA). Over TCP, which has not, it turns the rendezvous off, and
  its round trip for each message: 8 to 12 % less CPU.
* Each post drives the worker once, so that packing and sending overlap.
* The thread that waits sleeps in epoll on the worker's descriptor; nothing polls.
* Active messages: one that is a TCP segment is passed to us where UCX received it. A tagged receive copies it once
  more, into memory that it then scatters from: a seventh of all CPU time.
* UCX does not keep buffers alive, and dropping a request does not stop it: buffers are freed after the endpoint is
  closed and every request has completed.
* A worker whose peer was killed or stopped in mid-message is sometimes not destroyed (about one in ten) and keeps 8 to
  14 descriptors. cancel_inflight_requests() after the close frees some of them, but a clean close followed by it, or by
  progress(), hangs inside UCX with the GIL held. So they are left.
* UCX listens on every network device, without a secret: ten connections of malformed messages ended a process by
  SIGSEGV. So two ends of one host that are connected over its loopback interface use that alone.
* A sender's "complete" is not delivery: that is what Commit is for.
"""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from socket import socket
from typing import Any

import numpy as np
import ucxx._lib.libucxx as _libucxx

from contracts.errors import PeerLost, TransferError
from kv_transfer.chunks.wire_format import META_NBYTES
from kv_transfer.transports.base import ChannelOffer, Inbound, Outbound, Ring, Slot, Take
from kv_transfer.transports.stall_limit import StallLimit
from kv_transfer.transports.ucx_endpoint import endpoint_lanes
from kv_transfer.transports.ucx_messages import Operation, Receiving, flush, send

log = logging.getLogger(__name__)

ucx: Any = _libucxx  # it comes without types

# Shared memory is excluded by error handling anyway; "^sm" spares its segments and descriptors. RDMA stays possible.
CONFIG = {"TLS": "^sm", "TCP_TX_SEG_SIZE": "1m", "TCP_RX_SEG_SIZE": "1m", "RNDV_SCHEME": "put_zcopy"}
LOCAL_CONFIG = {**CONFIG, "NET_DEVICES": "lo"}
CLOSE_TIMEOUT_S = 2.0
CLOSE_PERIOD_NS = 10**9


class UcxTransport:
    """The transport whose channels each have a UCX context and worker of their own.

    Each is used by one thread at a time: there is no lock, and a fence touches one peer.
    """

    name = "ucx"

    def open(self, session: bytes, ring: Ring, connect: Callable[[], socket]) -> ChannelOffer:
        return _UcxOffer(ring)

    def accept(
        self, session: bytes, ring: Ring, params: bytes, attached: Callable[[], socket]
    ) -> tuple[Inbound, bytes]:
        engine = UcxWorker(ring, _config(ring))
        engine.connect(params)
        return UcxInbound(engine), engine.address

    def close(self) -> None:
        pass


class _UcxOffer:
    def __init__(self, ring: Ring) -> None:
        self._engine = UcxWorker(ring, _config(ring))
        self.params = self._engine.address

    def finish(self, answer: bytes) -> Outbound:
        self._engine.connect(answer)
        return UcxOutbound(self._engine)

    def cancel(self) -> None:
        self._engine.close()


class UcxWorker:
    """A UCX worker with one endpoint.

    All methods but `interrupt` and `rouse` are for one thread at a time. `config`: UCX settings by their names without
    "UCX_".
    """

    def __init__(self, ring: Ring, config: Mapping[str, str] = CONFIG) -> None:
        self.ring = ring
        self.operations: deque[Operation] = deque()
        self.endpoint: Any = None
        self._interrupted = False
        self._waking = threading.Lock()
        self.worker: Any = _make_worker(config)
        self.address = bytes(self.worker.address)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._wake, select.POLLIN)
        self._poller.register(self.worker.epoll_file_descriptor, select.POLLIN)

    def connect(self, address: bytes) -> None:
        try:
            peer = ucx.UCXAddress.create_from_buffer(address)
            self.endpoint = ucx.UCXEndpoint.create_from_worker_address(self.worker, peer, endpoint_error_handling=True)
        except Exception as error:  # ucxx makes one exception class per UCX status at run time
            self.close()
            raise TransferError(f"UCX can't reach the peer: {error}") from error

    @property
    def lanes(self) -> str:
        return endpoint_lanes(self.endpoint.handle) if self.endpoint is not None else ""

    def until(self, is_reached: Callable[[], bool], timeout_s: float | None) -> None:
        """Drive the worker until `is_reached()`. Raises PeerLost if the peer is gone, or after `timeout_s`."""
        limit = None if timeout_s is None else StallLimit(timeout_s)
        while not is_reached():
            self.require_open()
            if not self.worker.progress_once():
                self.sleep(limit)

    def require_open(self) -> None:
        """Raise PeerLost if the channel was interrupted or its endpoint failed."""
        if self._interrupted:
            raise PeerLost("the UCX channel was closed")
        try:
            self.endpoint.raise_on_error()
        except Exception as error:
            raise PeerLost(f"UCX: {type(error).__name__}: {error}") from error

    def interrupt(self) -> None:
        self._interrupted = True
        self.rouse()

    def rouse(self) -> None:
        """Wake the thread that sleeps in `sleep`; from any thread."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the endpoint, then wait until UCX has let go of every buffer. Idempotent."""
        if self.worker is None:
            return
        if self.endpoint is not None:
            self.endpoint.close_blocking(period=CLOSE_PERIOD_NS, max_attempts=1)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while any(not operation.is_done for operation in self.operations):
            self.worker.progress()
            if time.monotonic() > deadline:
                # Never free memory that UCX may still write to.
                log.critical("UCX does not let go of %d buffers; they are kept for good", len(self.operations))
                _abandoned.append(self)
                return
        self.operations.clear()
        self.endpoint = self.worker = None
        with self._waking:
            os.close(self._wake)
            self._wake = -1

    def moved(self) -> None:
        """Note that an operation has begun or ended."""

    def sleep(self, limit: StallLimit | None) -> None:
        """Wait until UCX has something to do. Raises PeerLost beyond `limit`.

        `arm` returns False if it has something already.
        """
        if not self.worker.arm():
            return
        wait_s = None if limit is None else limit.next_wait_s()
        if wait_s == 0.0:
            raise PeerLost("the peer took nothing until the deadline")
        ready = self._poller.poll(None if wait_s is None else wait_s * 1000 + 1)
        if any(descriptor == self._wake for descriptor, _ in ready):
            os.eventfd_read(self._wake)


class UcxChannel:
    """The common part of both ends of a channel."""

    def __init__(self, engine: UcxWorker) -> None:
        self._engine = engine
        self._detail = f"UCX {'.'.join(map(str, ucx.get_ucx_version()))}, {engine.lanes}"

    @property
    def detail(self) -> str:
        return self._detail

    def interrupt(self) -> None:
        self._engine.interrupt()

    def close(self) -> None:
        self._engine.close()


class Sending:
    """The slots that messages are sent from. UCX lets go of them in the order in which they were sent."""

    def __init__(self, engine: UcxWorker, slots: Iterable[Slot]) -> None:
        self._engine = engine
        self._unused, self._under_way = deque(slots), deque[Slot]()

    def unused(self) -> deque[Slot]:
        """Return the slots that may be taken, at least one; the last one was freed most recently."""
        while self._under_way and self._engine.operations[0].is_done:
            self._collect()
        if not self._unused:
            self._wait()
        return self._unused

    def sent(self, slot: Slot, operation: Operation) -> None:
        self._engine.operations.append(operation)
        self._under_way.append(slot)
        self._engine.moved()
        self._engine.worker.progress()

    def flush(self) -> None:
        """Wait until every message has left: UCX moves data only while its worker is driven."""
        while self._under_way:
            self._wait()

    def _wait(self) -> None:
        oldest = self._engine.operations[0]
        self._engine.until(lambda: oldest.is_done, self._engine.ring.stall_timeout_s)
        self._collect()

    def _collect(self) -> None:
        operation = self._engine.operations.popleft()
        self._unused.append(self._under_way.popleft())
        self._engine.moved()
        if operation.error:
            raise PeerLost(f"UCX could not send: {operation.error}")


class UcxOutbound(UcxChannel):
    """The sender's end, with slots in the host's memory."""

    def __init__(self, engine: UcxWorker) -> None:
        super().__init__(engine)
        slots = [Slot(i, np.zeros(engine.ring.stride, dtype=np.uint8)) for i in range(engine.ring.num_slots)]
        self._sending, self._is_joined = Sending(engine, slots), False

    def acquire(self) -> Slot:
        """Return the slot that UCX let go of most recently: its memory is still in the caches."""
        return self._sending.unused().pop()

    def send(self, slot: Slot, nbytes: int) -> None:
        self._engine.require_open()
        self._is_joined = True  # this message joins both ends
        self._sending.sent(slot, send(self._engine.endpoint.handle, slot.buffer, META_NBYTES + nbytes))

    def flush(self) -> None:
        """Wait until every message has left; before the first one, until UCX has joined both ends.

        While they are not joined, and the sender is not driven, the receiver's descriptor is always ready with nothing
        to do, and its thread would spin.
        """
        if not self._is_joined:
            joining = flush(self._engine.endpoint.handle)
            self._engine.operations.append(joining)  # nothing else is under way
            self._engine.until(lambda: joining.is_done, self._engine.ring.stall_timeout_s)
            self._engine.operations.popleft()
            self._is_joined = True
        self._sending.flush()


class UcxInbound(UcxChannel):
    """The receiver's end, which takes messages where UCX received them.

    A message that UCX has to fetch first (a rendezvous, over RDMA), or that comes while one is being fetched, waits in
    memory of this end.
    """

    def __init__(self, engine: UcxWorker) -> None:
        super().__init__(engine)
        self._take: Take | None = None
        self._num_taken = 0
        self._failure: BaseException | None = None
        self._spares: list[np.ndarray] = []
        self._receiving = Receiving(engine.worker.handle, self._on_message, self._spare, engine.operations.append)

    def receive(self, take: Take) -> None:
        self._take, before = take, self._num_taken
        try:
            self._engine.until(lambda: self._take_fetched(take) or self._num_taken > before, None)
        finally:
            self._take = None

    def close(self) -> None:
        self._take = None
        super().close()

    def _on_message(self, data: np.ndarray) -> None:
        """Take a message. UCX calls this, so it must raise nothing."""
        if self._take is None or self._failure is not None:
            return
        try:
            self._accept(self._take, data)
        except BaseException as failure:
            self._failure = failure

    def _accept(self, take: Take, data: np.ndarray) -> None:
        if len(data) > self._engine.ring.stride:
            raise PeerLost(f"a message of {len(data)} bytes; a slot has {self._engine.ring.stride}")
        if not self._engine.operations:
            take(Slot(0, data))
            self._num_taken += 1
            return
        buffer = self._spare()
        buffer[: len(data)] = data
        self._engine.operations.append(Operation(buffer, len(data), None))

    def _take_fetched(self, take: Take) -> bool:
        """Take the oldest fetched message; return whether there was one. Raises what `take` raised."""
        if self._failure is not None:
            raise self._failure
        operations = self._engine.operations
        if not operations or not operations[0].is_done:
            return False
        operation = operations.popleft()
        if operation.error:
            raise PeerLost(f"UCX could not fetch a message: {operation.error}")
        take(Slot(0, operation.buffer[: operation.nbytes]))
        self._spares.append(operation.buffer)
        return True

    def _spare(self) -> np.ndarray:
        return self._spares.pop() if self._spares else np.zeros(self._engine.ring.stride, dtype=np.uint8)


# Engines whose memory UCX did not give back: they must outlive everything.
_abandoned: list[UcxWorker] = []


def _config(ring: Ring) -> Mapping[str, str]:
    return LOCAL_CONFIG if ring.is_local else CONFIG


def _make_worker(config: Mapping[str, str]) -> Any:
    # What the operator has set in the environment wins; UCX itself would let our values win.
    ours = {key: value for key, value in config.items() if f"UCX_{key}" not in os.environ}
    try:
        context = ucx.UCXContext(ours, feature_flags=(ucx.Feature.AM, ucx.Feature.WAKEUP))
        worker = ucx.UCXWorker(context)
        worker.init_blocking_progress_mode()
    except Exception as error:
        raise TransferError(f"UCX does not start (it needs a writable /tmp and a network device): {error}") from error
    return worker
