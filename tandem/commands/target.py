"""The running system that a command talks to, and the requests to it."""

import argparse
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from contracts.errors import ConfigError, Unavailable
from process.local_http import open_local
from tandem.commands import ps

TIMEOUT_S = 60.0
KEYS = ("TANDEM_API_KEY", "OPENAI_API_KEY")
"""Environment variables that may hold an API key, or several with commas. It is not a flag: other users can read those.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--port", type=int, help="the system on this machine whose gateway has this port")
    where.add_argument("--url", help="a gateway anywhere, http://HOST:PORT")


def gateway_url(options: argparse.Namespace, home: Path) -> str:
    """Return the gateway that was named, or the only one that runs here.

    Raises ConfigError that says what to name.
    """
    if options.url:
        url = options.url if "://" in options.url else f"http://{options.url}"
        return url.rstrip("/").removesuffix("/v1")
    gateways = [row for row in ps.list_processes(home) if row["role"] == "gateway"]
    if options.port is not None:
        gateways = [row for row in gateways if row["port"] == options.port]
    match [str(row["url"]) for row in gateways if row["url"]]:
        case [url]:
            return url
        case []:
            which = "" if options.port is None else f" on port {options.port}"
            raise ConfigError(f"no system runs here{which}: start one with `tandem up`, or name a gateway with --url")
    ports = ", ".join(str(row["port"]) for row in gateways)
    raise ConfigError(f"several systems run here, on ports {ports}: choose one with --port")


def key_headers() -> dict[str, str]:
    """Return the headers with the key of the environment; none without a key."""
    name = _key_variable()
    return {"Authorization": f"Bearer {_key(name)}"} if name else {}


def key_advice() -> str:
    """Return the advice for a 401."""
    name = _key_variable()
    return f"the key in {name} is not one of the server's" if name else f"set {' or '.join(KEYS)} to the server's key"


def _key_variable() -> str:
    """Return the first variable that holds a key; empty if none does."""
    return next(filter(_key, KEYS), "")


def _key(name: str) -> str:
    return os.environ.get(name, "").split(",")[0].strip()


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """Send GET, or POST of JSON, and return the answer's JSON.

    Raises Unavailable with the server's message.
    """
    with closing(_open(url, body)) as response:
        try:
            return json.load(response)
        except ValueError as error:
            raise Unavailable(f"{url} does not answer in JSON: is it an OpenAI-compatible server?") from error


def stream(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of an answer until its end; closing early hangs up. Raises Unavailable."""
    with closing(_open(url, body)) as response:
        for data in _data(response):
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise Unavailable(event["error"]["message"])
            yield event
    raise Unavailable("the answer broke off: its connection ended before it did")


def _data(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the data of each event; a server may also send comments, to keep the connection alive."""
    try:
        for line in response:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()
    except (http.client.HTTPException, OSError) as error:
        raise Unavailable(f"the answer broke off: {error}") from error


def _open(url: str, body: dict[str, Any] | None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"} | key_headers())
    try:
        return open_local(request, TIMEOUT_S) if _is_here(url) else urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            advice = f"; {key_advice()}" if error.code == 401 else ""
            raise Unavailable(f"{_words(error)}{advice}") from error
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(f"nobody answers at {url}: {reason}; `tandem ps` shows what runs here") from error


def _is_here(url: str) -> bool:
    """Return whether the URL names this machine, by its words alone: no name is resolved."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _words(error: urllib.error.HTTPError) -> str:
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error.url} answers {error.code} {error.reason}"
