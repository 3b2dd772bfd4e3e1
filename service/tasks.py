"""The tasks that run beside the code that starts them."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def spawn_into(tasks: set[asyncio.Task[Any]], coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task and keep it in `tasks` until it ends.

    The event loop alone does not keep it, and shutdown waits for those in `tasks`.
    """
    task = asyncio.get_running_loop().create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
