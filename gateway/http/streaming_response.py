"""The HTTP answer of a generation: whole or as a stream, written while the client is watched."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from contracts.errors import TandemError
from gateway.api.error_body import OUR_FAULT, retry_headers
from gateway.api.openai.vllm_extensions import StreamedTokenIds, add_details
from gateway.error_codes import status_of
from gateway.generation.generation_state import OutputDelta
from gateway.generation.usage import Usage
from gateway.serving.disconnect import wait_for_disconnect
from gateway.serving.generation_run import GenerationRun

log = logging.getLogger(__name__)

WRITE_GRACE_S = 5.0


class GenerationResponse(Response):
    """Writes the answer and watches the client meanwhile: a client that leaves frees both workers at once."""

    def __init__(self, serving: GenerationRun) -> None:
        super().__init__(headers={"x-request-id": serving.echo_id or serving.id})
        self._serving = serving
        self._token_ids = StreamedTokenIds(serving.answers)
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(wait_for_disconnect(receive))
        error, has_left = None, True
        try:
            limit_s = self._serving.timeout_s + WRITE_GRACE_S  # a client that does not read ends, too
            await asyncio.wait({writing, leaving}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            has_left = not writing.done()
            if not has_left:
                error = writing.result()
        finally:
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
            self._serving.close(error, has_left)

    async def _write(self, send: Send) -> TandemError | None:
        """Returns the error that ended the answer: an HTTP error before the first piece, an event after it."""
        try:
            await self._serving.place()
            await (self._write_stream(send) if self._serving.style.stream else self._write_whole(send))
            return None
        except TandemError as failure:
            error = failure
        except Exception:  # of ours; the client is owed an end all the same
            log.exception("request %s", self._serving.id)
            error = TandemError(OUR_FAULT)
        if self._has_started:
            await _body(send, self._closing(error), more=False)
        else:
            await self._send_error(send, error)
        return error

    async def _write_whole(self, send: Send) -> None:
        serving = self._serving
        told: list[list[OutputDelta]] = [[] for _ in serving.answers]
        while pieces := await serving.deltas():
            for piece in pieces:
                told[piece.index].append(piece)
        choices = list(map(serving.replies.choice, told))
        body = serving.replies.whole(choices, serving.usage())
        if serving.has_details:
            add_details(body, serving.answers)
        await self._send_json(send, 200, msgspec.json.encode(body))

    async def _write_stream(self, send: Send) -> None:
        serving = self._serving
        pieces = await serving.deltas()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._start(send, 200, headers)
        untold = replace(serving.usage(), completion_tokens=0)  # what the first pieces add is told with them
        bodies = [body for index in range(len(serving.answers)) for body in self._opening(index, untold)]
        opening = b"".join(self._event(body, untold) for body in bodies)
        while pieces:
            if data := opening + b"".join(self._chunk(piece) for piece in pieces):
                await _body(send, data, more=True)
            opening = b""
            pieces = await serving.deltas()
        await _body(send, self._closing(None), more=False)

    def _opening(self, index: int, usage: Usage) -> list[dict]:
        bodies = self._serving.replies.opening(index, usage)
        if self._serving.has_details:
            for body in bodies:
                self._token_ids.open(body, index)
        return bodies

    def _chunk(self, piece: OutputDelta) -> bytes:
        bodies = self._serving.replies.chunk(piece)
        if bodies and self._serving.has_details:
            self._token_ids.add(bodies[0], piece)
        return b"".join(map(self._event, bodies))

    def _event(self, body: dict, usage: Usage | None = None) -> bytes:
        if self._serving.style.continuous_usage:
            body["usage"] = (usage or self._serving.usage()).body()
        return self._serving.replies.encode(body)

    def _closing(self, error: TandemError | None) -> bytes:
        serving, replies = self._serving, self._serving.replies
        bodies = [replies.failure(error)] if error else replies.closing(serving.usage(), serving.style.include_usage)
        return b"".join(map(replies.encode, bodies)) + replies.ending

    async def _send_error(self, send: Send, error: TandemError) -> None:
        retry = [(name.lower().encode(), value.encode()) for name, value in retry_headers(error).items()]
        body = msgspec.json.encode(self._serving.replies.refusal(error))
        await self._send_json(send, status_of(error.code), body, retry)

    async def _send_json(self, send: Send, status: int, body: bytes, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(send, status, [(b"content-type", b"application/json"), length, *more])
        await _body(send, body, more=False)

    async def _start(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_started = True
        headers = [*headers, (b"x-request-id", (self._serving.echo_id or self._serving.id).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})


async def _body(send: Send, data: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
