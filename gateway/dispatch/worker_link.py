"""The gateway's connection to one worker: its event stream, and the jobs to it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from io import BytesIO

import aiohttp
from msgspec import MsgspecError, Raw

from contracts.codec import FrameReader, decoder, encode
from contracts.errors import Overloaded, RequestError, TandemError, Unavailable
from contracts.events import Event, EventFrame
from contracts.ids import GatewayId, Incarnation, WorkerId
from contracts.node import NodeInfo
from contracts.request import Job, JobMessage
from service.tasks import spawn_into

log = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S, NUM_LOOKS = 3.0, 6
"""How long a worker may be silent, and in how many looks that is seen."""
CONNECT_TIMEOUT_S = 2.0
POST_TIMEOUT_S = 5.0
ADAPTER_TIMEOUT_S = 90.0
"""How long a worker may take to read an adapter from disk, between two steps."""
MAX_POST_NBYTES = 8 << 20
"""The most bytes of jobs that travel together: a worker takes 32 MiB at once, and nothing of more."""
RECONNECT_S = 0.2

OnEvent = Callable[[WorkerId, Event], None]
OnLost = Callable[[WorkerId, Incarnation, str], None]
HasLeft = Callable[[WorkerId], Awaitable[bool]]
Outbox = list[tuple[JobMessage, asyncio.Future[None]]]


class WorkerLink:
    """One worker. Keeps its event stream open until stopped; each break of it is a loss."""

    def __init__(
        self,
        info: NodeInfo,
        gateway_id: GatewayId,
        session: aiohttp.ClientSession,
        on_event: OnEvent,
        on_lost: OnLost,
        has_left: HasLeft,
    ) -> None:
        self.info, self.trouble = info, ""
        self._gateway_id, self._session = gateway_id, session
        self._on_event, self._on_lost, self._has_left = on_event, on_lost, has_left
        self._decoder = decoder(EventFrame)
        self._opened = asyncio.Event()
        self._num_frames = self._stream = 0
        self._outbox: Outbox = []
        self._posting: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run())

    @property
    def is_open(self) -> bool:
        """Frames come."""
        return self._opened.is_set()

    async def send(self, message: JobMessage) -> None:
        """What is sent in the same turn of the event loop travels together, up to MAX_POST_NBYTES.

        Raises Unavailable or Overloaded.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox.append((message, future))
        if len(self._outbox) == 1:
            spawn_into(self._posting, self._post())
        await future

    async def change_adapter(self, name: str, path: str | None) -> TandemError | None:
        """Have the worker load a LoRA adapter, or unload it if `path` is None; return why it did not."""
        timeout = aiohttp.ClientTimeout(total=ADAPTER_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        body = {"name": name} if path is None else {"name": name, "path": path}
        try:
            async with self._session.post(f"{self.info.url}/adapters", json=body, timeout=timeout) as response:
                if response.status < 300:
                    return None
                words = (await response.json())["error"]["message"]
                kind = RequestError if response.status == 400 else Unavailable
                return kind(f"worker {self.info.worker_id}: {words}")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError) as error:
            log.warning("worker %s changes no adapter: %s", self.info.worker_id, str(error) or type(error).__name__)
            return Unavailable("a worker can't be reached")

    async def stop(self, reason: str) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*self._posting, return_exceptions=True)
        if self._lost(reason):
            log.info("worker %s is not connected: %s", self.info.worker_id, reason)

    async def _run(self) -> None:
        while True:
            try:
                await self._listen_until_silent()
                reason = "its event stream ended"
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError, MsgspecError) as error:
                reason = f"its event stream broke: {str(error) or type(error).__name__}"
            except Exception as error:  # of ours: without this task every answer of this worker would wait for ever
                log.exception("events of %s", self.info.worker_id)
                reason = f"its events were not understood: {type(error).__name__}"
            if self._lost(reason) and not await self._has_left(self.info.worker_id):
                log.warning("worker %s is not connected: %s", self.info.worker_id, reason)
            await asyncio.sleep(RECONNECT_S)

    async def _listen_until_silent(self) -> None:
        """Raises TimeoutError if no whole frame came for a while: nothing comes, or a length is wrong.

        Looks are counted, not seconds: when a gateway goes on that was paused, its timers are due before it has read
        what came meanwhile, and all its workers would be lost at once.
        """
        listening, num_heard, num_silent = asyncio.create_task(self._listen()), self._num_frames, 0
        try:
            while num_silent < NUM_LOOKS:
                if (await asyncio.wait({listening}, timeout=HEARTBEAT_TIMEOUT_S / NUM_LOOKS))[0]:
                    return await listening
                num_silent = num_silent + 1 if num_heard == self._num_frames else 0
                num_heard = self._num_frames
            raise TimeoutError(f"no whole frame for {HEARTBEAT_TIMEOUT_S:g} s")
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        url = f"{self.info.url}/events"
        # Higher than that of any link before: a worker that left the registry and came back gets another link.
        self._stream = time.monotonic_ns()
        params = {"gateway_id": self._gateway_id, "stream": self._stream}
        async with self._session.get(url, params=params, timeout=timeout) as response:
            if response.status == 401:
                raise ValueError("it refuses our secret: TANDEM_SECRET must be the same for all services of the pool")
            response.raise_for_status()
            reader, sequence = FrameReader(), 0
            async for data in response.content.iter_any():
                for payload in reader.feed(data):
                    self._frame(self._decoder.decode(payload), sequence)
                    sequence += 1

    def _frame(self, frame: EventFrame, sequence: int) -> None:
        """Raises ValueError if this is not the frame that must come now."""
        if frame.incarnation != self.info.incarnation:
            raise ValueError("another incarnation answers")
        if frame.sequence != sequence:
            raise ValueError(f"frame {frame.sequence} came instead of {sequence}")
        self.trouble = ""
        self._num_frames += 1
        self._opened.set()
        for event in frame.events:
            self._on_event(self.info.worker_id, event)

    def _lost(self, reason: str) -> bool:
        """Tell of the loss. Returns whether its reason is news: it is logged once, not at each attempt."""
        self._opened.clear()
        is_news, self.trouble = reason != self.trouble, reason
        self._on_lost(self.info.worker_id, self.info.incarnation, reason)
        return is_news

    async def _post(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._opened.wait()
        batch, self._outbox = self._outbox, []
        if not self._opened.is_set():  # nobody would hear the answer: the worker may not have missed the former stream
            _tell([sent for sent in batch if isinstance(sent[0], Job)], Unavailable("a worker can't be reached"))
            batch = [sent for sent in batch if not isinstance(sent[0], Job)]
        try:
            while batch:
                body, count = _body(batch)
                _tell(batch[:count], await self._try_post(body))
                batch = batch[count:]
        finally:  # cancelled, or by a fault of ours: nobody is left waiting
            _tell(batch, Unavailable("a worker can't be reached"))

    async def _try_post(self, body: bytes) -> TandemError | None:
        timeout = aiohttp.ClientTimeout(total=POST_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        # The worker refuses jobs that arrive when their stream has broken, as after a cut of the network.
        url, params = f"{self.info.url}/jobs", {"stream": self._stream}
        try:
            async with self._session.post(url, params=params, data=BytesIO(body), timeout=timeout) as response:
                if response.status < 300:
                    return None
                log.warning("worker %s refused: HTTP %d", self.info.worker_id, response.status)
                return _refusal(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("worker %s does not answer: %s", self.info.worker_id, str(error) or type(error).__name__)
            return Unavailable("a worker can't be reached")


def _tell(batch: Outbox, error: TandemError | None) -> None:
    """Those who sent and still wait."""
    for _, future in batch:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(None)


def _body(batch: Outbox) -> tuple[bytes, int]:
    """What comes first, as far as it may travel together, and how many that are: at least one."""
    parts, nbytes = [], 0
    for message, _ in batch:
        part = encode(message)
        nbytes += len(part)
        if parts and nbytes > MAX_POST_NBYTES:
            break
        parts.append(Raw(part))
    return encode(parts), len(parts)


def _refusal(response: aiohttp.ClientResponse) -> TandemError:
    if response.status == 429:
        given = response.headers.get("Retry-After", "")
        return Overloaded("the workers are full", float(given) if given.isascii() and given.isdigit() else 1.0)
    if response.status == 401:
        return Unavailable("a worker refuses this gateway's secret")
    return Unavailable("a worker refused")
