"""What the documentation says of a running system, on one: its commands do as they stand, its dashboard is answered.

A command that can't be run here is looked up instead.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import pytest

from bench.system.local_system import System, running
from contracts.errors import ConfigError
from tests.docs.fences import GATEWAY, ROOT, Fence, all_fences, programs, shell
from tests.docs.lookup import look_up, statements
from tests.environment import plain_environment
from tests.observability.prometheus import Prometheus, prometheus, traffic
from tests.observability.queries import dashboard, rules
from tests.waiting import until

DEADLINE_S = 90.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first test waits for the system too


@dataclass(frozen=True)
class Desk:
    """A terminal beside a running system, of which the commands find no other."""

    system: System
    home: Path

    def run(self, *command: str) -> str:
        """What it printed. Raises AssertionError with all that it said if it fails."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = plain_environment() | {"PATH": path, "XDG_STATE_HOME": str(self.home)}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done.stdout

    def here(self, text: str) -> str:
        return text.replace(GATEWAY, f"127.0.0.1:{self.system.port}")

    def urls(self) -> dict[str, list[str]]:
        """Role -> where its processes serve."""
        found: dict[str, list[str]] = {}
        for line in self.run("tandem", "ps").splitlines()[1:]:
            _, role, _, _, _, url, *_ = line.split()
            found.setdefault(role, []).append(url)
        return found


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with (
        tempfile.TemporaryDirectory(prefix="tandem-docs-") as home,
        running(XDG_STATE_HOME=home, TANDEM_NUM_THREADS="1", TANDEM_KV_CACHE_MIB="512") as system,
    ):
        yield Desk(system, Path(home))


@pytest.fixture(scope="module")
def watcher(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if which("prometheus") is None:
        pytest.skip("no prometheus here: apt-get install prometheus")
    with prometheus(desk.urls(), tmp_path_factory.mktemp("prometheus")) as found:
        yield found


def test_there_are_commands_of_both_kinds() -> None:
    pages = {fence.where.partition(":")[0] for fence in all_fences()}
    assert {"README.md", "getting-started.md", "operations.md", "troubleshooting.md"} <= pages
    assert len(shell(checked=False)) >= 10 and len(shell(checked=True)) >= 10


@pytest.mark.parametrize("fence", shell(checked=False), ids=lambda fence: fence.where)
def test_a_command_does_as_it_stands(desk: Desk, fence: Fence) -> None:
    assert desk.run("bash", "-euo", "pipefail", "-c", desk.here(fence.text)).strip()


@pytest.mark.parametrize("fence", programs(), ids=lambda fence: fence.where)
def test_a_program_does_as_it_stands(desk: Desk, fence: Fence) -> None:
    assert desk.run(sys.executable, "-c", desk.here(fence.text)).strip()


def test_every_query_of_the_dashboard_is_answered(watcher: Prometheus, desk: Desk) -> None:
    def unanswered() -> list[str]:
        return [query.where for query in dashboard() if not watcher.values(query)]

    with traffic(desk.system.url, desk.system.model()):
        until(lambda: not unanswered(), DEADLINE_S, lambda: f"no data: {unanswered()}", period_s=0.5)


def test_every_service_is_read_and_no_rule_is_broken(watcher: Prometheus) -> None:
    targets = watcher.get("/api/v1/targets", state="active")["activeTargets"]
    assert {target["labels"]["job"] for target in targets} == {"gateway", "coordinator", "prefill", "decode"}
    found = [rule for group in watcher.get("/api/v1/rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in found} == {rule["alert"] for rule in rules()}
    assert [rule for rule in found if rule["health"] != "ok"] == []


@pytest.mark.parametrize("fence", shell(checked=True), ids=lambda fence: fence.where)
def test_what_a_command_names_exists(fence: Fence) -> None:
    for words in statements(fence.text):
        look_up(words)


@pytest.mark.parametrize(
    "command",
    [
        "make fly",
        "make run MODLE=x",
        "docker compose --profile telescope up",
        "docker compose -f compose.tpu.yaml up",
        "docker compose logs telescope",
        "docker compose up --fast",
        "TANDEM_MODLE=x make run",
        "export TANDEM_MODLE=x",
        "tandem fly",
        "tandem up --prefil 2",
        "tandem worker --role cook",
        "python -m gatewya",
        "python3 tools/nothing.py",
        "curl http://prefill:9000/dry",
        "fly away",
    ],
)
def test_what_does_not_exist_is_noticed(command: str) -> None:
    with pytest.raises((AssertionError, SystemExit, ConfigError)):
        look_up(next(statements(command)))
