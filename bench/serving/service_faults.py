"""Faults of services that run: they are killed, frozen, drained and restarted."""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable

from bench.system.local_system import get_json
from bench.system.services import Services

FREEZES_S = (0.3, 2.0, 5.0, 12.0)
"""Below and above the 3 s after which a silent peer is lost, and the 10 s of a lease."""
REDIS_FREEZES_S = (0.5, 2.0, 6.0)
ANSWERS_TIMEOUT_S = 5.0


async def revive(services: Services) -> None:
    for name in services.names:
        if not services.is_alive(name):
            services.start(name)
            await services.ready(name)


def a_worker(services: Services, rng: random.Random) -> str:
    return rng.choice([name for name in services.workers if services.is_alive(name)] or list(services.workers))


async def freeze(services: Services, name: str, seconds: float, to_core: bool = False) -> None:
    services.signal(name, signal.SIGSTOP, to_core)
    await asyncio.sleep(seconds)
    services.signal(name, signal.SIGCONT, to_core)


async def kill_front(services: Services, rng: random.Random) -> None:
    services.signal(a_worker(services, rng), signal.SIGKILL)


async def kill_core(services: Services, rng: random.Random) -> None:
    services.signal(a_worker(services, rng), signal.SIGKILL, to_core=True)


async def freeze_front(services: Services, rng: random.Random) -> None:
    await freeze(services, a_worker(services, rng), rng.choice(FREEZES_S))


async def freeze_core(services: Services, rng: random.Random) -> None:
    await freeze(services, a_worker(services, rng), rng.choice(FREEZES_S), to_core=True)


async def drain_worker(services: Services, rng: random.Random) -> None:
    services.signal(a_worker(services, rng), signal.SIGTERM)


async def drain_with_answers(services: Services, rng: random.Random) -> None:
    """Drain a decode worker while it produces answers, which move; the one with the most, if any has some."""
    running: dict[str, float] = {}
    until = asyncio.get_running_loop().time() + ANSWERS_TIMEOUT_S
    while not any(running.values()) and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.1)
        running = {name: await asyncio.to_thread(_num_running, services, name) for name in services.workers}
    services.signal(max(running, key=running.__getitem__), signal.SIGTERM)


def _num_running(services: Services, name: str) -> float:
    """Return how many answers a worker decodes; 0 for one that decodes none, or does not answer."""
    if not services.is_alive(name) or "prefill" in services.workers[name]:
        return 0.0
    try:
        return get_json(f"{services.facts(name)['url']}/health")["core"]["gauges"]["running"]
    except (OSError, KeyError, ValueError):
        return 0.0


async def restart_gateway(services: Services, rng: random.Random) -> None:
    await restart(services, "gateway", signal.SIGTERM)


async def kill_gateway(services: Services, rng: random.Random) -> None:
    await restart(services, "gateway", signal.SIGKILL)


async def freeze_gateway(services: Services, rng: random.Random) -> None:
    await freeze(services, "gateway", rng.choice(FREEZES_S))


async def kill_coordinator(services: Services, rng: random.Random) -> None:
    await restart(services, "coordinator", signal.SIGKILL)


async def restart(services: Services, name: str, number: signal.Signals) -> None:
    services.signal(name, number)
    await services.ended(name)
    services.start(name)
    await services.ready(name)


async def freeze_redis(services: Services, rng: random.Random) -> None:
    pid = services.redis.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(rng.choice(REDIS_FREEZES_S))
    os.kill(pid, signal.SIGCONT)


async def empty_redis(services: Services, rng: random.Random) -> None:
    await asyncio.to_thread(services.redis.stop)
    services.redis.start()


SERVICE_FAULTS: dict[str, Callable[[Services, random.Random], Awaitable[None]]] = {
    "worker killed": kill_front,
    "engine core killed": kill_core,
    "worker frozen": freeze_front,
    "engine core frozen": freeze_core,
    "worker drained": drain_worker,
    "gateway restarted": restart_gateway,
    "gateway killed": kill_gateway,
    "gateway frozen": freeze_gateway,
    "coordinator killed": kill_coordinator,
    "Redis frozen": freeze_redis,
    "Redis restarted empty": empty_redis,
}
DRAINS: dict[str, Callable[[Services, random.Random], Awaitable[None]]] = {
    "decode worker drained with answers": drain_with_answers,
}
"""Apart, for who wants many of them."""
