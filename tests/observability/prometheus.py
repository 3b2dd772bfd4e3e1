"""A real Prometheus with our configuration, and requests for it to count. Not a test."""

import asyncio
import json
import math
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import aiohttp
import yaml

from process.parent_death import die_with_parent
from process.sockets import free_port
from tests.observability.queries import FOLDER, RULES, Query
from tests.waiting import until

DEADLINE_S = 90.0
SCRAPE = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
NUM_CALLERS = 2


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> dict:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, query: Query) -> list[float]:
        """Return the values of the last minute of all series together, without those that are no number."""
        now = time.time()
        expr = query.expr.replace("$__rate_interval", "10s")
        span = {"start": str(now - 60), "end": str(now), "step": "1"}
        series = self.get("/api/v1/query_range", query=expr, **span)["result"]
        found = [float(value) for one in series for _, value in one["values"]]
        return [value for value in found if math.isfinite(value)]

    def is_up(self) -> bool:
        try:
            return bool(self.get("/api/v1/targets", state="active")["activeTargets"])
        except OSError:
            return False


@contextmanager
def prometheus(urls: Mapping[str, Sequence[str]], folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus with our configuration, its targets those of `urls` (by job), read each second."""
    port = free_port()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(_configuration(urls)))
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command = [which("prometheus") or "", *options, f"--web.listen-address=127.0.0.1:{port}"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(die_with_parent(command), stdout=log, stderr=log) as process,
    ):
        try:
            found = Prometheus(f"http://127.0.0.1:{port}")
            until(found.is_up, DEADLINE_S, lambda: (folder / "log").read_text(), period_s=0.5)
            yield found
        finally:
            process.terminate()


def _configuration(urls: Mapping[str, Sequence[str]]) -> dict:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = SCRAPE
    config["rule_files"] = [str(RULES)]
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        targets = [urllib.parse.urlsplit(url).netloc for url in urls.get(job["job_name"], ())]
        job["static_configs"] = [{"targets": targets}]
    return config


@contextmanager
def traffic(url: str, model: str) -> Iterator[None]:
    """Answers, prefix hits and refusals, again and again until the end of the block."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_ask(url, model, stop)))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def _ask(url: str, model: str, stop: threading.Event) -> None:
    async def caller(http: aiohttp.ClientSession, number: int) -> None:
        good = {"model": model, "prompt": [number] * 60, "max_tokens": 6, "ignore_eos": True}
        while not stop.is_set():
            for body, status in ((good, 200), (good | {"model": "nobody"}, 404)):
                async with http.post(f"{url}/v1/completions", json=body) as response:
                    assert response.status == status, await response.text()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as http:
        await asyncio.gather(*(caller(http, number) for number in range(1, NUM_CALLERS + 1)))
