"""The life of a service's process: settings, work until a signal, and shutdown."""

import asyncio
import logging
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from pydantic import SecretStr

from contracts.errors import ConfigError, TandemError
from service.settings import read_settings


class ServiceSettings(Protocol):
    """The settings that every service has."""

    @property
    def secret(self) -> SecretStr: ...

    @property
    def log_level(self) -> str: ...


S = TypeVar("S", bound=ServiceSettings)

MAX_FILES = 65536


def run_service(name: str, kind: type[S], argv: Sequence[str] | None, serve: Callable[[S], Awaitable[int]]) -> int:
    """Read settings and `serve` until SIGINT or SIGTERM, which cancel it.

    Return the exit code: 0 stopped, 1 could not start (a line on stderr says why), or else what `serve` returned.
    """
    try:
        settings = read_settings(kind, sys.argv[1:] if argv is None else argv)
        _require_secret(settings)
        start_log(name, settings)
        _allow_files()
        return asyncio.run(_until_signal(serve, settings))
    except TandemError as error:
        print(f"tandem {name}: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        return 0


async def _until_signal(serve: Callable[[S], Awaitable[int]], settings: S) -> int:
    """Run `serve`; each signal cancels it through its finally blocks, whatever it is doing."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await serve(settings)


def _require_secret(settings: ServiceSettings) -> None:
    if not settings.secret.get_secret_value():
        raise ConfigError("secret is empty: set TANDEM_SECRET to the same value for all services of the pool")


def _allow_files() -> None:
    """Raise the limit of open files.

    Shells allow 1024, for programs that wait by select(), which is fewer than a gateway's answers in progress, each
    with its client's connection. Containers may allow a thousand million, which some programs close one by one before
    they start another, so the limit is not raised further than is useful.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(MAX_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def start_log(name: str, settings: ServiceSettings) -> None:
    """Start the log at the level of the settings.

    The handler has the level, too, since a logger may let more through for other listeners.
    """
    level, written = settings.log_level.upper(), logging.StreamHandler()
    written.setLevel(level)
    form = f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=level, format=form, handlers=[written])
