"""What a system still holds of requests that have ended: nothing, if it is right."""

import asyncio

from bench.system.local_system import get_json
from bench.system.services import Services
from coordinator.store.redis_store import RedisStore


async def still_held(services: Services) -> list[str]:
    """Return in words what is left.

    That is what workers hold, credits that were not returned, and requests that are still in Redis.
    """
    left: list[str] = []
    for name in services.workers:
        left += await asyncio.to_thread(_held_by, services, name)
    store = RedisStore(services.redis.url, "default")
    try:
        for worker in await store.workers():
            credits = worker.pending_tokens, worker.num_prefills, worker.reserved_tokens, worker.num_decodes
            left += [f"{worker.node.info.worker_id}'s credits {credits}"] if any(credits) else []
        left += [f"{count} requests {state}" for state, count in (await store.counts()).states.items()]
    finally:
        await store.close()
    return left


def _held_by(services: Services, name: str) -> list[str]:
    try:
        core = get_json(f"{services.facts(name)['url']}/health")["core"]
    except OSError as error:  # the worker is ending, or reports that it is unhealthy
        return [f"{name}: {error}"]
    return [] if core["is_clean"] else [f"{name} holds {core['gauges']}"]
