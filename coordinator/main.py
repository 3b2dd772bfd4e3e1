"""The coordinator's entry: Redis, HTTP, in that order; and the way back."""

import asyncio

from coordinator.metrics import RedisTimes
from coordinator.service import make_app
from coordinator.settings import CoordinatorSettings
from coordinator.store.connect import connect, patiently
from process.garbage_collector import freeze_startup_objects
from process.ready_file import ReadyFile
from process.sockets import listen
from service.run import run_service
from service.server import announce, serving


def main(argv: list[str] | None = None) -> int:
    """Run until told to stop. Returns the exit code: 0 stopped, 1 could not start."""
    return run_service("coordinator", CoordinatorSettings, argv, _run)


async def _run(settings: CoordinatorSettings) -> int:
    """Serve until cancelled. Raises TandemError if it can't start."""
    times = RedisTimes()
    store = connect(settings.redis_url, settings.pool, times.observe)
    listener, ready_file = listen(settings.host, settings.port), ReadyFile(settings.ready_file)
    try:
        await patiently(store.ping)
        app = make_app(store, settings.secret.get_secret_value(), times, settings.role_objective_s)
        async with serving(app, listener) as task:
            freeze_startup_objects()
            announce(settings.host, listener, ready_file)
            await asyncio.wait({task})  # not `await task`: a signal must not cancel it before it has closed
        return 0
    finally:
        ready_file.remove()
        listener.close()
        await store.close()
