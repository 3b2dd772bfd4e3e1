"""Services started one by one, as on several machines, with settings that need not fit."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.system.local_system import get_json
from bench.system.services import Services
from tests.e2e.tiny import save_tiny
from tests.waiting import until

pytestmark = pytest.mark.slow

DEADLINE_S = 90.0
PLACES = {"p0": ("prefill", "shm"), "d0": ("decode", "tcp"), "p1": ("prefill", "auto")}
WORKERS = {name: ("--role", role, "--transfer", way, "--dtype", "float32") for name, (role, way) in PLACES.items()}


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    settings = {"TANDEM_MODEL": str(save_tiny(tmp_path)), "TANDEM_NUM_THREADS": "1", "TANDEM_KV_CACHE_MIB": "16"}
    with Services(tmp_path, WORKERS, **settings) as running:
        yield running


async def started(services: Services, name: str) -> str:
    """Its URL."""
    services.start(name)
    await services.ready(name)
    return services.facts(name)["url"]


async def test_workers_whose_transfers_do_not_meet_are_no_pair_and_those_that_do_serve(services: Services) -> None:
    lonely, decode, url = [await started(services, name) for name in ("p0", "d0", "gateway")]

    def ask() -> httpx.Response:
        return httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 3}, timeout=DEADLINE_S)

    until(lambda: "transfer is" in httpx.get(f"{url}/ready").text)
    ready, refused = httpx.get(f"{url}/ready"), ask()
    assert (ready.status_code, refused.status_code) == (503, 503)
    assert "d0: it can't take the KV of p0: transfer is tcp here, shm there: leave --transfer at auto" in ready.text
    assert "no decode worker can take the KV of a prefill worker" in refused.text

    prefill = await started(services, "p1")
    until(lambda: httpx.get(f"{url}/ready").status_code == 200)
    assert [ask().status_code for _ in range(5)] == [200] * 5

    def transports(worker: str) -> set[str]:
        """Return those of its links: for the handoff, and for prefixes that prefill pulls back."""
        return {link["transport"] for link in get_json(f"{worker}/health")["core"]["links"]}

    until(lambda: transports(prefill) == transports(decode) == {"tcp"})  # told a moment later
    assert transports(lonely) == set()
