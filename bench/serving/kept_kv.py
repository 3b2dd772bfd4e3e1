"""The places where a system under test keeps KV, and its network, all of which can fail.

What this machine has no right or no program for is left out, with a word about it.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.system import faulty_disk, network
from bench.system.faulty_disk import FaultyDisk
from bench.system.network import Network
from bench.system.services import Services
from coordinator.store.local_server import RedisServer

HOST_GIB = 0.0625
DISK_GIB = 0.25
"""The sizes of a worker's tiers for the default model: small enough that blocks are evicted."""
NUM_DISKS = 5
"""One for each worker, and room for a folder that was taken away while its worker made another."""
STORE_HOST = "store"
"""The host of the network that the store runs on."""


@dataclass(frozen=True)
class KVPlaces:
    """The folders of all workers, and a store of several, a Redis of its own.

    `disk`: the files, as they lie there; `faulty`: the disk as the workers see it, if it can fail. `scale`: what the
    sizes for the default model are multiplied by.
    """

    disk: Path
    faulty: FaultyDisk | None
    store: RedisServer
    scale: float = 1.0

    @property
    def host_nbytes(self) -> int:
        """Return the size of a worker's tier in memory."""
        return int(HOST_GIB * self.scale * 2**30)

    def settings(self) -> dict[str, str]:
        """Return the settings of workers that keep KV in all tiers."""
        return {
            "TANDEM_KV_HOST_GIB": str(HOST_GIB * self.scale),
            "TANDEM_KV_DISK": str(self.faulty.mount if self.faulty else self.disk),
            "TANDEM_KV_DISK_GIB": str(DISK_GIB * self.scale),
            "TANDEM_KV_STORE": self.store.url,
        }


@dataclass(frozen=True)
class KeptKV:
    """A system, and the places where it keeps KV."""

    services: Services
    places: KVPlaces


@contextmanager
def kv_places(folder: Path, joined: Network | None, scale: float = 1.0) -> Iterator[KVPlaces]:
    """Make the places; the store runs on the host STORE_HOST if there is a network. `scale`: see KVPlaces."""
    with ExitStack() as stack:
        disk, faulty = folder / "kv", None
        stack.enter_context(limited_disk(disk, int(NUM_DISKS * DISK_GIB * scale * 1024)))
        if reason := faulty_disk.missing():
            print(f"the disk will not be slow or broken: {reason}", file=sys.stderr)
        else:
            faulty = stack.enter_context(FaultyDisk(disk, folder / "kv-as-seen"))
        host, launcher = (joined.address(STORE_HOST), joined.command(STORE_HOST)) if joined else ("127.0.0.1", [])
        yield KVPlaces(disk, faulty, stack.enter_context(RedisServer(host=host, launcher=launcher)), scale)


@contextmanager
def optional_network(hosts: Sequence[str], rates_mbit: Mapping[str, float] | None = None) -> Iterator[Network | None]:
    """Enter a network of the hosts, or yield None where there can be none."""
    if reason := network.missing():
        print(f"the network will not fail: {reason}", file=sys.stderr)
        yield None
        return
    with Network(hosts, rates_mbit) as joined:
        yield joined


@contextmanager
def limited_disk(folder: Path, size_mib: int) -> Iterator[None]:
    """Give the folder a file system of its own, which can be full.

    Without the right to mount it stays as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tandem-kv", str(folder)]
    is_mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    if not is_mounted:
        print("no right to mount a disk: it will not be full", file=sys.stderr)
    try:
        yield
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
