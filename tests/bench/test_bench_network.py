"""The network that can be cut: each fault does what it says between the hosts that it names, and to no other."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from bench.system import network
from bench.system.network import Network

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(network.missing()), reason=network.missing() or "-"),
]

NUM_BYTES = 4 << 20
PORT = 5000
SERVER = f"""
import socket
server = socket.create_server(("0.0.0.0", {PORT}))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    data = b""
    while len(data) < {NUM_BYTES} and (part := connection.recv(1 << 20)):
        data += part
    connection.sendall(str(len(data) - data.count(0)).encode())
    connection.close()
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[4])) as connection:
    connection.sendall(bytes(int(sys.argv[3])))
    print(connection.recv(20).decode() or "closed")
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    own = os.readlink("/proc/self/ns/net")
    with Network(["one", "two", "server"]) as joined:
        command = [*joined.command("server"), sys.executable, "-c", SERVER]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            yield joined
            server.kill()
    assert os.readlink("/proc/self/ns/net") == own


def said(hosts: Network, host: str, timeout_s: float = 30.0) -> str:
    """Send zeros to the server; return how many arrived as something else, or how it went wrong."""
    arguments = [hosts.address("server"), str(PORT), str(NUM_BYTES), str(timeout_s)]
    command = [*(hosts.command(host) if host else []), sys.executable, "-c", CLIENT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1].partition(":")[0]


CUTS: dict[str, Callable[[Network], AbstractContextManager[None]]] = {
    "to it": lambda hosts: hosts.dropped("one", "server"),
    "from it": lambda hosts: hosts.dropped("server", "one"),
    "to all": lambda hosts: hosts.dropped("one", ""),
    "from all": lambda hosts: hosts.dropped("", "one"),
    "cut off": lambda hosts: hosts.cut_off("one"),
    "down": lambda hosts: hosts.down("one"),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_is_between_whom_it_says(hosts: Network, name: str) -> None:
    with CUTS[name](hosts):
        assert said(hosts, "one", timeout_s=1.0) == "TimeoutError"
        assert said(hosts, "two") == said(hosts, "") == "0"
    assert said(hosts, "one") == "0"


def test_the_router_is_cut_off_from_a_host_as_well(hosts: Network) -> None:
    with hosts.cut_off("server"):
        assert said(hosts, "", timeout_s=1.0) == said(hosts, "two", timeout_s=1.0) == "TimeoutError"
    assert said(hosts, "") == "0"


def test_connections_are_reset(hosts: Network) -> None:
    with hosts.reset("one", "server"):
        assert said(hosts, "one") == "ConnectionRefusedError"
        assert said(hosts, "two") == "0"
    assert said(hosts, "one") == "0"


def test_an_interface_comes_back_as_another(hosts: Network) -> None:
    def index() -> str:
        show = ["cat", "/sys/class/net/eth0/ifindex"]
        inside = [*hosts.command("one"), "unshare", "--mount", "sh", "-c", f"mount -t sysfs s /sys && {' '.join(show)}"]
        return subprocess.run(inside, check=True, capture_output=True, text=True).stdout

    before = index()
    with hosts.unplugged("one"):
        assert said(hosts, "one", timeout_s=1.0) == "OSError"  # unreachable
    assert said(hosts, "one") == "0" and index() != before


def test_bytes_change_on_the_wire_and_tcp_does_not_notice(hosts: Network) -> None:
    with hosts.damaged("one", "server", one_of=2):
        assert int(said(hosts, "one")) > 0
        assert said(hosts, "two") == "0"
    assert said(hosts, "one") == "0"


def test_a_slow_link_is_that_of_one_host(hosts: Network) -> None:
    with hosts.slow("one", 1.0):  # 4 MiB take 34 s
        assert said(hosts, "one", timeout_s=1.0) == "TimeoutError"
        assert said(hosts, "two") == "0"
    assert said(hosts, "one") == "0"


def test_no_process_and_no_interface_is_left() -> None:
    def interfaces() -> str:
        return subprocess.run(["ip", "-o", "link"], check=True, capture_output=True, text=True).stdout

    before = interfaces()
    with Network(["only"]) as joined:
        holder = joined._holders["only"]
        assert interfaces() != before
    assert holder.poll() is not None
    assert interfaces() == before
