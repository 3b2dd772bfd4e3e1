"""The sums of what workers and gateways count, over all processes that ever had those roles."""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping

import aiohttp

from bench.system.services import Services

PERIOD_S = 1.0
TIMEOUT_S = 2.0
_GATEWAY = re.compile(r"^tandem_gateway_(migrations|replays|losses)_total(?:\{(.*)\})? (\S+)$", re.M)


class CounterSums:
    """The counters of a system whose services are killed and started again.

    Each process is asked each PERIOD_S; what it counted after that and before it was killed is missing in the sums.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._last: dict[tuple[str, int], Mapping[str, float]] = {}

    async def follow(self, http: aiohttp.ClientSession) -> None:
        """Ask until cancelled."""
        while True:
            await self.look(http)
            await asyncio.sleep(PERIOD_S)

    async def look(self, http: aiohttp.ClientSession) -> None:
        """Ask all processes that answer."""
        await asyncio.gather(*(self._look_at(http, name) for name in [*self._services.workers, "gateway"]))

    def sums(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for counters in self._last.values():
            total.update({name: int(value) for name, value in counters.items() if value})
        return total

    async def _look_at(self, http: aiohttp.ClientSession, name: str) -> None:
        try:
            facts = self._services.facts(name)
            where = f"{facts['url']}/metrics" if name == "gateway" else f"{facts['url']}/health"
            async with http.get(where, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as response:
                counters = of_gateway(await response.text()) if name == "gateway" else of_worker(await response.json())
        except (OSError, TimeoutError, aiohttp.ClientError, ValueError, KeyError):
            return  # it is not there, or cut off
        self._last[name, facts.get("core_pid", facts["pid"])] = counters


def of_gateway(metrics: str) -> dict[str, float]:
    """Return some counters from a gateway's metrics, such as gateway_migrations_committed."""
    counts: Counter[str] = Counter()
    for name, labels, value in _GATEWAY.findall(metrics):
        outcome = re.search(r'outcome="(\w+)"', labels)
        counts[f"gateway_{name}_{outcome[1]}" if outcome else f"gateway_{name}"] += int(float(value))
    return dict(counts)


def of_worker(health: Mapping) -> dict[str, float]:
    """Return the counters from a worker's health, and how many bytes its links compressed."""
    core = health["core"]
    levels = [level for link in core["links"] for name, level in link["levels"].items() if name != "raw"]
    return core["counters"] | {"codec_nbytes": sum(level["nbytes"] for level in levels)}
