"""Sockets, ready files and memory: how a process meets the machine."""

import json
import os
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from contracts.errors import ConfigError
from process.ready_file import ReadyFile
from process.sockets import free_port, http_url, listen
from process.supervision import describe_exit


def test_a_free_port_is_found_and_taken():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = listener.accept()
            accepted.close()
        with pytest.raises(ConfigError, match=rf"can't listen on 127\.0\.0\.1:{port}: .*choose another --port"):
            listen("127.0.0.1", port)


def test_a_port_that_is_bound_later_is_none_that_a_connection_may_get():
    lowest, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    with listen("127.0.0.1", free_port()) as listener:
        assert listener.getsockname()[1] < lowest


def test_a_port_that_is_taken_is_not_a_free_one(monkeypatch):
    with listen("127.0.0.1", free_port()) as listener:
        taken = listener.getsockname()[1]
        found = iter([taken, taken, taken + 1])
        monkeypatch.setattr("random.randrange", lambda *_: next(found))
        assert free_port() == taken + 1


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "127.0.0.1"), ("a.b", "a.b")],
)
def test_an_address_is_shown_as_urls_have_it(host: str, shown: str):
    assert http_url(host, 8000) == f"http://{shown}:8000"


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_ipv6_is_listened_on(host: str):
    with listen(host, 0) as listener:
        port = listener.getsockname()[1]
        where = urlsplit(http_url(host, port)).hostname
        socket.create_connection((where, port)).close()


def test_a_port_can_be_taken_again_at_once():
    """A restarted service does not wait for the connections of its former self to be forgotten."""
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        listener.accept()[0].close()
    client.close()
    listen("127.0.0.1", port).close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="not on this platform")
@pytest.mark.parametrize("silence_s", [0.0, 10.0])
def test_what_is_accepted_minds_the_silence_of_its_peer(silence_s: float):
    with (
        listen("127.0.0.1", 0, silence_s=silence_s) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == silence_s * 1000


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_refused_in_words(host: str):
    with pytest.raises(ConfigError, match=f"can't listen on {host}:0: .*choose another --host"):
        listen(host, 0)


def test_a_ready_file_is_whole_whenever_it_is_seen(tmp_path: Path):
    path, facts = tmp_path / "ready.json", {"pid": 1, "url": "http://x" * 10_000}
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            ReadyFile(path).write(facts)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        while not path.exists():
            pass
        for _ in range(200):
            assert json.loads(path.read_text()) == facts
    finally:
        stop.set()
        writer.join()
    assert [file.name for file in tmp_path.iterdir()] == ["ready.json"]


def test_no_path_means_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    ReadyFile(None).write({"pid": os.getpid()})
    assert list(tmp_path.iterdir()) == []


def test_a_ready_file_that_cannot_be_written_names_itself(tmp_path: Path):
    path = tmp_path / "missing" / "ready.json"
    with pytest.raises(ConfigError, match=f"can't write ready_file {path}"):
        ReadyFile(path).write({})


def test_what_is_written_to_an_accepted_connection_is_sent_at_once():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    "code, words",
    [
        (3, "ended with code 3"),
        (-11, "was killed by SIGSEGV"),
        (-9, "was killed by SIGKILL (the kernel does that when memory runs out)"),
    ],
)
def test_how_a_process_ended_is_told_in_words(code: int, words: str):
    assert describe_exit(code) == words
