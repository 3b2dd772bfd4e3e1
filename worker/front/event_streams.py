"""The event streams: one per gateway, each a sequence of frames without gaps."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from contracts.codec import frame
from contracts.events import HEARTBEAT_S, Event, EventFrame
from contracts.ids import GatewayId, Incarnation, WorkerId

MAX_BACKLOG_NBYTES = 64 << 20  # a gateway that leaves so much unread counts as gone


@dataclass
class Stream:
    """An open GET /events.

    `number`: the gateway's own, 0 if it gave none. `sequence` numbers its frames from 0.
    """

    number: int = 0
    backlog: list[bytes] = field(default_factory=list)
    nbytes: int = 0
    sequence: int = 0
    closed: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class EventStreams:
    """The open streams, at most one for each gateway; a second one replaces the first, which ends."""

    def __init__(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._streams: dict[GatewayId, Stream] = {}
        self._breaks: list[tuple[GatewayId, float]] = []

    def has(self, gateway_id: GatewayId) -> bool:
        return gateway_id in self._streams

    def is_former(self, gateway_id: GatewayId, number: int) -> bool:
        """Return whether the gateway has another stream now than that of this number, 0 if it gave none.

        What it sent then came late, as packets do when a network was cut: the gateway has given it up.
        """
        return 0 < number < self._number(gateway_id)

    def publish(self, gateway_id: GatewayId, events: list[Event]) -> None:
        """Send events to a gateway. Without a stream they are dropped: it has given those requests up.

        All events of a gateway that takes them too slowly are dropped too: its stream ends.
        """
        stream = self._streams.get(gateway_id)
        if stream is None:
            return
        data = frame(EventFrame(self._worker_id, self._incarnation, stream.sequence, events))
        stream.sequence += 1
        stream.backlog.append(data)
        stream.nbytes += len(data)
        stream.wake.set()
        if stream.nbytes > MAX_BACKLOG_NBYTES:
            stream.backlog = []
            self._close(gateway_id)

    async def listen(self, gateway_id: GatewayId, number: int = 0) -> AsyncGenerator[bytes]:
        """Yield the bytes of one stream: a hello frame at once, then all events, and a heartbeat each second.

        Events that were published before it was closed are still sent. A request for a stream that comes after one for
        a later one has no events.
        """
        if self.is_former(gateway_id, number):
            return
        stream = self._open(gateway_id, number)
        try:
            while stream.backlog or not stream.closed:
                if stream.backlog:
                    data, stream.backlog, stream.nbytes = b"".join(stream.backlog), [], 0
                    yield data
                    continue
                stream.wake.clear()
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await stream.wake.wait()
                except TimeoutError:
                    self.publish(gateway_id, [])
        finally:
            if self._streams.get(gateway_id) is stream:
                self._close(gateway_id)

    def broken(self, grace_s: float) -> list[tuple[GatewayId, float]]:
        """Return whose streams ended more than `grace_s` ago, and when, each once.

        It does not matter whether there is another by now.
        """
        limit = time.monotonic() - grace_s
        broken = [one for one in self._breaks if one[1] <= limit]
        self._breaks = self._breaks[len(broken) :]
        return broken

    def close(self) -> None:
        """End every stream; each gateway takes it for the loss of this worker."""
        for gateway_id in list(self._streams):
            self._close(gateway_id)

    def _number(self, gateway_id: GatewayId) -> int:
        """Return the number of a gateway's stream; 0 if it has none, or did not number it."""
        stream = self._streams.get(gateway_id)
        return stream.number if stream is not None else 0

    def _open(self, gateway_id: GatewayId, number: int) -> Stream:
        if gateway_id in self._streams:
            self._close(gateway_id)
        stream = self._streams[gateway_id] = Stream(number)
        self.publish(gateway_id, [])
        return stream

    def _close(self, gateway_id: GatewayId) -> None:
        """Remove a stream, though its last bytes may still be on their way, or stuck."""
        stream = self._streams.pop(gateway_id)
        stream.closed = True
        stream.wake.set()
        self._breaks.append((gateway_id, time.monotonic()))
