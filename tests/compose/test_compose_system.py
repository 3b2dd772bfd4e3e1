"""The composed system, as `docker compose up` brings it up. In order: the last test takes it down."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.compose.composed import Composed, docker
from tests.waiting import until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(2000)]

SERVICES = {"redis", "coordinator", "gateway", "prefill", "decode"}
KILL_FRONT = """
import os, pathlib, signal
for children in pathlib.Path("/proc/1/task").glob("*/children"):
    for pid in children.read_text().split():
        os.kill(int(pid), signal.SIGKILL)
"""
"""Kills what the container's first process started."""
BACK_S = 120.0


@pytest.fixture(scope="module")
def system() -> Iterator[Composed]:
    composed = Composed(os.environ.get("COMPOSE_TEST_PROJECT") or f"tandem-test-{os.getpid()}")
    try:
        composed.build()
        composed.up()
        yield composed
    finally:
        composed.down()


def test_every_service_is_healthy(system: Composed) -> None:
    health = {
        container["Config"]["Labels"]["com.docker.compose.service"]: container["State"]["Health"]["Status"]
        for container in system.containers()
    }
    assert health == dict.fromkeys(SERVICES, "healthy")


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_a_container_can_do_no_more_than_it_must(system: Composed, service: str) -> None:
    (container,) = system.containers(service)
    host = container["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["Memory"] > 0
    assert docker("exec", container["Id"], "id", "-u").strip() != "0"


@pytest.mark.parametrize("service", sorted(SERVICES - {"gateway"}))
def test_only_the_gateway_can_be_reached_from_outside(system: Composed, service: str) -> None:
    (container,) = system.containers(service)
    assert not any(container["NetworkSettings"]["Ports"].values())
    networks = container["NetworkSettings"]["Networks"]
    assert [docker("network", "inspect", "--format={{.Internal}}", name).strip() for name in networks] == ["true"]


def test_the_same_question_has_the_same_answer(system: Composed) -> None:
    first = system.ask("What is the capital of France?")
    assert first.strip()
    assert [system.ask("What is the capital of France?") for _ in range(3)] == [first] * 3


def test_kv_crosses_containers_by_ucx(system: Composed) -> None:
    """The workers' own counters say that bytes went over a link whose transport is ucx, and over no other."""
    (prefill,), (decode,) = system.containers("prefill"), system.containers("decode")
    before = system.metrics(decode)
    system.ask("Tell me in one sentence how a sail moves a boat against the wind, and why it does not simply drift.")
    sent, landed = system.metrics(prefill), system.metrics(decode)
    assert sent[("tandem_link_nbytes_total", "ucx")] > 0
    assert landed[("tandem_link_nbytes_total", "ucx")] > before.get(("tandem_link_nbytes_total", "ucx"), 0)
    transports = {transport for name, transport in sent | landed if name == "tandem_link_nbytes_total"}
    assert transports == {"ucx"}


def test_a_worker_that_dies_comes_back(system: Composed) -> None:
    answer = system.ask("What is the capital of Italy?")
    (before,) = system.containers("decode")
    # Detached: the container may be down, and all that runs in it killed, before the command could report its end.
    docker("exec", "--detach", before["Id"], "python", "-c", KILL_FRONT)
    logs = ("logs", "--tail=30", "decode")
    until(lambda: is_back(*system.containers("decode")), BACK_S, lambda: system.compose(*logs), period_s=0.5)
    assert system.ask("What is the capital of Italy?") == answer


def test_a_second_decode_worker_takes_its_share(system: Composed) -> None:
    system.up("--scale=decode=2", "--no-recreate")
    workers = system.containers("decode")
    assert len(workers) == 2
    before = [landings(system, worker) for worker in workers]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(system.ask, [f"Write a sentence about the number {number}." for number in range(16)]))
    assert all(answers)
    grown = [landings(system, worker) - old for worker, old in zip(workers, before, strict=True)]
    assert sum(grown) == 16
    assert min(grown) >= 2, f"one worker took nearly all: {grown}"


def test_down_leaves_nothing(system: Composed) -> None:
    others = docker("ps", "--all", "--quiet").split()
    ours = system.left()
    assert len(ours["container"]) == len(SERVICES) + 1
    system.down()
    assert system.left() == {"container": [], "network": [], "volume": []}
    assert set(docker("ps", "--all", "--quiet").split()) == set(others) - set(ours["container"])


def is_back(container: dict) -> bool:
    return container["RestartCount"] > 0 and container["State"]["Health"]["Status"] == "healthy"


def landings(system: Composed, worker: dict) -> float:
    return system.metrics(worker)[("tandem_worker_kv_handoffs_received_committed_total", "")]
