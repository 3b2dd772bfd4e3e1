"""The engine core of every worker: `python -m mixed_svc.core FD`, started by its front."""

from contracts.ids import WorkerId
from decode_svc.decode_role import DecodeRole
from engine.engine import Engine
from kv_transfer.node import TransferNode
from prefill_svc.prefill_role import PrefillRole
from worker.core.attempt_table import AttemptTable
from worker.core.local_role import LocalRole
from worker.core.main import run
from worker.core.role_handler import RoleHandler
from worker.handoff.migration_source import MigrationSource
from worker.settings import WorkerSettings


def make_roles(
    settings: WorkerSettings, me: WorkerId, engine: Engine, node: TransferNode, attempts: AttemptTable
) -> list[RoleHandler]:
    """Return all roles: a worker takes either side of a handoff, and whole requests."""
    return [
        LocalRole(engine, attempts),
        PrefillRole(me, engine, node, attempts, settings.grant_timeout_s),
        DecodeRole(me, engine, node, attempts),
        MigrationSource(me, engine, node, attempts),
    ]


if __name__ == "__main__":
    run(make_roles)
