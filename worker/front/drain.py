"""The drain of a worker that is asked to stop: no new work; running requests go on, within a limit."""

import asyncio
import logging

from worker.front.membership import Membership
from worker.front.worker_state import WorkerState

log = logging.getLogger(__name__)

POLL_S = 0.02


async def drain(state: WorkerState, membership: Membership, timeout_s: float) -> None:
    """Drain, and return when nothing runs, the core is dead or hangs, or `timeout_s` is over."""
    state.draining = True
    log.info("draining: no new work; another signal ends what runs at once")
    try:
        async with asyncio.timeout(timeout_s):
            await membership.beat_once()
            await _next_status(state)
            await _next_status(state)  # the core made this one after it had read everything sent before
            while state.num_requests and not state.health_error():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        log.warning("%d requests were still running after %.0f s", state.num_requests, timeout_s)


async def _next_status(state: WorkerState) -> None:
    before = state.num_turns
    while state.num_turns == before and not state.health_error():
        await asyncio.sleep(POLL_S)
