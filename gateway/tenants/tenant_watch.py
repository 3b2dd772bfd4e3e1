"""The file of tenants, read again when it changes."""

import asyncio
import logging
import time
from pathlib import Path

from contracts.errors import ConfigError
from gateway.tenants.tenant_accounts import TenantAccounts
from gateway.tenants.tenant_file import NOBODY, read_tenants

log = logging.getLogger(__name__)

PERIOD_S = 1.0


def open_tenants(path: Path | None) -> TenantAccounts:
    """Return the accounts of a file's tenants, none without a file. Raises ConfigError."""
    return TenantAccounts(NOBODY if path is None else read_tenants(path), time.monotonic())


async def watch_tenants(path: Path, accounts: TenantAccounts, period_s: float = PERIOD_S) -> None:
    """Follow a file until cancelled. One that is wrong is said once, and changes nothing."""
    seen = _state(path)
    while True:
        await asyncio.sleep(period_s)
        if (state := _state(path)) == seen:
            continue
        seen = state
        try:
            table = await asyncio.to_thread(read_tenants, path)
        except ConfigError as error:
            log.error("%s; the tenants of before hold", error)
            continue
        except Exception:  # the watch goes on whatever happens: keys that are taken back must not go on working
            log.exception("%s could not be read; the tenants of before hold", path)
            continue
        accounts.replace(table, time.monotonic())
        log.info("%s was read again: %d tenants", path, len(table.tenants))


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written or replaced, also behind a link, as Kubernetes does."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
