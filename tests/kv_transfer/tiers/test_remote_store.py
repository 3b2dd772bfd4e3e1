"""The stores that workers share: real Redis servers, a real cluster of three, and a folder."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import ConfigError, Corrupt
from contracts.kv_store import BlockKey
from kv_transfer.chunks.block_record import VERSION, verify
from kv_transfer.tiers.circuit_breaker import LONGEST_PAUSE_S, MAX_FAILURES, CircuitBreaker
from kv_transfer.tiers.redis_records import RedisRecords
from kv_transfer.tiers.remote_store import RemoteStoreTier, open_remote_store
from process.sockets import free_port
from tests.kv_transfer.tiers.block_samples import LAYOUT, RECORD_NBYTES, buffers, bytes_of, key_of, record_of, worth_of
from tests.kv_transfer.tiers.redis_cluster import redis_cluster, redis_node
from tests.waiting import until

pytestmark = pytest.mark.slow
KV_TIERS_PAGE = Path(__file__).parents[3] / "docs" / "kv-tiers.md"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store(tier: RemoteStoreTier, number: int) -> bool:
    return tier.store(key_of(number), record_of(number), worth_of(number))


def holds(tier: RemoteStoreTier, number: int) -> bool:
    """Read it, and verify it."""
    into = buffers(1)
    sizes = tier.load([key_of(number)], into)
    if sizes:
        assert np.array_equal(verify(into[0][: sizes[0]], key_of(number), LAYOUT).payload, bytes_of(number))
    return bool(sizes)


@pytest.fixture(scope="module", params=["server", "cluster", "folder"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("store")
    if request.param == "server":
        with redis_node(folder) as node:
            yield f"redis://127.0.0.1:{node.port}/0"
    elif request.param == "cluster":
        with redis_cluster(folder) as nodes:
            yield f"redis+cluster://127.0.0.1:{nodes[1].port}"
    else:
        yield f"file://{folder}"


@pytest.fixture
def tier(url: str) -> Iterator[RemoteStoreTier]:
    tier = open_remote_store(url)
    yield tier
    tier.evict([key_of(number) for number in range(30)])
    tier.close()


def test_gives_to_another_worker_what_one_stored(tier: RemoteStoreTier, url: str):
    numbers = [number for number in range(24) if number != 20]
    assert all(store(tier, number) for number in numbers)
    other, keys = open_remote_store(url), [key_of(number) for number in range(24)]
    assert other.lookup(keys) == 20
    into = buffers(24)
    sizes = other.load(keys, into)
    assert len(sizes) == 20
    for number, nbytes in enumerate(sizes):
        assert np.array_equal(verify(into[number][:nbytes], key_of(number), LAYOUT).payload, bytes_of(number))
    other.close()


def test_forgets_what_was_found_faulty(tier: RemoteStoreTier):
    assert store(tier, 1) and store(tier, 2)
    tier.evict([key_of(1), key_of(9)])
    assert not holds(tier, 1) and holds(tier, 2)
    assert tier.lookup([]) == 0


def test_what_somebody_else_left_under_a_key_is_not_believed(tier: RemoteStoreTier):
    foreign = memoryview(bytes(record_of(5)))
    assert tier.store(key_of(6), foreign, worth_of(6))
    into = buffers(1)
    (nbytes,) = tier.load([key_of(6)], into)
    with pytest.raises(Corrupt, match="key is"):
        verify(into[0][:nbytes], key_of(6), LAYOUT)
    assert tier.store(key_of(7), memoryview(bytes(RECORD_NBYTES + 1)), worth_of(7))
    assert tier.load([key_of(7)], into) == []


def test_a_flipped_bit_in_a_server_is_not_believed(tmp_path: Path):
    with redis_node(tmp_path) as node:
        tier = open_remote_store(f"redis://127.0.0.1:{node.port}")
        store(tier, 1)
        (name,) = node.client.keys()
        node.client.setbit(name, 4000, 1 - node.client.getbit(name, 4000))
        into = buffers(1)
        (nbytes,) = tier.load([key_of(1)], into)
        with pytest.raises(Corrupt):
            verify(into[0][:nbytes], key_of(1), LAYOUT)
        tier.close()


def test_a_server_that_dies_is_left_alone_and_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with redis_node(tmp_path) as node:
        clock = Clock()
        tier = RemoteStoreTier(RedisRecords(f"redis://127.0.0.1:{node.port}"), "it", clock)
        assert store(tier, 1)
        node.stop()
        for _ in range(MAX_FAILURES + 4):
            assert not holds(tier, 1)
        assert not tier.is_on
        assert (tier.stats()["refused_unavailable"], tier.stats()["refused_off"]) == (MAX_FAILURES, 4)
        assert sum("is off" in record.message for record in caplog.records) == 1
        node.start()
        clock.now += LONGEST_PAUSE_S
        assert store(tier, 1) and holds(tier, 1) and tier.is_on
        tier.close()


def test_a_server_that_hangs_keeps_nobody_waiting_for_long(tmp_path: Path):
    with redis_node(tmp_path) as node:
        clock = Clock()
        tier = RemoteStoreTier(RedisRecords(f"redis://127.0.0.1:{node.port}"), "it", clock)
        assert store(tier, 1)
        os.kill(node.process.pid, signal.SIGSTOP)
        try:
            for _ in range(MAX_FAILURES + 1):
                assert tier.lookup([key_of(1)]) == 0
            assert not tier.is_on
        finally:
            os.kill(node.process.pid, signal.SIGCONT)
        clock.now += LONGEST_PAUSE_S
        until(lambda: node.client.ping())
        assert holds(tier, 1), "an answer that came late was taken for a later one's"
        tier.close()


def test_a_full_server_is_still_read(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with redis_node(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as node:
        tier = open_remote_store(f"redis://127.0.0.1:{node.port}")
        assert store(tier, 1)
        node.client.config_set("maxmemory", 1)
        assert not store(tier, 2) and not store(tier, 3)
        assert tier.is_on and holds(tier, 1)
        assert tier.stats()["refused_full"] == 2
        assert sum("maxmemory-policy" in record.message for record in caplog.records) == 1
        tier.close()


def test_a_server_that_is_read_only_is_still_read(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with redis_node(tmp_path) as node:
        tier = open_remote_store(f"redis://127.0.0.1:{node.port}")
        assert store(tier, 1)
        node.client.replicaof("127.0.0.1", free_port())
        for number in range(2, 3 + MAX_FAILURES):
            assert not store(tier, number)
        assert tier.is_on and holds(tier, 1)
        assert sum("(kv_store) keeps nothing new" in record.message for record in caplog.records) == 1
        node.client.replicaof("no", "one")
        assert store(tier, 2) and holds(tier, 2)
        tier.close()


def test_a_folder_that_is_read_only_is_told_once(caplog: pytest.LogCaptureFixture):
    tier = open_remote_store("file:///sys")
    for number in range(1 + MAX_FAILURES):
        assert tier.lookup([key_of(number)]) == 0
        assert not store(tier, number)
    assert tier.is_on
    assert sum("(kv_store) keeps nothing new" in record.message for record in caplog.records) == 1
    tier.close()


def test_a_server_that_evicts_gives_shorter_prefixes(tmp_path: Path):
    with redis_node(tmp_path, "--maxmemory-policy", "allkeys-lru") as node:
        tier = open_remote_store(f"redis://127.0.0.1:{node.port}")
        for number in range(4):
            store(tier, number)
        node.client.delete(f"tandem:kv:v{VERSION}:".encode() + key_of(2))
        keys = [key_of(number) for number in range(4)]
        assert tier.lookup(keys) == len(tier.load(keys, buffers(4))) == 2
        tier.close()


def test_a_cluster_goes_on_after_a_node_is_back(tmp_path: Path):
    with redis_cluster(tmp_path) as nodes:
        clock = Clock()
        tier = RemoteStoreTier(RedisRecords(f"redis+cluster://127.0.0.1:{nodes[0].port}"), "it", clock)
        assert all(store(tier, number) for number in range(12))
        assert all(len(node.client.keys()) > 0 for node in nodes)
        nodes[2].stop()
        found = [holds(tier, number) for number in range(12)]
        assert not all(found)
        clock.now += LONGEST_PAUSE_S
        nodes[2].start()

        def works_again() -> bool:
            clock.now += LONGEST_PAUSE_S
            return all(store(tier, number) and holds(tier, number) for number in range(12))

        until(works_again, period_s=1.0)
        tier.close()


def test_a_folder_that_is_not_mounted_is_not_made(tmp_path: Path):
    tier = open_remote_store(f"file://{tmp_path}/absent")
    assert not store(tier, 1) and not holds(tier, 1)
    assert not list(tmp_path.iterdir())
    tier.close()


@pytest.mark.usefixtures("silent_paths")
def test_a_folder_that_can_t_be_looked_at_is_left_alone(caplog: pytest.LogCaptureFixture):
    """A name too long stands for a mount whose server is gone: not only to read it is an error."""
    tier = open_remote_store(f"file:///{256 * 'a'}")
    for _ in range(MAX_FAILURES):
        assert tier.lookup([key_of(1)]) == 0 and not store(tier, 1) and not holds(tier, 1)
    assert not tier.is_on and tier.stats()["refused_unavailable"] == MAX_FAILURES
    assert sum("(kv_store) is off: [Errno 36] File name too long" in record.message for record in caplog.records) == 1
    tier.close()


def test_no_server_is_no_error_and_told_once(caplog: pytest.LogCaptureFixture):
    tier = open_remote_store(f"redis+cluster://127.0.0.1:{free_port()}")
    for _ in range(2):
        assert tier.lookup([BlockKey(b"x")]) == 0
    assert sum("(kv_store) does not answer" in record.message for record in caplog.records) == 1
    tier.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "kv",
        "s4://bucket",
        "file://host/kv",
        "file://kv",
        "http://h",
        "redis://",
        "redis://h:x",
        "redis://h?db=x",
        "redis+cluster://h?size=2",
    ],
)
def test_names_a_url_that_is_none(url: str):
    with pytest.raises(ConfigError, match="kv_store"):
        open_remote_store(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h/abc", "the number of a database"),
        ("redis://h/1/2", "the number of a database"),
        ("redis+cluster://h/1", "a cluster has only database 0"),
        ("redis://h/0?socket_timeout=60", "leave out socket_timeout, which Tandem sets itself"),
        ("redis://h?decode_responses=1", "leave out decode_responses"),
        ("redis+cluster://h?retry=9&encoding=", "leave out encoding, retry, which"),
    ],
)
def test_names_a_part_of_a_url_that_would_be_taken_for_another(url: str, words: str):
    with pytest.raises(ConfigError, match=words):
        open_remote_store(url)


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://h/", "redis://h:1/15?client_name=kv", "rediss://h/0/", "redis+cluster://h/0"]
)
def test_takes_each_way_to_write_a_url(url: str):
    open_remote_store(url).close()


def test_what_a_put_that_was_killed_left_is_cleaned_up_as_documented(tmp_path: Path):
    script = (
        "import os, pathlib, sys; from tests.kv_transfer.tiers.test_remote_store import *;"
        "tier = open_remote_store(f'file://{sys.argv[1]}'); store(tier, 1);"
        "pathlib.Path.replace = lambda *_: os.kill(os.getpid(), 9); store(tier, 2)"
    )
    died = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=60)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert died.returncode == -9 and {path.suffix for path in files} == {".kv", ".part"}
    for path in files:
        os.utime(path, (1e9, 1e9))
    (command,) = re.findall(r"`(find /FOLDER .*? -delete)`", KV_TIERS_PAGE.read_text())
    subprocess.run(command.replace("/FOLDER", str(tmp_path)), shell=True, check=True)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_log_has_no_password(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tier = open_remote_store(f"redis://:hush@127.0.0.1:{free_port()}")
    for _ in range(MAX_FAILURES):
        store(tier, 1)
    assert "is off" in caplog.text and "hush" not in caplog.text
    tier.close()


def test_a_breaker_tries_once_in_each_pause():
    clock, told = Clock(), list[bool]()
    breaker = CircuitBreaker(clock, lambda is_on, _: told.append(is_on))
    for _ in range(MAX_FAILURES):
        assert breaker.may_call()
        breaker.failed("down")
    tries = []
    for _ in range(200):
        clock.now += 0.5
        if breaker.may_call():
            tries.append(clock.now)
            breaker.failed("down")
    gaps = [after - before for before, after in pairwise(tries)]
    assert gaps == sorted(gaps) and gaps[-1] == LONGEST_PAUSE_S
    breaker.succeeded()
    assert breaker.may_call() and told == [False, True]
