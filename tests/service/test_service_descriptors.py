"""A service whose clients want more connections than it has file descriptors for."""

import json
import socket
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from process.parent_death import die_with_parent
from tests.service.starved_service import LIMIT
from tests.waiting import until

DEADLINE_S = 60.0


def test_accepting_pauses_says_so_once_and_goes_on(tmp_path: Path) -> None:
    port_file, log = tmp_path / "port", tmp_path / "log"
    command = die_with_parent([sys.executable, "-m", "tests.service.starved_service", str(port_file)])
    with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        try:
            until(lambda: port_file.exists() and port_file.read_text(), DEADLINE_S, log.read_text)
            port = int(port_file.read_text())
            with ExitStack() as clients:
                for _ in range(2 * LIMIT):
                    clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S))
                until(lambda: "file descriptors" in log.read_text(), DEADLINE_S, log.read_text)
                free = LIMIT - len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
                assert free >= LIMIT // 8 - 2, "clients have what the service itself needs"
            answered = urllib.request.urlopen(f"http://127.0.0.1:{port}/pauses", timeout=DEADLINE_S)
            assert json.load(answered) >= 1
            assert len(log.read_text().splitlines()) == 1, log.read_text()
        finally:
            process.kill()
