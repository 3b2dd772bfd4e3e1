"""The service of a worker's front once its core is ready: registry, HTTP, frames to the gateways."""

import asyncio
import hashlib
import logging
import os
import socket

from contracts.errors import ConfigError, Unavailable
from contracts.ids import Incarnation, WorkerId
from contracts.node import NodeInfo, WorkerRole
from coordinator.store.connect import connect, patiently
from coordinator.store.store import Store
from process.garbage_collector import freeze_startup_objects
from process.ready_file import ReadyFile
from process.sockets import http_url
from service.server import serving
from service.settings import flag_and_variable
from service.version import release
from worker.front.app import make_app
from worker.front.core_process import CoreProcess
from worker.front.core_watchdog import watch_core
from worker.front.drain import drain
from worker.front.event_streams import EventStreams
from worker.front.held_publisher import HeldPublisher
from worker.front.membership import Membership, transitions_of
from worker.front.worker_state import WorkerState
from worker.messages import AdapterReply, CoreFrame, CoreReady
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

CORE_DIED = 3
"""The exit status with which a supervisor starts this worker again."""


async def serve(
    settings: WorkerSettings, worker_id: WorkerId, incarnation: Incarnation, core: CoreProcess, listener: socket.socket
) -> int:
    """Wait for the core and serve until cancelled (0) or until the core dies (3).

    Raises TandemError if the core does not start or the registry can't be reached.
    """
    store = connect(settings.redis_url, settings.pool)
    try:
        await _require_redis(store)
        ready = await core.ready()
        info = _node_info(settings, worker_id, incarnation, listener, core, ready)
        streams = EventStreams(worker_id, incarnation)
        secret = settings.secret.get_secret_value()
        state = WorkerState(info, secret, core, streams, settings.hang_timeout_s, _digest(settings))
        return await _serve(settings, state, store, listener)
    finally:
        await store.close()


async def _require_redis(store: Store) -> None:
    """Check the registry before the model is loaded, which may take minutes.

    Raises ConfigError that names the setting.
    """
    try:
        await patiently(store.ping)
    except Unavailable as error:
        raise ConfigError(f"{error} (redis_url, set by {flag_and_variable('redis_url')})") from error


async def _serve(settings: WorkerSettings, state: WorkerState, store: Store, listener: socket.socket) -> int:
    """Join the registry and serve until cancelled (0) or until the core dies (3)."""
    membership, publisher = Membership(store, state), HeldPublisher(store, state)
    ready_file = ReadyFile(settings.ready_file)
    watchdog = asyncio.create_task(watch_core(state))
    try:
        async with serving(make_app(state, membership.change_role, membership.change_adapters), listener):
            # Start now: joining the registry may take longer than a core may be silent.
            pumping = asyncio.create_task(_pump(state, membership, publisher))
            publishing = asyncio.create_task(publisher.run())
            try:
                await membership.start()
                freeze_startup_objects()
                _announce(ready_file, state.info)
                return await _work(state, membership, pumping, settings.drain_timeout_s)
            finally:
                pumping.cancel()
                publishing.cancel()
                await membership.stop()  # first, so that nothing more is placed here
                state.streams.close()
    finally:
        watchdog.cancel()
        ready_file.remove()


async def _work(state: WorkerState, membership: Membership, pumping: asyncio.Task[None], drain_timeout_s: float) -> int:
    """Wait until the core dies, or must be restarted and has drained, and return CORE_DIED.

    When cancelled, drain and raise; a second cancellation ends the drain.
    """
    broken = asyncio.create_task(state.is_broken.wait())
    try:
        await asyncio.wait({pumping, broken}, return_when=asyncio.FIRST_COMPLETED)
        if pumping.done():
            pumping.result()
        else:
            log.error("%s; this worker ends, to be started again", state.broken)
            await drain(state, membership, drain_timeout_s)
        return CORE_DIED
    except asyncio.CancelledError:
        await drain(state, membership, drain_timeout_s)
        raise
    finally:
        broken.cancel()


async def _pump(state: WorkerState, membership: Membership, publisher: HeldPublisher) -> None:
    """Pass the core's frames to the event streams and the registry, until the core ends."""
    async for message in state.core.frames():
        if isinstance(message, CoreFrame):
            for gateway_id, events in message.events.items():
                state.streams.publish(gateway_id, events)
            if message.state_reports:
                membership.add_transitions(transitions_of(message.state_reports))
            if message.status is not None:
                state.on_status(message.status)
            publisher.add(message.held)
        elif isinstance(message, AdapterReply):
            state.adapter_calls.answer(message)
    state.core_alive = False
    state.streams.close()
    log.error("the engine core %s; this worker can't go on", await state.core.describe_end())


def _node_info(
    settings: WorkerSettings,
    worker_id: WorkerId,
    incarnation: Incarnation,
    listener: socket.socket,
    core: CoreProcess,
    ready: CoreReady,
) -> NodeInfo:
    return NodeInfo(
        worker_id=worker_id,
        incarnation=incarnation,
        role=WorkerRole(settings.role),
        url=http_url(settings.advertised_host, listener.getsockname()[1]),
        transfer=ready.transfer,
        model=ready.model,
        layout_id=ready.layout.layout_id,
        max_model_len=ready.max_model_len,
        capacity_tokens=ready.capacity_tokens,
        version=release(),
        pid=os.getpid(),
        core_pid=core.pid,
        ways=ready.capabilities,
        layout=ready.layout,
        synthetic_acceptance=settings.synthetic_acceptance,
        adapters=ready.adapters,
    )


def _announce(ready_file: ReadyFile, info: NodeInfo) -> None:
    log.info("%s serves %s at %s, KV at %s", info.worker_id, info.model, info.url, info.transfer)
    facts = {"pid": info.pid, "core_pid": info.core_pid, "url": info.url, "role": info.role, "id": info.worker_id}
    ready_file.write(facts)


def _digest(settings: WorkerSettings) -> str:
    plain = settings.model_dump_json(exclude={"secret", "ready_file", "worker_id", "port", "redis_url"})
    return hashlib.blake2b(plain.encode(), digest_size=8).hexdigest()
