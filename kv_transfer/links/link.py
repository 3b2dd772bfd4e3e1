"""The common part of the two ends of a link: a control connection and a data channel.

The control connection is authenticated; pages go one way, from prefill to decode.
"""

import logging
import math
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from contracts.errors import TandemError
from contracts.handoff import MAX_MOVED_NBYTES, Abort, AbortAck, HandoffMessage
from contracts.ids import Incarnation, WorkerId
from contracts.kv_loss import EXACT
from contracts.layout import KVLayout
from kv_transfer import events
from kv_transfer.chunks.device_pool import Pool
from kv_transfer.codecs.level import accepted_loss, allowed_levels
from kv_transfer.connection import layout_negotiation as conversion
from kv_transfer.connection.control_connection import PEER_CLOSED, ControlConnection
from kv_transfer.connection.handshake import Identity
from kv_transfer.connection.handshake_frames import Terms
from kv_transfer.connection.handshake_socket import FRAME_MAX_NBYTES, shut
from kv_transfer.data_path.compression import SegmentCodec
from kv_transfer.data_path.sender import Key
from kv_transfer.events import Drained, LinkStats, MessageReceived, TransferEvent
from kv_transfer.links.path_health import PathHealth
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.base import Channel, Ring
from kv_transfer.transports.registry import Transports

log = logging.getLogger(__name__)

FENCE_TIMEOUT_S, FENCE_LOOKS = 5.0, 5
"""How many seconds a data thread may take to stop, and in how many looks they are counted.

Seconds alone would not do: when a process that was stopped goes on, the time is over before its threads had any of it.
"""
GRANT_PAGE_NBYTES = 5  # the longest msgpack integer below 2^32


@dataclass(frozen=True)
class LinkParts:
    """The parts that all links of a node share.

    `emit` queues an event for the owner and wakes it up, `note` and `wake` do one of the two; `on_proved` is called
    with a link whose peer has proved itself, `on_lost` takes a link out of the node's tables. `is_busy`: the owner
    computes, and would be disturbed by a thread that does not sleep. `paths`: where sending links report success and
    failure. `pools`: of each group.
    """

    settings: TransferSettings
    identity: Identity
    layout: KVLayout
    pools: Sequence[Pool]
    memory: str
    plane_scales: Sequence[float]
    transports: Transports
    emit: Callable[[TransferEvent], None]
    note: Callable[[TransferEvent], None]
    wake: Callable[[], None]
    is_busy: Callable[[], bool]
    paths: PathHealth
    on_proved: Callable[["Link"], None]
    on_lost: Callable[["Link", events.PeerDisconnected], None]

    @property
    def ring(self) -> Ring:
        return Ring(
            self.settings.num_slots,
            max(self.settings.slot_nbytes, *(pool.page_nbytes for pool in self.pools)),
            self.settings.stall_timeout_s,
            self.settings.trial_timeout_s,
        )

    @property
    def terms(self) -> Terms:
        return Terms(
            layout=self.layout,
            num_blocks=sum(pool.num_blocks for pool in self.pools),
            transport=self.settings.transport,
            available=self.transports.available(),
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            checksum=self.settings.checksum,
            memory=self.memory,
            plane_scales=list(self.plane_scales),
            levels=allowed_levels(self.settings.kv_codec),
            hears_fetched=True,
        )


class Attempts(Protocol):
    """The attempts that are alive at one end."""

    @property
    def num_alive(self) -> int: ...

    def knows(self, key: Key) -> bool:
        """Return whether the attempt is alive, or over while a page of it is still in use."""
        ...

    def end(self, key: Key) -> bool:
        """Drop the attempt; return True if none of its pages is in use. If not, the data thread reports when."""
        ...


class Mover(Protocol):
    """The work of a link's data thread, with its counters."""

    nbytes: int
    num_chunks: int
    busy_s: float
    num_bad: int
    num_stale: int

    def run(self) -> None: ...

    def stop(self) -> None:
        """End `run` if it waits for work; from any thread. A wait for the channel is interrupted there."""
        ...


class Link(ABC):
    """One end of a link, in state "connecting", "up" or "lost".

    One thread runs the control connection, another moves the data. `receives`: what this end may receive.
    """

    outgoing: bool
    receives: tuple[type[HandoffMessage], ...]

    def __init__(self, parts: LinkParts, peer_id: WorkerId, incarnation: Incarnation, attempts: Attempts) -> None:
        self.parts, self.peer_id, self.incarnation = parts, peer_id, incarnation
        self.transport, self.state = "", "connecting"
        self.gone = threading.Event()
        self._attempts = attempts
        self._acks: set[Key] = set()
        self._lock = threading.Lock()
        self._failure: tuple[str, str] | None = None
        self._fenced = False
        self._sock: socket.socket | None = None
        self._segments: SegmentCodec | None = None
        self._control: ControlConnection | None = None
        self._channel: Channel | None = None
        self._mover: Mover | None = None
        self._early: list[HandoffMessage] = []
        self.groups: tuple[int, ...] = tuple(range(len(parts.layout.groups)))
        """The groups of this end's layout that move over this link, in the order in which messages number them."""

    def send(self, message: HandoffMessage) -> None:
        """Send a message without blocking. What is sent before the link is up goes first when it is."""
        with self._lock:
            if self._control is None:
                self._early.append(message)
                return
        self._control.send(message)

    def fail(self, error: str, code: str = "peer_lost") -> None:
        """End the link, from any thread. PeerDisconnected follows when it is fenced."""
        with self._lock:
            if self._control is not None:
                # The control connection may have ended first, and have taken the data channel with it.
                reason = self._control.stop(error)
                self._failure = self._failure or (reason, code if reason == error else "peer_lost")
                return
            self._failure = self._failure or (error, code)
            if self._sock is not None:
                shut(self._sock)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def is_untried(self) -> bool:
        """Return whether it never was up, nor needed by an attempt: its end says nothing of other links."""
        return self._control is None

    def knows(self, key: Key) -> bool:
        """Return whether this attempt is alive here, or a page of it is in use."""
        return self._attempts.knows(key)

    def end(self, key: Key) -> None:
        """Drop the attempt; Drained comes now or from the data thread."""
        if self._attempts.end(key):
            self._on_drained(key)

    def stats(self) -> LinkStats:
        mover, channel = self._mover, self._channel
        return LinkStats(
            self.peer_id,
            self.incarnation,
            self.outgoing,
            self.state,
            self.transport,
            detail=channel.detail if channel is not None and self.state == "up" else "",
            nbytes=mover.nbytes if mover else 0,
            num_chunks=mover.num_chunks if mover else 0,
            busy_s=mover.busy_s if mover else 0.0,
            num_bad=mover.num_bad if mover else 0,
            num_stale=mover.num_stale if mover else 0,
            nbytes_per_s=self.nbytes_per_s,
            levels=dict(self._segments.stats) if self._segments else {},
        )

    @property
    def nbytes_per_s(self) -> float:
        """Return the rate of finished handoffs; 0.0 while unknown."""
        return 0.0

    @property
    def accepted_loss(self) -> str:
        """Return the loss of KV that both ends allow here, see contracts.kv_loss."""
        return accepted_loss(self._segments.levels) if self._segments else EXACT

    def _poll_timeout_s(self) -> float:
        """Return how many seconds the link's thread may sleep at most; 0 to poll for the next message."""
        return math.inf

    @abstractmethod
    def _note(self, message: HandoffMessage) -> None:
        """Act on a message before it is passed to the owner."""

    def _run_to_the_end(self, connect_and_serve: Callable[[], None]) -> None:
        """Run the link's own thread until the link is gone."""
        try:
            with self._failing("link"):
                connect_and_serve()
        finally:
            if self._sock is not None:
                self._sock.close()
            self._finish()

    @contextmanager
    def _failing(self, what: str) -> Generator[None, None, None]:
        """Make every error inside the failure of this link."""
        try:
            yield
        except TandemError as error:
            self.fail(str(error), error.code)
        except Exception as error:
            log.exception("the %s thread of %s failed", what, self.peer_id)
            self.fail(f"{type(error).__name__}: {error}", "internal")

    def _serve(self, sock: socket.socket, theirs: Terms, channel: Channel, mover: Mover) -> None:
        """Run until the link ends. Sets the failure."""
        self._channel, self._mover = channel, mover
        data = threading.Thread(target=self._move_data, args=(mover,), name=f"kv-data-{self.peer_id}", daemon=True)
        try:
            data.start()
            control = self._go_up(sock, theirs)
            log.info("KV link %s is up over %s (%s)", self._name, self.transport, channel.detail)
            with self._failing("control"):
                self.fail(control.run(self.on_message))
        finally:  # a thread or descriptor may have been lacking
            self._fence(data, channel, mover)

    def _hold(self, sock: socket.socket) -> None:
        """Let `fail` end the waits on this socket from now on."""
        with self._lock:
            self._sock = sock
            if self.failed:
                shut(sock)

    def _share(self, theirs: KVLayout, groups: Sequence[int]) -> None:
        """Move only these groups of this end's layout, and tell the owner which draft KV is left out."""
        self.groups = tuple(groups)
        if reason := conversion.why_left_out(self.parts.layout, theirs):
            log.warning(
                "KV link %s moves no KV of a draft head, so drafts begin behind the prompt: %s", self._name, reason
            )

    def _go_up(self, sock: socket.socket, theirs: Terms) -> ControlConnection:
        settings = self.parts.settings
        limit = FRAME_MAX_NBYTES + max(MAX_MOVED_NBYTES, GRANT_PAGE_NBYTES * theirs.num_blocks)
        control = ControlConnection(sock, settings.heartbeat_s, settings.silence_s, limit, self._poll_timeout_s)
        with self._lock:
            if self._failure is not None:
                control.stop(self._failure[0])
            self._control, self.state = control, "up"
            for message in self._early:
                control.send(message)
            self._early.clear()
        return control

    def _move_data(self, mover: Mover) -> None:
        with self._failing("data"):
            mover.run()

    def _fence(self, data: threading.Thread, channel: Channel, mover: Mover) -> None:
        """Stop the data thread and close the channel: nothing may touch a page after this."""
        mover.stop()
        channel.interrupt()
        if data.ident is not None:  # it was started
            for _ in range(FENCE_LOOKS):
                data.join(FENCE_TIMEOUT_S / FENCE_LOOKS)
        if data.is_alive():
            log.critical("the data thread of %s does not stop: its pages stay in quarantine", self.peer_id)
            return
        channel.close()
        self._fenced = True

    def _finish(self) -> None:
        """Report the loss of the link."""
        self.state = "lost"
        error, code = self._failure or ("closed", "peer_lost")
        fenced = self._channel is None or self._fenced
        # A peer that stops in order has finished its handoffs first.
        is_orderly = code == "closed" or (error == PEER_CLOSED and not self._attempts.num_alive)
        log.log(logging.INFO if is_orderly else logging.WARNING, "KV link %s is lost: %s", self._name, error)
        self.parts.on_lost(self, events.PeerDisconnected(self.peer_id, self.incarnation, error, fenced, code))
        self.gone.set()

    @property
    def _name(self) -> str:
        return f"{'to' if self.outgoing else 'from'} {self.peer_id}"

    def on_message(self, message: HandoffMessage) -> None:
        if not isinstance(message, self.receives):
            raise ValueError(f"{'decode' if self.outgoing else 'prefill'} sent {type(message).__name__}")
        self._note(message)
        self.parts.emit(MessageReceived(self.peer_id, message))  # type: ignore[arg-type]
        if isinstance(message, Abort):
            key = message.request_id, message.epoch
            self._acks.add(key)
            self.end(key)

    def _on_drained(self, key: Key) -> None:
        request_id, epoch = key
        if key in self._acks:
            self._acks.discard(key)
            self.send(AbortAck(request_id=request_id, epoch=epoch))
        self.parts.emit(Drained(request_id=request_id, epoch=epoch))
