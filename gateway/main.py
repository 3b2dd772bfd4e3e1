"""The gateway's entry: settings, model, registry, HTTP, in that order; and the way back."""

import asyncio
import logging
import os
import secrets
import socket
import time

from checkpoint import Advice, open_checkpoint
from contracts.ids import GatewayId
from coordinator.migration_policy import MigrationPolicy
from coordinator.store.connect import connect
from coordinator.store.store import Store
from gateway.console.routes import add_console
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.registry_client import StorePlacement
from gateway.http.app import make_app
from gateway.http.context import AppContext
from gateway.http.server import http_config
from gateway.model_overrides import overridden
from gateway.observability.metrics import Metrics
from gateway.observability.tracing import open_tracing
from gateway.prompting.chat_template import Prompting
from gateway.settings import GatewaySettings
from gateway.tenants.tenant_watch import open_tenants, watch_tenants
from process.garbage_collector import freeze_startup_objects
from process.ready_file import ReadyFile
from process.sockets import listen
from service.run import run_service
from service.server import UvicornServer, announce
from service.version import release

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the gateway until it is told to stop. Returns the exit code: 0 stopped, 1 could not start."""
    return run_service("gateway", GatewaySettings, argv, lambda s: run(s, connect(s.redis_url, s.pool)))


async def run(settings: GatewaySettings, store: Store) -> int:
    """Serve until cancelled. Raises TandemError if it can't start."""
    listener = listen(settings.host, settings.port, backlog=2048)
    try:
        checkpoint = overridden(await asyncio.to_thread(open_checkpoint, settings.model), settings)
        gateway_id = GatewayId(f"gateway-{socket.gethostname()}-{secrets.token_hex(4)}")
        secret = settings.secret.get_secret_value()
        planner = MigrationPolicy(settings.migration_reasons)
        dispatch = Dispatcher(StorePlacement(store, gateway_id), gateway_id, secret, checkpoint.name, planner)
        [model, *aliases], version = settings.model_names or [checkpoint.name], release()
        tenants = open_tenants(settings.tenants)
        metrics = Metrics(dispatch, model, version, checkpoint.config.max_model_len, tenants)
        tracing = open_tracing(os.environ, model, version)
        if checkpoint.advice != Advice():
            log.info("where a request does not say, the model's advice or the settings do: %s", checkpoint.advice)
        created, prompting = int(time.time()), Prompting(checkpoint, settings.tool_parser)
        parts = (settings, checkpoint, prompting, dispatch, metrics, model, version, created, tracing)
        front = AppContext(*parts, aliases=tuple(aliases), tenants=tenants)
        return await _serve(front, store, listener)
    finally:
        listener.close()
        await store.close()


async def _serve(front: AppContext, store: Store, listener: socket.socket) -> int:
    app = make_app(front)
    add_console(app, front.dispatch, store)
    server = UvicornServer(http_config(app))
    serving, watching, ready_file = None, None, ReadyFile(front.settings.ready_file)
    try:
        await front.dispatch.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        if front.settings.tenants is not None:
            watching = asyncio.create_task(watch_tenants(front.settings.tenants, front.tenants))
        freeze_startup_objects()
        announce(front.settings.host, listener, ready_file)
        await asyncio.wait({serving})  # not `await serving`: a signal must not cancel it before it has closed
        return 0
    finally:
        server.should_exit = True
        if watching is not None:
            watching.cancel()
        await front.dispatch.stop()
        if serving is not None:
            await asyncio.wait({serving}, timeout=5)
        front.prompting.close()
        if front.tracing is not None:
            await asyncio.to_thread(front.tracing.close)
        ready_file.remove()
