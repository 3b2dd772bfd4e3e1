"""A gateway that moves running answers as a file says; in all else it is like any other.

MOVES_FILE has the share of its answers that each worker gives away at each look, of which there are ten a second; none
while it is missing or empty. MOVED_FILE gets a line of JSON for each answer that has moved.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contracts.ids import Epoch
from contracts.node import Node, WorkerRole
from contracts.request import Route
from coordinator.migration_policy import MigrationOrder, MigrationPolicy, MigrationReason
from gateway import main as gateway_main
from gateway.dispatch.migrations import Migrations
from gateway.dispatch.request_state_machine import InflightRequest
from gateway.generation.generation_state import GenerationState

MOVES_FILE, MOVED_FILE = "BENCH_MOVES_FILE", "BENCH_MOVED_FILE"
"""Names of the environment."""


class FileOrders(MigrationPolicy):
    """The policy of the settings, and what the file orders."""

    def decide(self, nodes: Sequence[Node], now: float) -> list[MigrationOrder]:
        """Return what is to move now."""
        orders, share = super().decide(nodes, now), _share()
        for node in nodes:
            if share and node.info.role is not WorkerRole.PREFILL and not node.load.draining:
                orders.append(MigrationOrder(node.info.worker_id, MigrationReason.BALANCE, share, frozenset()))
        return orders


def _share() -> float:
    try:
        return float(Path(os.environ[MOVES_FILE]).read_text("utf-8") or 0)
    except (FileNotFoundError, ValueError):  # it is being written
        return 0.0


def record_moves(path: Path) -> None:
    """Let each answer that has moved write its id, and how many of its tokens were read before."""
    first_index: dict[int, int] = {}
    migrate, ended = GenerationState.migrate, Migrations.ended

    def migrate_noted(answer: GenerationState, epoch: Epoch) -> None:
        first_index[id(answer)] = answer.num_tokens
        migrate(answer, epoch)

    def ended_noted(migrations: Migrations, live: InflightRequest, route: Route, is_moved: bool) -> None:
        ended(migrations, live, route, is_moved)
        line: dict[str, Any] = {"request": live.request_id, "first_index": first_index.pop(id(live.answer), 0)}
        if is_moved:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | {"to": route.decode.worker_id}) + "\n")

    for owner, name, noted in ((GenerationState, "migrate", migrate_noted), (Migrations, "ended", ended_noted)):
        setattr(owner, name, noted)


if __name__ == "__main__":
    record_moves(Path(os.environ[MOVED_FILE]))
    gateway_main.MigrationPolicy = FileOrders
    sys.exit(gateway_main.main())
