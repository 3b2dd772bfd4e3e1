"""Tasks that run beside their starter."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def spawn_into(tasks: set[asyncio.Task[Any]], coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """In `tasks` until it ends: a loop alone does not keep it, and who closes them waits for those."""
    task = asyncio.get_running_loop().create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
