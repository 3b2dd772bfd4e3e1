"""The process of an engine core, whatever its roles.

The front starts it with one end of a socket pair as its argument.
"""

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing

from contracts.errors import ConfigError
from contracts.ids import Incarnation, WorkerId
from engine.engine import Engine
from engine.loader import load_engine, resolve_device
from engine.settings import EngineSettings
from kv_transfer.codecs.level import accepted_loss, allowed_levels
from kv_transfer.node import TransferNode
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.registry import device_staging_nbytes
from process.garbage_collector import freeze_startup_objects
from worker.core.attempt_table import AttemptTable
from worker.core.engine_core import EngineCore
from worker.core.front_link import FrontDisconnected, FrontLink
from worker.core.gpu_claim import claim_gpus
from worker.core.open_tiers import open_tiers
from worker.core.peer_prefixes import PeerPrefixes
from worker.core.role_handler import RoleHandler
from worker.messages import CoreFailed, CoreReady, Loading, Start, Stop
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
MakeRoles = Callable[[WorkerSettings, WorkerId, Engine, TransferNode, AttemptTable], list[RoleHandler]]
SWITCH_S = 0.0002
"""The interval at which threads switch, in seconds: a link's thread gets the interpreter this soon while the engine's
Python runs.
"""


def run(make_roles: MakeRoles) -> None:
    """Run the program of one engine core; end the process if it fails."""
    sys.setswitchinterval(SWITCH_S)
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole process group: the front decides
        signal.signal(number, signal.SIG_IGN)
    link = FrontLink(socket.socket(fileno=int(sys.argv[1])))
    try:
        _serve(link, make_roles)
    except FrontDisconnected:
        sys.exit(0)
    except Exception as error:
        if isinstance(error, ConfigError):
            link.send(CoreFailed(str(error)))
        else:
            log.exception("the engine core failed")
        # Not sys.exit, which frees a GPU's memory: that waits for the kernels launched there, and they for another GPU,
        # which may have failed as well. While the process exists, its failure is not seen.
        logging.shutdown()
        os._exit(1)


def _serve(link: FrontLink, make_roles: MakeRoles) -> None:
    start = _first_message(link)
    settings = WorkerSettings.model_validate_json(start.settings)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s core %(levelname)s %(name)s: %(message)s")
    claim_gpus(settings)  # until this process ends
    engine = load_engine(engine_settings(settings), lambda stage, done, total: link.send(Loading(stage, done, total)))
    serve(link, start, settings, engine, make_roles)


def serve(
    link: FrontLink,
    start: Start,
    settings: WorkerSettings,
    engine: Engine,
    make_roles: MakeRoles,
) -> None:
    """Serve until the front sends Stop. Raises FrontDisconnected when the front is gone."""
    me, incarnation = WorkerId(start.worker_id), Incarnation(start.incarnation)
    with closing(engine):
        node = TransferNode(
            transfer_settings(settings), me, incarnation, engine.layout, engine.transfer_pool, link.wake
        )
        node.start()
        with closing(node):
            attempts = AttemptTable(accepted_loss(allowed_levels(settings.kv_codec)))
            roles = make_roles(settings, me, engine, node, attempts)
            core = EngineCore(me, engine, node, roles, attempts, link)
            core.use_peers(PeerPrefixes(me, engine, node, attempts, roles, lambda: core.prefill_rate))
            with ExitStack() as stack:
                if settings.has_tiers:
                    core.measure_prefill_rate()  # before threads of tiers take their part of the machine
                    tiers = open_tiers(settings, engine, lambda: core.prefill_rate, link.wake)
                    stack.callback(tiers.close)
                    core.use_tiers(tiers)
                freeze_startup_objects()
                link.send(ready_of(engine, node))
                core.run()


def _first_message(link: FrontLink) -> Start:
    """Return the front's Start.

    Raises FrontDisconnected if none comes, or if a Stop follows at once: a front that finds no registry sends it while
    torch is being imported here.
    """
    match link.receive(START_TIMEOUT_S):
        case [Start() as start, *others] if Stop() not in others:
            return start
    raise FrontDisconnected


def engine_settings(settings: WorkerSettings) -> EngineSettings:
    """Return the settings of the engine, with the defaults of its device."""
    device = resolve_device(settings.device)
    on_gpu = device != "cpu"
    return EngineSettings(
        model=settings.model,
        dtype=settings.dtype,
        device=device,
        tensor_parallel=settings.tensor_parallel,
        block_size=settings.block_size,
        kv_cache_nbytes=settings.kv_cache_mib << 20 or None,
        max_model_len=settings.max_model_len or None,
        max_num_seqs=settings.max_num_seqs or (256 if on_gpu else 64),
        max_batched_tokens=settings.max_batched_tokens or (2048 if on_gpu else 512),
        max_mixed_tokens=settings.max_mixed_tokens or (1024 if on_gpu else None),
        itl_objective_s=settings.itl_objective_ms / 1e3,
        speculate=settings.speculate,
        draft_tokens=settings.draft_tokens,
        synthetic_acceptance=settings.synthetic_acceptance,
        enable_lora=settings.enable_lora,
        lora_modules=settings.adapters,
        keeps_whole_blocks=settings.has_tiers,
        num_threads=settings.num_threads or None,
        spare_nbytes=device_staging_nbytes(settings.transfer) if on_gpu else 0,
    )


def transfer_settings(settings: WorkerSettings) -> TransferSettings:
    """Return the settings of the KV transfer."""
    return TransferSettings(
        secret=settings.secret.get_secret_value().encode(),
        transport=settings.transfer,
        kv_codec=settings.kv_codec,
        checksum=settings.transfer_checksum,
        host=settings.host,
        port=settings.transfer_port,
        advertise_host=settings.advertised_host,
    )


def ready_of(engine: Engine, node: TransferNode) -> CoreReady:
    """Return the facts about this core that the front publishes."""
    return CoreReady(
        model=engine.checkpoint.name,
        layout=engine.layout,
        transfer=node.address,
        max_model_len=engine.max_model_len,
        capacity_tokens=engine.capacity_tokens,
        dtype=engine.dtype,
        capabilities=node.capabilities,
        adapters=engine.adapters.refs if engine.adapters.are_served else None,
    )
