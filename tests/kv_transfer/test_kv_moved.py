"""A network interface that is taken away from one of two hosts and comes back: UCX there is of no more use."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.waiting import until

pytestmark = pytest.mark.slow

HUB, HOSTS = "tandem-hub", {"prefill": ("tandem-a", "10.99.7.1"), "decode": ("tandem-b", "10.99.7.2")}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def attach(role: str) -> None:
    """Give this host its only interface beside the loopback one."""
    namespace, address = HOSTS[role]
    ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", role, "netns", HUB)
    ip("-n", HUB, "link", "set", role, "master", "bridge", "up")
    ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    ip("-n", namespace, "link", "set", "eth0", "up")


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two network namespaces on one bridge; skipped where only root may make them, and this is not root."""
    names = [HUB, *(namespace for namespace, _ in HOSTS.values())]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", HUB, "link", "add", "bridge", "type", "bridge")
        ip("-n", HUB, "link", "set", "bridge", "up")
        for role in HOSTS:
            attach(role)
        yield
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        for name in names:
            with suppress(FileNotFoundError, subprocess.CalledProcessError):
                ip("netns", "del", name)


class MovedProcess:
    """One node in the namespace of its host."""

    def __init__(self, role: str, address: str = "") -> None:
        namespace, host = HOSTS[role]
        command = [sys.executable, "-m", "tests.kv_transfer.kv_moved", role, host, *([address] if address else [])]
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self._read()

    def ask(self) -> tuple[str, str]:
        """Return how an offer went, and why the process is to start anew; either may be empty."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        how, _, why = self._read().partition("|")
        return how.strip(), why.strip()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.mark.parametrize("moved", list(HOSTS))
def test_the_process_whose_interface_came_back_says_so_and_a_new_one_works(hosts: None, moved: str) -> None:
    decode = MovedProcess("decode")
    nodes = {"decode": decode, "prefill": MovedProcess("prefill", decode.address)}
    try:
        assert nodes["prefill"].ask() == ("granted", "")
        ip("-n", HOSTS[moved][0], "link", "del", "eth0")
        assert nodes["prefill"].ask()[0].startswith("lost")
        assert [node.ask()[1] for node in nodes.values()] == ["", ""]  # away is not replaced
        attach(moved)
        until(lambda: nodes["prefill"].ask() and nodes[moved].ask()[1])
        assert "eth0" in nodes[moved].ask()[1]
        (other,) = HOSTS.keys() - {moved}
        assert nodes[other].ask()[1] == ""
        nodes.pop(moved).close()
        if moved == "decode":
            nodes.pop("prefill").close()  # it knows the former address only
            nodes["decode"] = MovedProcess("decode")
        nodes["prefill"] = MovedProcess("prefill", nodes["decode"].address)
        until(lambda: nodes["prefill"].ask() == ("granted", ""))
    finally:
        for node in nodes.values():
            node.close()
