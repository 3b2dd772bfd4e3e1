"""The gateway's connections to all workers: one event stream from each, and jobs to each."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from io import BytesIO

import aiohttp
from msgspec import MsgspecError, Raw

from contracts.codec import FrameReader, decoder, encode
from contracts.errors import Overloaded, TandemError, Unavailable
from contracts.events import Event, EventFrame
from contracts.ids import GatewayId, Incarnation, WorkerId
from contracts.node import Node, NodeInfo, NodeLoad, WorkerRole
from contracts.request import Job, JobMessage, WorkerRef
from gateway.dispatch.compatibility import incompatible_workers
from gateway.dispatch.placement import Placement
from service.outage_log import OutageLog
from service.tasks import spawn_into

log = logging.getLogger(__name__)

POLL_PERIOD_S = 0.5
SEARCH_PERIOD_S = 0.1
"""Between looks at the registry while nobody there could answer: a system that starts is ready sooner."""
HEARTBEAT_TIMEOUT_S, NUM_LOOKS = 3.0, 6
"""How long a worker may be silent, and in how many looks that is seen."""
CONNECT_TIMEOUT_S = 2.0
POST_TIMEOUT_S = 5.0
MAX_POST_NBYTES = 8 << 20
"""Of jobs that travel together. A worker takes 32 MiB at once, and nothing of a longer one, whosever jobs are in it."""
RECONNECT_S = 0.2
BLIND_S = 3.0

OnEvent = Callable[[WorkerId, Event], None]
OnLost = Callable[[WorkerId, Incarnation, str], None]
HasLeft = Callable[[WorkerId], Awaitable[bool]]
Outbox = list[tuple[JobMessage, asyncio.Future[None]]]


class WorkerPool:
    """`on_event` gets every event in stream order; `on_lost` is called when a worker's requests can't go on.

    Workers of another model than `model` are passed over: their tokens are other words. They are `strange`, and not to
    be chosen by placement, which looks at no model.
    """

    def __init__(
        self, store: Placement, gateway_id: GatewayId, secret: str, model: str, on_event: OnEvent, on_lost: OnLost
    ) -> None:
        self._store, self._gateway_id, self._model = store, gateway_id, model
        self._misfits: dict[WorkerId, str] = {}
        self.strange: list[WorkerId] = []
        self._secret, self._on_event, self._on_lost = secret, on_event, on_lost
        self._links: dict[WorkerId, WorkerLink] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._listed: dict[WorkerId, NodeLoad] = {}
        self._looked_s = -math.inf
        self._task: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Raises Unavailable if the registry can't be reached."""
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._secret}"}, connector=aiohttp.TCPConnector(limit=0)
        )
        await self._poll()
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(link.stop("this gateway stops") for link in self._links.values()), *self._leaving)
        if self._session is not None:
            await self._session.close()

    @property
    def nodes(self) -> list[NodeInfo]:
        """Workers that are listed and listen to us now."""
        return [link.info for worker_id, link in self._links.items() if link.is_open and worker_id in self._listed]

    @property
    def silent(self) -> list[WorkerId]:
        """Workers of our model that are known and do not speak to us now."""
        return [worker_id for worker_id, link in self._links.items() if not link.is_open]

    @property
    def troubles(self) -> list[str]:
        """Why others do not, or get no work."""
        troubles = {worker_id: "it drains, and takes no work" for worker_id in self._listed if self._drains(worker_id)}
        troubles |= {link.info.worker_id: link.trouble for link in self._links.values() if link.trouble}
        return [f"{worker_id}: {words}" for worker_id, words in (troubles | self._misfits).items()]

    @property
    def is_blind(self) -> bool:
        """The registry has not answered for a while: what runs goes on, and nothing new is placed."""
        return time.monotonic() - self._looked_s > BLIND_S

    def ref(self, worker_id: WorkerId) -> WorkerRef | None:
        link = self._links.get(worker_id)
        return link.info.ref if link is not None else None

    def can_serve(self) -> bool:
        return not self.lack()

    def lack(self) -> str:
        """What is missing, in words; nothing while there is a worker that is both, or two that can exchange KV.
        Placement passes over those that drain, too.
        """
        infos = [info for info in self.nodes if not self._drains(info.worker_id)]
        sources = [info for info in infos if info.role == WorkerRole.PREFILL]
        sinks = [info for info in infos if info.role == WorkerRole.DECODE]
        is_pair = any(sink.can_receive_from(source) for sink in sinks for source in sources)
        if is_pair or any(info.role == WorkerRole.MIXED for info in infos):
            return ""
        if sources and sinks:
            return "the prefill and the decode workers can't exchange KV"
        sides = [f"no live {side} worker" for side, those in (("prefill", sources), ("decode", sinks)) if not those]
        return f"{' and '.join(sides)} that is connected and takes work"

    def _drains(self, worker_id: WorkerId) -> bool:
        return self._listed[worker_id].draining

    def max_model_len(self, default: int) -> int:
        return min([default, *(info.max_model_len for info in self.nodes)])

    async def send(self, worker: WorkerRef, message: JobMessage) -> None:
        """Raises Unavailable or Overloaded if the worker does not take it."""
        link = self._links.get(worker.worker_id)
        if link is None or (isinstance(message, Job) and link.info.incarnation != worker.incarnation):
            with suppress(Unavailable):  # of the registry: then it stays unknown
                await self._poll()  # it joined, or started again, after our last look
            link = self._links.get(worker.worker_id)
        if link is None or link.info.incarnation != worker.incarnation:
            raise Unavailable("the worker is not connected")
        await link.send(message)

    async def _watch(self) -> None:
        outage = OutageLog(log, "the registry answers again")
        while True:
            await asyncio.sleep(POLL_PERIOD_S if self.can_serve() else SEARCH_PERIOD_S)
            try:
                await self._poll()
            except Unavailable as error:
                outage.failed(f"registry not reachable, going on with the workers known: {error}", error.what)
                await asyncio.sleep(POLL_PERIOD_S)
            else:
                outage.worked()

    async def _poll(self) -> None:
        began_s = time.monotonic()
        alive = {node.info.worker_id: node for node in await self._store.nodes() if node.alive}
        if began_s < self._looked_s:
            return  # one that began later has overtaken it, and knows better
        self._looked_s = began_s
        nodes = {worker_id: node for worker_id, node in alive.items() if node.info.model == self._model}
        self.strange = [worker_id for worker_id in alive if worker_id not in nodes]
        self._name_misfits([node.info for node in alive.values()])
        self._listed = {worker_id: node.load for worker_id, node in nodes.items()}
        gone = [worker_id for worker_id, link in self._links.items() if _is_gone(nodes.get(worker_id), link)]
        for worker_id in gone:
            # In its own time: what was just sent to a worker that is frozen takes POST_TIMEOUT_S to fail.
            spawn_into(self._leaving, self._links.pop(worker_id).stop("the registry no longer lists it"))
        for worker_id, node in nodes.items():
            if worker_id not in self._links:
                self._links[worker_id] = self._open(node)

    def _name_misfits(self, infos: Sequence[NodeInfo]) -> None:
        before, self._misfits = self._misfits, incompatible_workers(infos, self._model)
        for worker_id in self._misfits.keys() - before.keys():  # said once, not at each look
            log.warning("worker %s: %s", worker_id, self._misfits[worker_id])

    def _open(self, node: Node) -> "WorkerLink":
        assert self._session is not None
        return WorkerLink(node.info, self._gateway_id, self._session, self._on_event, self._on_lost, self._has_left)

    async def _has_left(self, worker_id: WorkerId) -> bool:
        """Return whether a worker whose stream ended has left in order, by the registry as it is now: it drains, or is
        no longer listed.
        """
        with suppress(Unavailable):
            await self._poll()
            return worker_id not in self._listed or self._drains(worker_id)
        return False


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
        self._num_frames = 0
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
        async with self._session.get(url, params={"gateway_id": self._gateway_id}, timeout=timeout) as response:
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
        try:
            async with self._session.post(f"{self.info.url}/jobs", data=BytesIO(body), timeout=timeout) as response:
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


def _is_gone(node: Node | None, link: WorkerLink) -> bool:
    """A worker that still speaks to us lives, whatever the registry has forgotten: what it runs goes on."""
    return not link.is_open if node is None else node.info.incarnation != link.info.incarnation


def _refusal(response: aiohttp.ClientResponse) -> TandemError:
    if response.status == 429:
        given = response.headers.get("Retry-After", "")
        return Overloaded("the workers are full", float(given) if given.isascii() and given.isdigit() else 1.0)
    if response.status == 401:
        return Unavailable("a worker refuses this gateway's secret")
    return Unavailable("a worker refused")
