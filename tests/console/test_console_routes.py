"""The console's files and its state, without a browser."""

import asyncio
import json
import logging
import re
import socket
import subprocess
import sys
from importlib import resources
from types import SimpleNamespace
from typing import Any

import pytest

from contracts.errors import Unavailable
from contracts.ids import WorkerId
from contracts.node import NodeInfo
from coordinator.store.store import WorkerView
from gateway.console.routes import FILES, Looks, RequestLog
from testing.memory_store import MemoryStore
from tests.nodes import node_info

FOLDER = resources.files("gateway.console")
SOURCES = {name: FOLDER.joinpath(name).read_text() for name, _ in FILES.values()}
DISPATCH: Any = SimpleNamespace(num_inflight=0, workers=SimpleNamespace(nodes=[]))


def looks(store: Any) -> Looks:
    return Looks(DISPATCH, store, RequestLog())


def test_every_file_is_served():
    served = {name for name, _ in FILES.values()}
    assert served == {
        file.name for file in FOLDER.iterdir() if file.name.rpartition(".")[2] in ("html", "css", "js", "svg")
    }


@pytest.mark.parametrize("name", [name for name in SOURCES if name.endswith((".html", ".js"))])
def test_text_never_becomes_markup_and_nothing_comes_from_elsewhere(name: str):
    source = SOURCES[name]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", source)
    assert not re.search(r"<[^>]+\son\w+=|<[^>]+\sstyle=|javascript:", source)
    assert set(re.findall(r"https?://[^\s\"']+", source)) <= {"http://www.w3.org/2000/svg"}


def test_every_reference_of_the_page_is_served():
    found = set(re.findall(r'(?:src|href)="(/[^"]+)"', SOURCES["index.html"]))
    found |= {f"/console/{name}" for text in SOURCES.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert found <= set(FILES)


async def test_a_store_that_does_not_answer_is_told():
    class Gone(MemoryStore):
        async def workers(self) -> list[WorkerView]:
            raise Unavailable("Redis does not answer")

    state = json.loads(await looks(Gone()).latest())
    assert state["trouble"] == "Redis does not answer" and state["workers"] == []


async def test_a_worker_that_does_not_answer_is_shown_by_what_the_registry_knows():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store = MemoryStore()
    await store.join(_info(f"http://127.0.0.1:{port}"))
    [row] = json.loads(await looks(store).latest())["workers"]
    assert row["status"].startswith("it does not answer") and row["alive"] and row["core"] is None
    assert row["load"]["num_running"] == 0 and row["connected"] is False


async def test_pages_that_ask_at_once_share_one_look():
    class Counted(MemoryStore):
        asked = 0

        async def workers(self) -> list[WorkerView]:
            self.asked += 1
            return await super().workers()

    store = Counted()
    shared = looks(store)
    answers = await asyncio.gather(*(shared.latest() for _ in range(20)))
    assert store.asked == 1 and len(set(answers)) == 1


def test_accounts_keep_the_last_placed_requests_only():
    accounts = RequestLog()
    for number in range(40):
        accounts.handle(_record({"id": str(number), "stages_s": {}}))
    accounts.handle(_record({"id": "refused", "status": 400}))
    assert [facts["id"] for facts in accounts.latest] == [str(number) for number in range(39, 15, -1)]


QUIET_GATEWAY = """
import logging
from types import SimpleNamespace
from fastapi import FastAPI
from gateway.console.routes import add_console
from service.run import start_log

start_log("gateway", SimpleNamespace(log_level="warning"))
add_console(FastAPI(), None, None)
requests = logging.getLogger("gateway.requests")
requests.info('{"id": "a", "stages_s": {}}')
logging.getLogger("gateway.main").info("not said")
logging.getLogger("gateway.main").warning("said")
print([facts["id"] for facts in requests.handlers[0].latest])
"""


def test_accounts_are_kept_by_a_gateway_that_logs_warnings_only():
    """In a process of its own: a log is set up once."""
    done = subprocess.run([sys.executable, "-c", QUIET_GATEWAY], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "['a']\n"
    assert done.stderr.endswith("gateway WARNING gateway.main: said\n") and done.stderr.count("\n") == 1


def _record(facts: dict[str, Any]) -> logging.LogRecord:
    return logging.LogRecord("gateway.requests", logging.INFO, "", 0, "%s", (json.dumps(facts),), None)


def _info(url: str) -> NodeInfo:
    return node_info(worker_id=WorkerId("p0"), url=url)
