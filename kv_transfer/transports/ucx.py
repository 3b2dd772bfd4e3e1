"""UCX through ucxx's core layer: TCP, or RDMA where UCX finds it. The only file that imports ucxx.

What decides speed and safety here, all of it seen on ucxx 0.52 with UCX 1.22:
* endpoint error handling on: without it a dead peer is never reported. It excludes UCX's own shared memory; we have
  ours. Over TCP it also excludes direct writes into the receiver's memory: each message is copied once more on arrival.
* TCP segments that hold a message of 512 KiB with its heads: the defaults (8 and 64 KiB) halve the throughput of large
  messages, and one of 512 KiB sharp leaves the last bytes to a second.
* put_zcopy: direct writes where the network has them (RDMA). Over TCP, which has not, it turns the rendezvous off, and
  its round trip for each message: 8 to 12 % less CPU. What arrives before a receive is posted lies in UCX's memory, so
  nothing is read from the network while a message is there to be taken.
* each post drives the worker once, so that packing and sending overlap.
* the thread that waits sleeps in epoll on the worker's descriptor; nothing polls.
* UCX does not keep buffers alive, and dropping a request does not stop it: buffers are freed after the endpoint is
  closed and every request has completed.
* a worker whose peer was killed or stopped in mid-message is sometimes not destroyed (about one in ten) and keeps 8 to
  14 descriptors. cancel_inflight_requests() after the close frees some of them, but a clean close followed by it, or by
  progress(), hangs inside UCX with the GIL held. So they are left.
* a sender's "complete" is not delivery, and a receiver is not told the length: both are facts of our own headers.
"""

import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from socket import socket
from typing import Any

import numpy as np
import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

from contracts.errors import PeerLost, TransferError
from kv_transfer.piece import META_NBYTES
from kv_transfer.transports.base import Inbound, Opening, Outbound, Ring, Slot
from kv_transfer.transports.ucx_endpoint import endpoint_lanes

log = logging.getLogger(__name__)

# Shared memory is excluded by error handling anyway; "^sm" spares its segments and descriptors. RDMA stays possible.
CONFIG = {"TLS": "^sm", "TCP_TX_SEG_SIZE": "520k", "TCP_RX_SEG_SIZE": "520k", "RNDV_SCHEME": "put_zcopy"}
CLOSE_TIMEOUT_S = 2.0
CLOSE_PERIOD_NS = 10**9


class UcxTransport:
    """Each channel has a UCX context and worker of its own, used by one thread at a time: no lock, and a fence
    touches one peer.
    """

    name = "ucx"

    def open(self, session: bytes, ring: Ring, connect: Callable[[], socket]) -> Opening:
        return _Opening(session, ring)

    def accept(
        self, session: bytes, ring: Ring, params: bytes, attached: Callable[[], socket]
    ) -> tuple[Inbound, bytes]:
        engine = _Engine(session, ring)
        engine.connect(params)
        return UcxInbound(engine), engine.address

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _Operation:
    """UCX holds no reference to `array`'s memory: it lives here until `request` is complete."""

    slot: Slot
    array: Any
    request: Any


class _Opening:
    def __init__(self, session: bytes, ring: Ring) -> None:
        self._engine = _Engine(session, ring)
        self.params = self._engine.address

    def finish(self, answer: bytes) -> Outbound:
        self._engine.connect(answer)
        return UcxOutbound(self._engine)

    def cancel(self) -> None:
        self._engine.close()


class _Engine:
    """A worker with one endpoint; operations in order. All methods but `interrupt` are for one thread at a time."""

    def __init__(self, session: bytes, ring: Ring) -> None:
        self.ring = ring
        self._tag_base = int.from_bytes(session[:4], "little") << 32
        self._num_operations = 0
        self._endpoint: Any = None
        self._operations: deque[_Operation] = deque()
        self._interrupted = False
        self._worker: Any = _make_worker()
        self.address = bytes(self._worker.address)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._wake, select.POLLIN)
        self._poller.register(self._worker.epoll_file_descriptor, select.POLLIN)

    def connect(self, address: bytes) -> None:
        try:
            peer = ucx.UCXAddress.create_from_buffer(address)
            self._endpoint = ucx.UCXEndpoint.create_from_worker_address(
                self._worker, peer, endpoint_error_handling=True
            )
        except Exception as error:  # ucxx has one exception class per UCX status, made at run time
            self.close()
            raise TransferError(f"UCX can't reach the peer: {error}") from error

    @property
    def is_busy(self) -> bool:
        return bool(self._operations)

    @property
    def lanes(self) -> str:
        return endpoint_lanes(self._endpoint.handle) if self._endpoint is not None else ""

    def post_send(self, slot: Slot, nbytes: int) -> None:
        array = Array(slot.buffer[: META_NBYTES + nbytes])
        self._post(slot, array, self._endpoint.tag_send)
        self._worker.progress()

    def post_receive(self, slot: Slot) -> None:
        array = Array(slot.buffer)
        self._post(slot, array, self._endpoint.tag_recv)

    def oldest(self, timeout_s: float | None) -> Slot:
        """Wait until the oldest operation is complete. Raises PeerLost if it failed, or after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        operation = self._operations[0]
        while not self._progress(operation):
            self._sleep(deadline)
        self._operations.popleft()
        _check(operation.request)
        return operation.slot

    def interrupt(self) -> None:
        self._interrupted = True
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the endpoint, then wait until UCX has let go of every buffer. Idempotent."""
        if self._worker is None:
            return
        if self._endpoint is not None:
            self._endpoint.close_blocking(period=CLOSE_PERIOD_NS, max_attempts=1)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while any(not operation.request.completed for operation in self._operations):
            self._worker.progress()
            if time.monotonic() > deadline:
                # Never free memory that UCX may still write to.
                log.critical("UCX does not let go of %d buffers; they are kept for good", len(self._operations))
                _abandoned.append(self)
                return
        self._operations.clear()
        self._endpoint = self._worker = None
        os.close(self._wake)

    def _post(self, slot: Slot, array: Any, post: Callable[[Any, Any], Any]) -> None:
        if self._interrupted:
            raise PeerLost("the UCX channel was closed")
        tag = ucx.UCXXTag(self._tag_base | (self._num_operations & 0xFFFF_FFFF))
        self._num_operations += 1
        try:
            request = post(array, tag)
        except Exception as error:
            raise PeerLost(f"UCX refused a message: {error}") from error
        self._operations.append(_Operation(slot, array, request))

    def _progress(self, operation: _Operation) -> bool:
        if self._interrupted:
            raise PeerLost("the UCX channel was closed")
        if not operation.request.completed:
            self._worker.progress()
        return operation.request.completed

    def _sleep(self, deadline: float | None) -> None:
        """Until UCX has something to do. `arm` says no if it has already."""
        if not self._worker.arm():
            return
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise PeerLost("the peer took nothing until the deadline")
        self._poller.poll(None if left_s is None else left_s * 1000 + 1)


class _UcxChannel:
    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._detail = f"UCX {'.'.join(map(str, ucx.get_ucx_version()))}, {engine.lanes}"
        self._slots = [Slot(i, np.zeros(engine.ring.stride, dtype=np.uint8)) for i in range(engine.ring.num_slots)]

    @property
    def detail(self) -> str:
        return self._detail

    def interrupt(self) -> None:
        self._engine.interrupt()

    def close(self) -> None:
        self._engine.close()


class UcxOutbound(_UcxChannel):
    def __init__(self, engine: _Engine) -> None:
        super().__init__(engine)
        self._unused = list(self._slots)

    def acquire(self) -> Slot:
        if self._unused:
            return self._unused.pop()
        return self._engine.oldest(self._engine.ring.stall_timeout_s)

    def send(self, slot: Slot, nbytes: int) -> None:
        self._engine.post_send(slot, nbytes)

    def flush(self) -> None:
        """UCX moves only while its worker is driven, so the sender stays until every message is gone."""
        while self._engine.is_busy:
            self._unused.append(self._engine.oldest(self._engine.ring.stall_timeout_s))


class UcxInbound(_UcxChannel):
    def __init__(self, engine: _Engine) -> None:
        super().__init__(engine)
        for slot in self._slots:
            engine.post_receive(slot)

    def receive(self) -> Slot:
        return self._engine.oldest(None)

    def release(self, slot: Slot) -> None:
        self._engine.post_receive(slot)


# Engines whose memory UCX did not give back: they must outlive everything.
_abandoned: list[_Engine] = []


def _make_worker() -> Any:
    # What the operator has set in the environment wins; UCX itself would let our values win.
    config = {key: value for key, value in CONFIG.items() if f"UCX_{key}" not in os.environ}
    try:
        context = ucx.UCXContext(config, feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
        worker = ucx.UCXWorker(context)
        worker.init_blocking_progress_mode()
    except Exception as error:
        raise TransferError(f"UCX does not start (it needs a writable /tmp and a network device): {error}") from error
    return worker


def _check(request: Any) -> None:
    try:
        request.check_error()
    except Exception as error:
        raise PeerLost(f"UCX: {type(error).__name__}: {error}") from error
