"""An engine core that halts at one point of a migration until it is told to go on.

`halting_worker` runs a worker whose core this is. Where ARM names the point, the first core that gets there halts once:
it writes its worker's id to REACHED, and goes on when GO exists. These are files of the folder that the environment
names.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contracts.events import Moved
from contracts.handoff import Offer
from contracts.ids import WorkerId
from engine.engine import Engine
from kv_transfer.events import MessageReceived, TransferEvent
from kv_transfer.node import TransferNode
from mixed_svc import core as mixed_core
from worker.core.attempt_table import AttemptTable
from worker.core.front_link import FrontLink
from worker.core.main import run
from worker.core.role_handler import RoleHandler
from worker.handoff.incoming import IncomingHandoffs
from worker.handoff.outgoing import OutgoingHandoff
from worker.messages import CoreFrame
from worker.settings import WorkerSettings

FOLDER = "BENCH_HALT_FOLDER"
"""Its name in the environment."""
ARM, REACHED, GO = "arm", "reached", "go"
RESERVE, COPY, COMMIT, ADOPT, MOVED = POINTS = (
    "before reserve", "during copy", "before Commit", "after Commit", "after Moved"
)  # fmt: skip
"""The destination is asked for pages; the source has sent a chunk; the destination has all and has not taken it over;
it has, has said so to the source, and has told no token yet; the source has told the gateway."""
HALT_TIMEOUT_S, POLL_S = 20.0, 0.002

_names: list[str] = []


def halt(point: str) -> None:
    """Wait here, if this point is armed and nobody has reached it yet."""
    folder = Path(os.environ[FOLDER])
    try:
        if (folder / ARM).read_text("utf-8") != point:
            return
        (folder / ARM).rename(folder / "taken")  # of several cores one takes it
    except FileNotFoundError:
        return
    (folder / "reaching").write_text(_names[0], "utf-8")
    (folder / "reaching").rename(folder / REACHED)
    until = time.monotonic() + HALT_TIMEOUT_S
    while not (folder / GO).exists() and time.monotonic() < until:
        time.sleep(POLL_S)


def before(owner: type, name: str, point: Callable[..., str | None]) -> None:
    """Let a method of `owner` halt before it runs, at the point that `point` makes of its arguments."""
    method: Callable[..., Any] = getattr(owner, name)

    def halting(*args: Any, **options: Any) -> Any:
        if (reached := point(*args, **options)) is not None:
            halt(reached)
        return method(*args, **options)

    setattr(owner, name, halting)


def after(owner: type, name: str, point: Callable[..., str | None]) -> None:
    """Let a method of `owner` halt after it has run."""
    method: Callable[..., Any] = getattr(owner, name)

    def halting(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        if (reached := point(*args, **options)) is not None:
            halt(reached)
        return result

    setattr(owner, name, halting)


def halt_at_points() -> None:
    """Let this process halt at each of POINTS."""
    before(IncomingHandoffs, "on_transfer", lambda _, event, now: _point_of(event))
    before(IncomingHandoffs, "_commit", lambda _, handoff: COMMIT if handoff.is_migration else None)
    after(IncomingHandoffs, "_commit", lambda _, handoff: ADOPT if handoff.is_migration else None)
    after(OutgoingHandoff, "on_chunk", lambda handoff, *_: COPY if handoff.attempt.job.is_migration else None)
    after(FrontLink, "send", lambda _, message: MOVED if _has_moved(message) else None)


def make_roles(
    settings: WorkerSettings, me: WorkerId, engine: Engine, node: TransferNode, attempts: AttemptTable
) -> list[RoleHandler]:
    """Return the roles of every worker, and note its id."""
    _names.append(me)
    return mixed_core.make_roles(settings, me, engine, node, attempts)


def _point_of(event: TransferEvent) -> str | None:
    match event:
        case MessageReceived(message=Offer(is_bound=True)):
            return RESERVE
        case _:
            return None


def _has_moved(message: object) -> bool:
    events = message.events.values() if isinstance(message, CoreFrame) else ()
    return any(isinstance(event, Moved) for those in events for event in those)


if __name__ == "__main__":
    halt_at_points()
    run(make_roles)
