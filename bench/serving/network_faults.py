"""Faults of the network between services: parts of it are cut, reset, slow, or change what they carry."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from bench.serving.service_faults import a_worker
from bench.system.network import Network
from bench.system.services import Services

HOLDS_S = (0.3, 2.0, 5.0, 12.0)
"""Below and above the 3 s after which a silent peer is lost, and the 10 s of a lease."""
RATES_MBIT = (1.0, 10.0)
DAMAGE_HOLDS_S = (0.5, 2.0)


def a_pair(services: Services, rng: random.Random) -> tuple[str, str]:
    """Return two workers that may hand KV over, the one that sends it first."""
    decode = [name for name, flags in services.workers.items() if "decode" in flags]
    return rng.choice([name for name in services.workers if name not in decode]), rng.choice(decode)


def _one_worker(fault: Callable[[Network, str], AbstractContextManager[None]]) -> "NetworkFault":
    async def make(services: Services, rng: random.Random) -> None:
        assert services.network is not None
        with fault(services.network, a_worker(services, rng)):
            await asyncio.sleep(rng.choice(HOLDS_S))

    return make


async def cut_one_way(services: Services, rng: random.Random) -> None:
    """Cut one direction between the workers of a pair, or between a worker and all others."""
    assert services.network is not None
    prefill, decode = a_pair(services, rng)
    worker = a_worker(services, rng)
    ways = [(prefill, decode), (decode, prefill), (worker, ""), ("", worker)]
    with services.network.dropped(*rng.choice(ways)):
        await asyncio.sleep(rng.choice(HOLDS_S))


async def cut_pair(services: Services, rng: random.Random) -> None:
    assert services.network is not None
    one, other = a_pair(services, rng)
    with services.network.dropped(one, other), services.network.dropped(other, one):
        await asyncio.sleep(rng.choice(HOLDS_S))


async def reset_pair(services: Services, rng: random.Random) -> None:
    assert services.network is not None
    with services.network.reset(*a_pair(services, rng)):
        await asyncio.sleep(rng.choice(HOLDS_S[:2]))


async def slow_worker(services: Services, rng: random.Random) -> None:
    assert services.network is not None
    with services.network.slow(a_worker(services, rng), rng.choice(RATES_MBIT)):
        await asyncio.sleep(rng.choice(HOLDS_S))


async def damage_wire(services: Services, rng: random.Random) -> None:
    """Change bytes of KV on its way, from prefill to decode or between workers of one side."""
    assert services.network is not None
    sender, receiver = rng.choice([a_pair(services, rng), tuple(rng.sample(list(services.workers), 2))])
    with services.network.damaged(sender, receiver):
        await asyncio.sleep(rng.choice(DAMAGE_HOLDS_S))


NetworkFault = Callable[[Services, random.Random], Awaitable[None]]
"""Makes a fault and waits for its end; the services have a network."""
NETWORK_FAULTS: dict[str, NetworkFault] = {
    "worker cut off": _one_worker(lambda network, worker: network.cut_off(worker)),
    "worker's link down": _one_worker(lambda network, worker: network.down(worker)),
    "worker's interface replaced": _one_worker(lambda network, worker: network.unplugged(worker)),
    "one direction cut": cut_one_way,
    "pair cut": cut_pair,
    "pair's connections reset": reset_pair,
    "worker's network slow": slow_worker,
    "KV changed on the wire": damage_wire,
}
