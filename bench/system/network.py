"""The hosts of a network that can be cut, slow or wrong, in network namespaces of one machine.

    with Network(["p0", "d0"]) as network, network.dropped("p0", "d0"):
        subprocess.run([*network.command("p0"), "curl", f"http://{network.router}:8000"])

The process that enters it is the router: whatever goes from one host to another passes through its own new namespace.
It needs root, and `ip` and `tc` (iproute2), `nft` (nftables) and `nsenter` (util-linux).
"""

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from process.parent_death import die_with_parent

CLONE_NEWNET = 0x40000000
COMMAND_TIMEOUT_S = 10.0
TICK_S, MIN_BURST_NBYTES = 0.005, 4096
"""What a limited link lets through at once: what its rate gives in a tick of the kernel, and a packet at least."""
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "nsenter": "util-linux", "unshare": "util-linux"}
ROUTER = "10.77.255.1"
_OWN = Path("/proc/thread-self/ns/net")
# A packet of KV, not a frame of the control connection; the byte that is changed lies far behind a message's header.
_LARGE, _PLACE_BITS = 9000, 8 * 6000


def missing() -> str:
    """Return why this process can't have such a network, or an empty text."""
    for program, package in PROGRAMS.items():
        if shutil.which(program) is None:
            return f"it needs {program}, of the package {package}"
    tried = subprocess.run(["unshare", "--net", "ip", "link", "add", "type", "veth"], capture_output=True, text=True)
    return f"network namespaces need root: {tried.stderr.strip()}" if tried.returncode else ""


class Network:
    """The hosts, by name. A fault lasts as long as its context manager; several may overlap.

    `rates_mbit`: of hosts whose links are limited, in either direction.
    """

    router = ROUTER

    def __init__(self, hosts: Sequence[str], rates_mbit: Mapping[str, float] | None = None) -> None:
        self._numbers = {host: number for number, host in enumerate(hosts, start=1)}
        self._rates_mbit = rates_mbit or {}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._before = -1
        self._num_chains = 0

    def __enter__(self) -> "Network":
        if reason := missing():
            raise RuntimeError(reason)
        self._before = os.open(_OWN, os.O_RDONLY)
        _enter(lambda libc: libc.unshare(CLONE_NEWNET))
        try:
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "address", "add", f"{self.router}/32", "dev", "lo")
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
            _run("nft", "add", "table", "ip", "faults")
            for host in self._numbers:
                self._holders[host] = _hold_namespace()
                self._attach(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        _enter(lambda libc: libc.setns(self._before, CLONE_NEWNET))
        os.close(self._before)

    @property
    def hosts(self) -> list[str]:
        return list(self._numbers)

    def address(self, host: str) -> str:
        return f"10.77.{self._numbers[host]}.2"

    def command(self, host: str) -> list[str]:
        """Return what to put before a command that is to run on the host."""
        return ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", "--"]

    # Faults.

    @contextmanager
    def dropped(self, sender: str, receiver: str) -> Iterator[None]:
        """Drop without a word what the one sends the other.

        An empty name stands for everybody, the router as well.
        """
        # What the router itself sends passes only the last hook, what it takes only the first.
        hook = "prerouting" if sender else "postrouting"
        with self._rule(hook, *self._between(sender, receiver), "drop"):
            yield

    @contextmanager
    def cut_off(self, host: str) -> Iterator[None]:
        """Drop whatever the host sends and is sent."""
        with self.dropped(host, ""), self.dropped("", host):
            yield

    @contextmanager
    def reset(self, one: str, other: str) -> Iterator[None]:
        """Answer whatever the two send each other with a reset, so that their connections end."""
        reset = ("meta", "l4proto", "tcp", "reject", "with", "tcp", "reset")
        there, back = self._between(one, other), self._between(other, one)
        with self._rule("forward", *there, *reset), self._rule("forward", *back, *reset):
            yield

    @contextmanager
    def damaged(self, sender: str, receiver: str, one_of: int = 20) -> Iterator[None]:
        """Set a byte to 0x55 in one of so many large packets; no checksum of the network notices."""
        what = ("ip", "length", ">", str(_LARGE), "numgen", "random", "mod", str(one_of), "==", "0")
        with self._rule("forward", *self._between(sender, receiver), *what, f"@ih,{_PLACE_BITS},8", "set", "0x55"):
            yield

    @contextmanager
    def slow(self, host: str, rate_mbit: float) -> Iterator[None]:
        """Let the host's link take so little that packets wait for seconds."""
        self._limit(host, rate_mbit)
        try:
            yield
        finally:
            self._limit(host, self._rates_mbit.get(host, 0.0))

    @contextmanager
    def down(self, host: str) -> Iterator[None]:
        """Take the host's link down, as a switch does whose port fails."""
        _run("ip", "link", "set", self._link(host), "down")
        try:
            yield
        finally:
            _run("ip", "link", "set", self._link(host), "up")

    @contextmanager
    def unplugged(self, host: str) -> Iterator[None]:
        """Take the host's interface away; another one with its address comes back."""
        _run("ip", "link", "delete", self._link(host))
        try:
            yield
        finally:
            self._attach(host)

    # What they are made of.

    def _between(self, sender: str, receiver: str) -> list[str]:
        source = ["ip", "saddr", self.address(sender)] if sender else []
        return source + (["ip", "daddr", self.address(receiver)] if receiver else [])

    @contextmanager
    def _rule(self, hook: str, *words: str) -> Iterator[None]:
        """Have a rule of nftables, in a chain of its own."""
        self._num_chains += 1
        chain = "ip", "faults", f"c{self._num_chains}"
        _run("nft", "add", "chain", *chain, "{", "type", "filter", "hook", hook, "priority", "0", ";", "}")
        try:
            _run("nft", "add", "rule", *chain, *words)
            yield
        finally:
            _run("nft", "delete", "chain", *chain)

    def _link(self, host: str) -> str:
        return f"host{self._numbers[host]}"

    def _attach(self, host: str) -> None:
        """Give the host an interface with its address, and a way to all others."""
        link, net, inside = self._link(host), f"10.77.{self._numbers[host]}", self.command(host)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(self._holders[host].pid))
        _run("ip", "address", "add", f"{net}.1/24", "dev", link)
        _run("ip", "link", "set", link, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{net}.2/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "replace", "default", "via", f"{net}.1"),
        ):
            _run(*inside, "ip", *words)
        self._limit(host, self._rates_mbit.get(host, 0.0))

    def _limit(self, host: str, rate_mbit: float) -> None:
        """Limit the link in either direction; 0 for no limit."""
        for where, device in ([], self._link(host)), (self.command(host), "eth0"):
            if rate_mbit:
                burst = max(MIN_BURST_NBYTES, int(rate_mbit * 1e6 / 8 * TICK_S))
                limit = ("tbf", "rate", f"{rate_mbit}mbit", "burst", str(burst), "latency", "2s")
                _run(*where, "tc", "qdisc", "replace", "dev", device, "root", *limit)
            else:
                _run(*where, "tc", "qdisc", "delete", "dev", device, "root", may_fail=True)


def _enter(call: Callable[[ctypes.CDLL], int]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if call(libc):
        raise OSError(ctypes.get_errno(), f"a network namespace can't be entered: {os.strerror(ctypes.get_errno())}")


def _hold_namespace() -> "subprocess.Popen[bytes]":
    """Start a process that does nothing in a network namespace of its own."""
    holder = subprocess.Popen(die_with_parent(["unshare", "--net", "sleep", "infinity"]), stdin=subprocess.DEVNULL)
    deadline_s = time.monotonic() + COMMAND_TIMEOUT_S
    own = os.readlink(_OWN)
    while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
        if time.monotonic() > deadline_s or holder.poll() is not None:
            raise RuntimeError("no network namespace came to be")
        time.sleep(0.01)
    return holder


def _run(*command: str, may_fail: bool = False) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    if done.returncode and not may_fail:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
