"""The process of one GPU of a team but the first: launches what the first one's tells it.

Started by engine.cuda.tensor_parallel, with its end of a pipe as its only argument.
"""

import logging
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from contracts.errors import TandemError
from engine.cuda.inputs.batch_inputs import SampleBatch
from engine.cuda.launcher import Launcher, unscored
from engine.cuda.loader import DeviceBackendBuilder
from engine.cuda.runtime.process_group import DistributedProcessGroup, open_store
from engine.cuda.tensor_parallel import RankFailure, RankStart, end_at_once
from process.garbage_collector import freeze_startup_objects

_log = logging.getLogger(__name__)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach the whole group: the first member decides
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    begin: RankStart = pipe.recv()
    rank = begin.shard.rank
    logging.basicConfig(level=begin.log_level, format=f"%(asctime)s gpu {rank} %(levelname)s %(name)s: %(message)s")
    try:
        follow(begin, pipe)
    except TandemError as error:
        _fail(pipe, str(error))
    except Exception as error:
        _log.exception("this GPU's part failed")
        _fail(pipe, f"{type(error).__name__}: {error}")


def _fail(pipe: Connection, words: str) -> NoReturn:
    with suppress(OSError):  # the first member is gone as well
        pipe.send(RankFailure(words))
    end_at_once()


def follow(begin: RankStart, pipe: Connection) -> None:
    """Until the first member says that it is over."""
    device = torch.device(begin.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    team = DistributedProcessGroup(begin.shard, open_store(begin.shard.size, begin.store_port), device)
    checkpoint, source = begin.reopen(begin.settings.model, device)
    launcher, _ = DeviceBackendBuilder(begin.settings, checkpoint, source, device, team).prepare(_watched_elsewhere)
    freeze_startup_objects()
    _launch_all(launcher, pipe)
    launcher.release()
    team.close()


def _launch_all(launcher: Launcher, pipe: Connection) -> None:
    while (told := pipe.recv()) is not None:
        if isinstance(told, SampleBatch):
            launcher.follow(told)
        else:  # the first member tells what comes of scores; making them takes all of the team
            launcher.launch(told, unscored)


def _watched_elsewhere(stage: str, done: int, total: int) -> None:
    """The first member loads the same."""


if __name__ == "__main__":
    main()
