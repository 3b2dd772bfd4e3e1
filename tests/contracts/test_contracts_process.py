"""Sockets, ready files and memory: how a process meets the machine."""

import json
import os
import socket
import threading
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from contracts.process import listen, write_ready_file


def test_a_free_port_is_found_and_taken():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = listener.accept()
            accepted.close()
        with pytest.raises(ConfigError, match=rf"can't listen on 127\.0\.0\.1:{port}: .*choose another --port"):
            listen("127.0.0.1", port)


def test_a_port_can_be_taken_again_at_once():
    """A restarted service does not wait for the connections of its former self to be forgotten."""
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        listener.accept()[0].close()
    client.close()
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_refused_in_words(host: str):
    with pytest.raises(ConfigError, match=f"can't listen on {host}"):
        listen(host, 0)


def test_a_ready_file_is_whole_whenever_it_is_seen(tmp_path: Path):
    path, facts = tmp_path / "ready.json", {"pid": 1, "url": "http://x" * 10_000}
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            write_ready_file(path, facts)

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


def test_no_path_means_no_file():
    write_ready_file(None, {"pid": os.getpid()})


def test_a_ready_file_that_cannot_be_written_names_itself(tmp_path: Path):
    path = tmp_path / "missing" / "ready.json"
    with pytest.raises(ConfigError, match=f"can't write ready_file {path}"):
        write_ready_file(path, {})


def test_what_is_written_to_an_accepted_connection_is_sent_at_once():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
