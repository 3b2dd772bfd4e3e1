"""The worker's membership in the registry: join, heartbeat, discovery of peers, state reports, leave."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial

import msgspec

from contracts.errors import Unavailable
from contracts.ids import Epoch, RequestId
from contracts.node import Node, NodeInfo, WorkerRole
from contracts.request import AdapterRef, WorkerRef
from coordinator.request_states import RequestState
from coordinator.store.connect import patiently
from coordinator.store.store import StateTransition, Store
from service.outage_log import OutageLog
from worker.front.worker_state import WorkerState
from worker.messages import KnownPeers

log = logging.getLogger(__name__)

BEAT_PERIOD_S = 1.0
LOOK_PERIOD_S, MAX_LOOKS = 0.1, 600
"""A minute of looks, until a worker is found that may take KV: services start together, and get requests as soon as
they are ready.
"""
TRANSITIONS_PERIOD_S = 0.1
MAX_TRANSITIONS = 10_000  # kept while Redis is away; older ones are of no use by then
MAX_POOL = 32
"""The largest pool, in workers, in which links are opened ahead of the first request. Each costs either end two threads
and its staging, and a worker takes kv_transfer.settings.max_peers of them.
"""


class Membership:
    """The membership of one worker, which keeps trying while Redis is away.

    Losing Redis stops neither the engine nor handoffs in flight.
    """

    def __init__(self, store: Store, state: WorkerState) -> None:
        self._store = store
        self._state = state
        self._outage = OutageLog(log, "in the registry again")
        self._absence = OutageLog(log)
        self._peers: list[WorkerRef] = []
        self._transitions: list[StateTransition] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._beating = asyncio.Lock()

    async def start(self) -> None:
        """Join, so that start-up fails clearly if Redis can't be reached. Raises Unavailable."""
        info = self._state.info
        if await patiently(partial(self._store.join, info)):
            log.warning(
                "took the place of a worker %s that lived a moment ago: if it was not this one before a restart, "
                "give each an id of its own (worker_id)",
                info.worker_id,
            )
        self._state.joined = True
        self._state.num_joins += 1
        looks = [self._look] if self._state.info.role is WorkerRole.PREFILL else []
        self._tasks = [asyncio.create_task(do()) for do in (self._beat, self._tell, *looks)]

    def add_transitions(self, transitions: list[StateTransition]) -> None:
        self._transitions += transitions
        del self._transitions[:-MAX_TRANSITIONS]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(Unavailable):  # then its lease expires
            info, is_dead = self._state.info, self._state.health_error() is not None
            await self._store.leave(info.worker_id, info.incarnation, is_dead)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_PERIOD_S)
            if self._state.health_error():
                continue  # no sign of life from a worker that can't work
            await self.beat_once()

    async def beat_once(self) -> None:
        """Report this worker's load to the registry, and the known peers to the core.

        If the registry can't be reached, that is logged. Calls run one after another, so that the latest report is the
        last.
        """
        async with self._beating:
            await self._say_alive()

    async def change_role(self, role: WorkerRole) -> None:
        """Take work of this role from now on, and no more of the former one; what runs goes on to its end.

        Raises RequestError if nobody else has a side that the role lacks, Unavailable if the registry can't be reached;
        then this worker may have the new role there, and the call is to be repeated.
        """
        async with self._beating:
            before, info = self._state.info.role, msgspec.structs.replace(self._state.info, role=role)
            await self._store.restate(info)
            self._state.info = info
        if role is not before:
            log.info("%s is %s from now on; it was %s", info.worker_id, role.value, before.value)
        await self._update_peers()

    async def change_adapters(self, adapters: tuple[AdapterRef, ...]) -> None:
        """State the LoRA adapters that are loaded from now on.

        Raises Unavailable if the registry can't be reached; it hears of them when this worker joins it again.
        """
        async with self._beating:
            self._state.info = msgspec.structs.replace(self._state.info, adapters=adapters)
            await self._store.restate(self._state.info)

    async def _say_alive(self) -> None:
        info, load = self._state.info, self._state.load
        try:
            known = await self._store.heartbeat(info.worker_id, info.incarnation, load)
            if not known:
                self._absence.failed("the registry does not know this worker any more; joining again")
                await self._store.join(info, again=True)
                self._state.num_joins += 1
                await self._store.heartbeat(info.worker_id, info.incarnation, load)  # join reports no load
            await self._update_peers()
        except Unavailable as error:
            self._outage.failed(f"not in the registry: {error}", error.what)
            self._state.joined = False
        else:
            self._absence.worked()
            self._outage.worked()
            self._state.joined = True

    async def _look(self) -> None:
        for _ in range(MAX_LOOKS):
            await self._update_peers()
            if self._peers:
                break
            await asyncio.sleep(LOOK_PERIOD_S)

    async def _update_peers(self) -> None:
        """Refresh the peers, with each heartbeat: workers may have joined or come back."""
        if self._state.info.role is WorkerRole.PREFILL:
            with contextlib.suppress(Unavailable):  # the heartbeat reports that, and this can wait
                self._peers = takers(self._state.info, await self._store.nodes(2 * MAX_POOL))
                self._state.core.send(KnownPeers(self._peers))

    async def _tell(self) -> None:
        outage = OutageLog(log)
        while True:
            await asyncio.sleep(TRANSITIONS_PERIOD_S)
            if self._transitions:
                transitions, self._transitions = self._transitions, []
                try:
                    await self._store.advance(transitions)
                    outage.worked()
                except Unavailable as error:
                    outage.failed(f"states of requests have not reached the registry yet: {error}", error.what)
                    self._transitions = [*transitions, *self._transitions][-MAX_TRANSITIONS:]


def takers(me: NodeInfo, nodes: Sequence[Node]) -> list[WorkerRef]:
    """Return the workers that may receive KV from this prefill worker; none in a pool above MAX_POOL.

    A mixed worker opens no link ahead of the first request: it seldom hands over.
    """
    alive = [node for node in nodes if node.alive]
    if len(alive) > MAX_POOL:
        return []
    found = [n.info for n in alive if not n.load.draining and n.info.role is not WorkerRole.PREFILL]
    return [info.ref for info in found if info.can_receive_from(me)]


def transitions_of(transitions: list[tuple[RequestId, Epoch, str]]) -> list[StateTransition]:
    """Return the core's state reports as the registry's transitions."""
    return [StateTransition(request_id, epoch, RequestState(name)) for request_id, epoch, name in transitions]
