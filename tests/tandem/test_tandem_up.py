"""What `tandem up` says once all is ready, before a gateway that asks for a key."""

import json
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from contracts.errors import ConfigError
from tandem.commands.up import announce


class Gateway(BaseHTTPRequestHandler):
    """Says what it serves to who shows the key; without one, to everybody."""

    key = "sesame"
    model = "tiny"

    def do_GET(self) -> None:
        is_known = self.headers["authorization"] == f"Bearer {self.key}"
        self.send_response(200 if is_known or not self.key else 401)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": self.model}]}).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test says what matters."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def announced(url: str) -> str:
    console = Console(highlight=False, width=1000)
    with console.capture() as said:
        announce(console, url, SimpleNamespace(logs=Path("logs")), 1.0)  # type: ignore[arg-type]
    return said.get()


@pytest.mark.parametrize(
    ("keys", "variable"), [("sesame", "$TANDEM_API_KEY"), ("sesame,other", "${TANDEM_API_KEY%%,*}")]
)
def test_the_gateways_key_opens_it_and_is_never_printed(
    url: str, monkeypatch: pytest.MonkeyPatch, keys: str, variable: str
) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", keys)
    said = announced(url)
    (line,) = [line for line in said.splitlines() if "curl" in line]
    words = shlex.split(line)
    assert f"Authorization: Bearer {variable}" in words
    assert json.loads(words[-1])["model"] == "tiny"
    assert "sesame" not in said


def test_without_a_key_no_header_is_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    monkeypatch.setattr(Gateway, "key", "")
    assert "Authorization" not in announced(url)


def test_the_command_can_be_pasted_whatever_the_model_is_called(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gateway, "key", "")
    monkeypatch.setattr(Gateway, "model", "ann's $model")
    (line,) = [line for line in announced(url).splitlines() if "curl" in line]
    assert json.loads(shlex.split(line)[-1])["model"] == "ann's $model"


def test_a_key_that_the_gateway_does_not_know_is_said(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "other")
    with pytest.raises(ConfigError, match="does not say what it serves"):
        announced(url)
