"""The entry point of a worker.

It reads the settings and starts the core; while the core imports torch, the front does its own imports.
"""

import json
import secrets
import socket

from contracts.errors import ConfigError
from contracts.ids import Incarnation, WorkerId
from process.sockets import listen
from service.run import run_service
from worker.front.core_process import CoreProcess
from worker.messages import Start
from worker.settings import Side, WorkerSettings

GATEWAY_SILENCE_S = 10.0
"""The seconds of silence after which a gateway's connection is lost. Its host may vanish without closing it; the event
stream sends a heartbeat each second, so silence means loss.
"""

CORE_MODULE = "mixed_svc.core"
"""The core of every worker has both sides of a handoff: its role is what gateways give it, and may change."""


def main(argv: list[str] | None = None) -> int:
    """Run a worker of the role that its settings name.

    Returns the exit code once it is asked to stop: 0 stopped, 1 could not start, 3 the core died or has to be
    restarted.
    """
    return run_service("worker", WorkerSettings, argv, _run)


def run_role(role: Side, argv: list[str]) -> int:
    """Run a worker of this role as `main` does. Raises ConfigError if its settings name another one."""

    async def run(settings: WorkerSettings) -> int:
        if settings.role != role:
            raise ConfigError(f"role is '{settings.role}', but this is {role}_svc; start {settings.role}_svc instead")
        return await _run(settings)

    return run_service(f"{role}_svc", WorkerSettings, ["--role", role, *argv], run)


async def _run(settings: WorkerSettings) -> int:
    incarnation = Incarnation(secrets.token_hex(4))
    worker_id = WorkerId(settings.worker_id or f"{settings.role}-{socket.gethostname()}-{incarnation}")
    listener = listen(settings.host, settings.port, silence_s=GATEWAY_SILENCE_S)
    core = CoreProcess(CORE_MODULE, Start(_for_core(settings), worker_id, incarnation))
    await core.start()
    try:
        from worker.front.serve import serve  # late: FastAPI and Redis' client take a second, the core's torch three

        return await serve(settings, worker_id, incarnation, core, listener)
    finally:
        await core.stop()
        listener.close()


def _for_core(settings: WorkerSettings) -> bytes:
    """Return the settings as JSON with the secret in clear: they cross only a private socket pair."""
    plain = settings.model_dump(mode="json", exclude={"ready_file"})
    return json.dumps(plain | {"secret": settings.secret.get_secret_value()}).encode()
