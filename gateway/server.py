"""The HTTP server."""

import asyncio
import json

import httptools
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.replies import error_body

KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than clients keep theirs (httpx 5 s, aiohttp 15 s, the upstream pools
of nginx and of cloud load balancers 60 s), so that it is they who close. A request that is written in the moment when
the server closes gets no answer, and to a client without retries that is a failure of the service.
"""
HEADERS_TIMEOUT_S = 10.0
MAX_HEADERS_NBYTES = 32 << 10
UNREAD_TIMEOUT_S = 30.0


def http_config(app: FastAPI) -> uvicorn.Config:
    """How the gateway is served."""
    return uvicorn.Config(
        app,
        http=Protocol,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=3,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


class Protocol(HttpToolsProtocol):
    """Closes a connection whose request's headers are too slow or too long, those behind its body too, and one that
    does not read its answer.

    Stays with HTTP/1.1 whatever a request would rather speak: Java's client offers HTTP/2 with its first request, and
    the parser takes what follows such headers, the body, for the other protocol.
    """

    _headers_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _headers_nbytes = 0
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._headers_nbytes += len(data)  # forgotten where anything else is in it
        upgrade = self._parse(data)
        while upgrade is not None:
            data = self._plain_head() + data[upgrade:]
            upgrade = self._parse(data)
        if self._headers_timer is not None:  # they have not ended yet
            self._headers_nbytes = max(self._headers_nbytes, len(data))
        if self._headers_nbytes > MAX_HEADERS_NBYTES and not self._is_refused:
            self._refuse()

    def _parse(self, data: bytes) -> int | None:
        """Where another protocol would begin, if one is offered. Not all that comes ends a connection's idleness: the
        rest of a body behind its answer, a 401 say, and empty lines are no request, and no other timer runs for them.
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
        """The head that was read, without the offer, for a parser that has read nothing. None of CONNECT's is plain."""
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

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._forget_unread()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_headers()
        self._forget_unread()
        super().connection_lost(exc)

    def _refuse(self) -> None:
        self._is_refused = True
        self._forget_headers()
        body = json.dumps(error_body(431, f"the headers are longer than {MAX_HEADERS_NBYTES} bytes")).encode()
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

    def _forget_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
