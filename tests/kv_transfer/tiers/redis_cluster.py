"""A cluster of three real redis-server processes. Not a test."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from process.sockets import free_port
from tests.waiting import until

NUM_SLOTS = 16384


class RedisNode:
    """One server, which a test may stop and start."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.client = redis.Redis(port=self.port)
        self._argv = [
            *(shutil.which("redis-server") or "", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
            *("--dir", str(folder), "--appendonly", "no", *options),
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL)
        until(self._answers)

    def stop(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False


@contextmanager
def redis_node(folder: Path, *options: str) -> Iterator[RedisNode]:
    """Start a server of its own."""
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server")
    node = RedisNode(folder, *options)
    try:
        yield node
    finally:
        node.stop()


@contextmanager
def redis_cluster(folder: Path) -> Iterator[list[RedisNode]]:
    """Start three nodes, which share the slots."""
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server")
    nodes: list[RedisNode] = []
    try:
        for index in range(3):
            home = folder / f"node{index}"
            home.mkdir()
            nodes.append(RedisNode(home, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000"))
        for index, node in enumerate(nodes):
            first, last = index * NUM_SLOTS // 3, (index + 1) * NUM_SLOTS // 3 - 1
            node.client.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
            for other in nodes[:index]:
                node.client.execute_command("CLUSTER MEET", "127.0.0.1", other.port)
        until(lambda: all(_is_whole(node) for node in nodes))
        yield nodes
    finally:
        for node in nodes:
            node.stop()


def _is_whole(node: RedisNode) -> bool:
    info = node.client.execute_command("CLUSTER INFO")
    text = str(info)
    return "'cluster_state': 'ok'" in text and "'cluster_known_nodes': '3'" in text
