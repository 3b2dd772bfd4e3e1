"""The watchdog of the engine core: a core that hangs counts as dead, and is killed if it goes on."""

import asyncio
import logging

from worker.front.worker_state import WorkerState
from worker.messages import GatewayGone

log = logging.getLogger(__name__)

WATCH_PERIOD_S = 1.0
ORPHAN_GRACE_S = 10.0
"""The seconds from the end of a gateway's stream to that of its requests: decode may have them whole by then."""
HANGS_UNTIL_KILLED = 2
"""The number of hang timeouts without a turn before a core is killed: one that was only stopped may have gone on."""


async def watch_core(state: WorkerState) -> None:
    """Check the core once a period, until cancelled.

    To the gateways a core that hangs counts as dead: their streams end, and with them the requests. One that goes on
    hanging is killed, and the supervisor of this worker starts it again. The requests of streams that broke end too: a
    gateway that lives gave them up, and its cancels may have got lost with the stream.
    """
    state.goes_on(WATCH_PERIOD_S)
    while True:
        await asyncio.sleep(WATCH_PERIOD_S)
        # A paused container or virtual machine stops both processes: the core had no time to turn, either.
        state.goes_on(WATCH_PERIOD_S)
        if state.health_error():
            state.streams.close()
        if state.core_alive and state.silent_s > HANGS_UNTIL_KILLED * state.hang_timeout_s:
            log.error("the engine core has made no turn for %.0f s and is killed", state.silent_s)
            state.core.kill()
        for gateway_id, broken_s in state.streams.broken(ORPHAN_GRACE_S):
            state.core.send(GatewayGone(gateway_id, broken_s))
