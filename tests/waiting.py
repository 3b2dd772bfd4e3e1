"""Waits that have a deadline, and processes that have ended. Not a test."""

import asyncio
import inspect
import time
from collections.abc import Callable

import psutil

PATIENCE_S = 90.0


def until(
    is_so: Callable[[], object],
    timeout_s: float = PATIENCE_S,
    words: Callable[[], object] = lambda: "",
    period_s: float = 0.05,
) -> None:
    """Raises AssertionError that says what did not come true, and `words`, what there was instead."""
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{_never(is_so, timeout_s)} {words()}")
        time.sleep(period_s)


async def async_until(is_so: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Wait like `until` while other tasks go on; what `is_so` returns may be awaitable."""
    try:
        async with asyncio.timeout(timeout_s) as limit:
            while not await _value(is_so()):
                await asyncio.sleep(0.01)
    except TimeoutError:
        if not limit.expired():  # it is of `is_so`
            raise
        raise AssertionError(_never(is_so, timeout_s)) from None


def is_gone(pid: int) -> bool:
    """A zombie that nobody has collected yet is dead."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def _value(found: object) -> object:
    return await found if inspect.isawaitable(found) else found


def _never(is_so: Callable[[], object], timeout_s: float) -> str:
    name = getattr(is_so, "__qualname__", repr(is_so))
    said = inspect.getsource(is_so).strip() if name.endswith("<lambda>") else name
    return f"not within {timeout_s:g} s: {said}"
