"""The gateway's connections to all workers: one event stream from each, and jobs to each."""

import asyncio
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import aiohttp

from contracts.errors import RequestError, Unavailable
from contracts.ids import GatewayId, WorkerId
from contracts.node import Node, NodeInfo, NodeLoad, WorkerRole
from contracts.request import AdapterRef, Job, JobMessage, WorkerRef
from gateway.dispatch.compatibility import incompatible_workers
from gateway.dispatch.registry_client import Placement
from gateway.dispatch.worker_link import OnEvent, OnLost, WorkerLink
from service.outage_log import OutageLog
from service.tasks import spawn_into

log = logging.getLogger(__name__)

POLL_PERIOD_S = 0.5
SEARCH_PERIOD_S = 0.1
"""Between looks at the registry while nobody there could answer: a system that starts is ready sooner."""
BLIND_S = 3.0


class WorkerPool:
    """The workers that are listed, and a link to each.

    `on_event` gets every event in stream order; `on_lost` is called when a worker's requests can't go on.

    Workers of another model than `model` are passed over: their tokens are other words. They are `strange`, and not to
    be chosen by placement, which looks at no model. `synthetic_acceptance` is the greatest that a worker states.
    """

    def __init__(
        self, store: Placement, gateway_id: GatewayId, secret: str, model: str, on_event: OnEvent, on_lost: OnLost
    ) -> None:
        self._store, self._gateway_id, self._model = store, gateway_id, model
        self._infos: list[NodeInfo] = []
        self._misfits: dict[WorkerId, str] = {}
        self.strange: list[WorkerId] = []
        self.synthetic_acceptance, self._shortest = 0.0, sys.maxsize
        self._secret, self._on_event, self._on_lost = secret, on_event, on_lost
        self._links: dict[WorkerId, WorkerLink] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._listed: dict[WorkerId, NodeLoad] = {}
        self._adapters: dict[str, AdapterRef] = {}
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
    def loads(self) -> list[tuple[NodeInfo, NodeLoad]]:
        """Workers that are listed, with what each last told the registry."""
        listed = self._listed
        return [(link.info, listed[name]) for name, link in self._links.items() if name in listed]

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
        """Return what is missing, in words; nothing while a worker is both, or two can exchange KV.

        Placement passes over those that drain, too.
        """
        infos = [info for info in self.nodes if not self._drains(info.worker_id)]
        sources = [info for info in infos if info.role == WorkerRole.PREFILL]
        sinks = [info for info in infos if info.role == WorkerRole.DECODE]
        sent = {word for source in sources for word in source.send_words}
        is_pair = any(sink.can_receive_any(sent) for sink in sinks)
        if is_pair or any(info.role == WorkerRole.MIXED for info in infos):
            return ""
        if sources and sinks:
            return "the prefill and the decode workers can't exchange KV"
        sides = [f"no live {side} worker" for side, those in (("prefill", sources), ("decode", sinks)) if not those]
        return f"{' and '.join(sides)} that is connected and takes work"

    @property
    def adapters(self) -> dict[str, AdapterRef]:
        """Return the LoRA adapters that requests may name.

        Of several with one name the one that most workers have. While no worker is listed, those of before: a request
        is then told that there is no worker, and not that there is no such model.
        """
        return self._adapters

    def lacking(self, adapter: AdapterRef | None) -> list[WorkerId]:
        """Return the workers that have not loaded an adapter; none for the model alone.

        Raises Unavailable if no worker has it.
        """
        if adapter is None:
            return []
        infos = [link.info for link in self._links.values()]
        lacking = [info.worker_id for info in infos if adapter not in (info.adapters or ())]
        if len(lacking) == len(infos):
            raise Unavailable(f"no worker has the adapter '{adapter.name}' now")
        return lacking

    async def change_adapter(self, name: str, path: str | None) -> None:
        """Load a LoRA adapter on all workers, or unload it if `path` is None.

        Raises RequestError with the words of a worker that can't, after what the others did was undone; Unavailable if
        one does not answer, or there is none.
        """
        before = self._adapters.get(name)
        links = [link for name, link in self._links.items() if name in self._listed]
        if not links:
            raise Unavailable("no worker is connected")
        faults = await asyncio.gather(*(link.change_adapter(name, path) for link in links))
        if path is not None and before is None and any(faults):
            done = (link for link, fault in zip(links, faults, strict=True) if fault is None)
            await asyncio.gather(*(link.change_adapter(name, None) for link in done))
        await self._poll()
        if refusals := [fault for fault in faults if fault is not None]:
            raise next((fault for fault in refusals if isinstance(fault, RequestError)), refusals[0])

    def _drains(self, worker_id: WorkerId) -> bool:
        return self._listed[worker_id].draining

    def max_model_len(self, default: int) -> int:
        """Return the shortest context of the workers that are listed, of which each request asks."""
        return min(default, self._shortest)

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
        self._shortest = min((node.info.max_model_len for node in nodes.values()), default=sys.maxsize)
        self._listed = {worker_id: node.load for worker_id, node in nodes.items()}
        if nodes:
            self._adapters = _most_common([node.info for node in nodes.values()])
        gone = [worker_id for worker_id, link in self._links.items() if _is_gone(nodes.get(worker_id), link)]
        for worker_id in gone:
            # In its own time: what was just sent to a worker that is frozen takes POST_TIMEOUT_S to fail.
            spawn_into(self._leaving, self._links.pop(worker_id).stop("the registry no longer lists it"))
        for worker_id, node in nodes.items():
            if worker_id in self._links:
                self._links[worker_id].info = node.info  # its role may have changed
            else:
                self._links[worker_id] = self._open(node)

    def _name_misfits(self, infos: list[NodeInfo]) -> None:
        if infos == self._infos:
            return  # what a worker can do it states once: most looks bring no more than other loads
        self._infos = infos
        self.synthetic_acceptance = max((info.synthetic_acceptance for info in infos), default=0.0)
        before, self._misfits = self._misfits, incompatible_workers(infos, self._model)
        for worker_id in self._misfits.keys() - before.keys():  # said once, not at each look
            log.warning("worker %s: %s", worker_id, self._misfits[worker_id])

    def _open(self, node: Node) -> WorkerLink:
        assert self._session is not None
        return WorkerLink(node.info, self._gateway_id, self._session, self._on_event, self._on_lost, self._has_left)

    async def _has_left(self, worker_id: WorkerId) -> bool:
        """Return whether a worker whose stream ended has left in order.

        By the registry as it is now it drains, or is no longer listed.
        """
        with suppress(Unavailable):
            await self._poll()
            return worker_id not in self._listed or self._drains(worker_id)
        return False


def _most_common(infos: Sequence[NodeInfo]) -> dict[str, AdapterRef]:
    """Return the adapters of workers by name, in the order in which these have them."""
    counts = Counter(ref for info in infos for ref in info.adapters or ())
    found: dict[str, AdapterRef] = {}
    for ref, count in counts.items():
        known = found.setdefault(ref.name, ref)
        if (count, ref.digest) > (counts[known], known.digest):
            found[ref.name] = ref
    return found


def _is_gone(node: Node | None, link: WorkerLink) -> bool:
    """A worker that still speaks to us lives, whatever the registry has forgotten: what it runs goes on."""
    return not link.is_open if node is None else node.info.incarnation != link.info.incarnation
