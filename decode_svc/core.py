"""The engine core of a decode worker: `python -m decode_svc.core FD`, started by its front."""

from contracts.ids import WorkerId
from decode_svc.decode_role import DecodeRole
from engine.engine import Engine
from kv_transfer.node import TransferNode
from worker.core.attempt_table import AttemptTable
from worker.core.local_role import LocalRole
from worker.core.main import run
from worker.core.role_handler import RoleHandler
from worker.settings import WorkerSettings


def make_roles(
    settings: WorkerSettings, me: WorkerId, engine: Engine, node: TransferNode, attempts: AttemptTable
) -> list[RoleHandler]:
    """Return the roles of a worker that computes answers; any worker can serve a request whole, too."""
    return [LocalRole(engine, attempts), DecodeRole(me, engine, node, attempts)]


if __name__ == "__main__":
    run(make_roles)
