"""The plan of a system: the specifications of its processes."""

import os
import socket
import sys
from collections.abc import Mapping
from urllib.parse import quote

from contracts.errors import ConfigError
from contracts.node import WorkerRole
from coordinator.store.local_server import answers, hide_password
from tandem.local.child import ProcessSpec, ready_file
from tandem.local.gpu_assignment import worker_devices
from tandem.local.run_dir import RunDir
from tandem.local.settings import UpSettings

REDIS, SERVICES, GATEWAY = range(3)
"""The stages. Redis is first, since all others need it; the gateway is waited for last and ended first.

The gateway begins with the workers: of 23.1 s that two of them on H200 took to be ready, 2.2 were its own start.
"""
PING_TIMEOUT_S = 1.0
PATHS = ("TANDEM_CHAT_TEMPLATE", "TANDEM_GENERATION_CONFIG")
"""Variables that may name a file: services run from another folder, so the path of an existing one is made absolute."""
MAX_SOCKET_NBYTES = 107
"""The longest path of a socket, in bytes, that sockaddr_un has room for on Linux."""


def plan_system(
    settings: UpSettings, run_dir: RunDir, port: int, secret: str, environ: Mapping[str, str], redis_program: str
) -> list[ProcessSpec]:
    """Return the processes; `redis_program` is one unless the settings name a Redis. Raises ConfigError."""
    redis_url = settings.redis_url or f"unix://{quote(str(run_dir.redis_socket))}"
    # Systems that share a Redis may be on several hosts, each on the same port.
    env = child_environment(environ, redis_url, pool=f"{socket.gethostname()}-{port}", secret=secret)
    own_redis = [] if settings.redis_url else [redis_spec(run_dir, redis_url, redis_program, environ)]
    return [
        *own_redis,
        coordinator_spec(run_dir, env),
        *worker_specs(settings, run_dir, env),
        gateway_spec(settings, run_dir, port, env),
    ]


def child_environment(environ: Mapping[str, str], redis_url: str, pool: str, secret: str) -> dict[str, str]:
    """Return the user's environment for services, without the variables of `tandem up` itself.

    A worker's port is not the gateway's, for example. The secret and the Redis password are passed this way because
    every user of the machine can read command lines.
    """
    ours = {f"TANDEM_{name}".upper() for name in UpSettings.model_fields}
    kept = {name: value for name, value in environ.items() if name.upper() not in ours}
    kept |= {name: os.path.abspath(kept[name]) for name in PATHS if os.path.exists(kept.get(name, ""))}
    return kept | {"TANDEM_REDIS_URL": redis_url, "TANDEM_POOL": pool, "TANDEM_SECRET": secret, "PYTHONUNBUFFERED": "1"}


def redis_spec(run_dir: RunDir, url: str, program: str, environ: Mapping[str, str]) -> ProcessSpec:
    """Return a Redis without a port: its socket is in a folder only for this user. Raises ConfigError."""
    path = str(run_dir.redis_socket)
    if len(os.fsencode(path)) > MAX_SOCKET_NBYTES:
        raise ConfigError(f"{path} is too long for a socket; set XDG_STATE_HOME to a shorter path, or redis_url")
    options = ("--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", str(run_dir.path))
    return ProcessSpec(
        name="redis",
        role="redis",
        stage=REDIS,
        argv=(program, *options),
        is_ready=lambda: {"url": url} if answers(path) else None,
        env=dict(environ),
        is_vital=True,
    )


def coordinator_spec(run_dir: RunDir, env: Mapping[str, str]) -> ProcessSpec:
    return _service("coordinator", "coordinator", SERVICES, (), run_dir, env)


def gateway_spec(settings: UpSettings, run_dir: RunDir, port: int, env: Mapping[str, str]) -> ProcessSpec:
    options = ("--host", settings.host, "--port", str(port), *_model(settings))
    return _service("gateway", "gateway", GATEWAY, options, run_dir, env, is_vital=True, begins=SERVICES)


def worker_specs(settings: UpSettings, run_dir: RunDir, env: Mapping[str, str]) -> list[ProcessSpec]:
    """Return the workers, on the devices that are assigned to them."""
    counts = {
        WorkerRole.PREFILL: settings.prefill,
        WorkerRole.DECODE: settings.decode,
        WorkerRole.MIXED: settings.mixed,
    }
    names = [(role, f"{role}-{index}") for role, count in counts.items() for index in range(count)]
    devices = worker_devices(settings, len(names))
    return [
        _worker(settings, role, name, device, run_dir, env) for (role, name), device in zip(names, devices, strict=True)
    ]


def _worker(
    settings: UpSettings, role: WorkerRole, name: str, device: str, run_dir: RunDir, env: Mapping[str, str]
) -> ProcessSpec:
    options = ("--worker-id", name, "--dtype", settings.dtype, "--transfer", settings.transfer)
    options += () if device == "cpu" else ("--device", device)
    options += ("--tensor-parallel", str(settings.tensor_parallel)) if settings.tensor_parallel > 1 else ()
    return _service(f"{role}_svc", name, SERVICES, (*options, *_model(settings)), run_dir, env, role=role)


def _service(
    module: str,
    name: str,
    stage: int,
    options: tuple[str, ...],
    run_dir: RunDir,
    env: Mapping[str, str],
    role: str = "",
    is_vital: bool = False,
    begins: int | None = None,
) -> ProcessSpec:
    """Return the specification of a service of ours, which reports through a file that it is ready."""
    ready = run_dir.ready / f"{name}.json"
    return ProcessSpec(
        name=name,
        role=role or name,
        stage=stage,
        argv=(sys.executable, "-m", module, "--ready-file", str(ready), *options),
        is_ready=ready_file(ready),
        env=env,
        is_vital=is_vital,
        stop_timeout_s=10.0,
        begins=begins,
    )


def _model(settings: UpSettings) -> tuple[str, ...]:
    return ("--model", settings.model) if settings.model else ()


def require_redis(url: str, otherwise: str) -> None:
    """Raise ConfigError unless a Redis answers at this URL and accepts its user.

    The error says to start the server, or `otherwise`.
    """
    import redis  # late: its import takes half a second, which a system with its own Redis is spared

    shown = hide_password(url)
    try:
        with redis.Redis.from_url(url, socket_timeout=PING_TIMEOUT_S, socket_connect_timeout=PING_TIMEOUT_S) as client:
            client.ping()
    except (redis.AuthenticationError, redis.ResponseError) as error:
        raise ConfigError(f"Redis at {shown} refuses: {error}; redis_url names user, password and database") from error
    except (redis.RedisError, OSError) as error:
        why = str(error).rstrip(".")
        raise ConfigError(f"Redis does not answer at {shown}: {why}; start it, or {otherwise}") from error
    except ValueError as error:
        raise ConfigError(f"redis_url {shown!r} can't be read: {error}") from error
