"""The limits of HTTP for strangers: headers must end in time, and must not be too long."""

import asyncio
import json
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_TIMEOUT_S = 10.0
MAX_HEADERS_NBYTES = 32 << 10


class LimitedProtocol(HttpToolsProtocol):
    """A protocol that closes connections whose headers are too slow or too long, trailers included.

    It stays with HTTP/1.1 whatever a request offers: Java's client offers HTTP/2 with its first request, and the parser
    takes what follows such headers, the body, for the other protocol.
    """

    _headers_timer: asyncio.TimerHandle | None = None
    _headers_nbytes = 0
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._headers_nbytes += len(data)  # reset where the data has anything else in it
        upgrade = self._parse(data)
        while upgrade is not None:
            data = self._plain_head() + data[upgrade:]
            upgrade = self._parse(data)
        if self._headers_timer is not None:  # they have not ended yet
            self._headers_nbytes = max(self._headers_nbytes, len(data))
        if self._headers_nbytes > MAX_HEADERS_NBYTES and not self._is_refused:
            self._refuse()

    def _parse(self, data: bytes) -> int | None:
        """Parse the data; return where another protocol would begin, if one is offered.

        Not everything that arrives ends a connection's idle time: the rest of a body behind its answer, a 401 for
        example, and empty lines are no request, and no other timer runs for them.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return upgrade.args[0]
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        return None

    def _should_upgrade(self) -> bool:
        return True  # so that nothing is begun before the request is read once more without its offer

    def _plain_head(self) -> bytes:
        """Return the head that was read without the offer, for a fresh parser.

        A CONNECT has no plain form.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        self.parser = httptools.HttpRequestParser(self)
        if method == b"CONNECT":
            return b"\0"
        fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([b"%s %s HTTP/%s" % (method, self.url, version), *fields, b"", b""])

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._await_headers()

    def on_headers_complete(self) -> None:
        self._unset_keepalive_if_required()  # the answer before this request may have ended since it began
        self._forget_headers()
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADERS_NBYTES:
            self._refuse()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._headers_nbytes = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._headers_nbytes = 0
        if not self._is_refused:
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_headers()
        super().connection_lost(exc)

    def error(self, why: str) -> dict[str, Any]:
        """The body of the refusal, as all services but the gateway spell it."""
        return {"error": {"code": "headers_too_long", "message": why}}

    def _refuse(self) -> None:
        self._is_refused = True
        self._forget_headers()
        body = json.dumps(self.error(f"the headers are longer than {MAX_HEADERS_NBYTES} bytes")).encode()
        head = "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def _await_headers(self) -> None:
        self._forget_headers()
        self._headers_timer = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.abort)

    def _forget_headers(self) -> None:
        self._headers_nbytes = 0
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None
