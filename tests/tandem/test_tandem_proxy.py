"""A proxy that the environment names for the world outside is not asked for what runs on this machine."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from contracts.errors import ConfigError
from tandem.commands import ps, target, up
from tandem.commands import top_snapshot as look

METRICS = "# TYPE tandem_gateway_inflight gauge\ntandem_gateway_inflight 3.0\n"


class Gateway(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        body = METRICS if self.path == "/metrics" else json.dumps({"data": [{"id": "tiny"}]})
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the test says what matters."""


class Proxy(Gateway):
    def do_GET(self) -> None:
        self.send_error(502, "no such host here")


@pytest.fixture
def behind_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a gateway here; the environment sends the world outside to a proxy that knows none of our ports."""
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server,
        ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy,
    ):
        for running in (server, proxy):
            threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies of its first use
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
        yield server.server_port
        for running in (server, proxy):
            running.shutdown()


def test_up_sees_its_own_gateway(behind_proxy: int) -> None:
    url = f"http://127.0.0.1:{behind_proxy}"
    assert up.answers(f"{url}/ready")
    assert up.served_model(url) == "tiny"


class Locked(Gateway):
    def do_GET(self) -> None:
        self.send_error(401, "a valid API key is needed")


def test_up_names_no_model_where_only_tenants_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Locked) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ConfigError, match="401"):
            up.served_model(url)
        monkeypatch.setenv("TANDEM_TENANTS", "tenants.toml")
        assert up.served_model(url) == "" and up.shown_key() == ' -H "Authorization: Bearer $KEY"'
        server.shutdown()


def test_ps_and_top_see_what_runs_here(behind_proxy: int) -> None:
    url = f"http://127.0.0.1:{behind_proxy}"
    assert ps.observe({"role": "gateway", "state": "ready", "url": url})["state"] == "ready"
    assert look._read(f"{url}/metrics").sums == {"tandem_gateway_inflight": 3.0}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_gateway_here_is_asked_directly(behind_proxy: int, host: str) -> None:
    assert target.ask(f"http://{host}:{behind_proxy}/v1/models") == {"data": [{"id": "tiny"}]}


def test_a_gateway_elsewhere_is_asked_by_way_of_the_proxy(behind_proxy: int) -> None:
    with pytest.raises(target.Unavailable, match="502"):
        target.ask("http://gateway.invalid/v1/models")
