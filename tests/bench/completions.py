"""A completions server that answers or misbehaves as it is told, byte by byte. Not a test."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CARD = {"id": "m", "max_model_len": 4096}
END = b"0\r\n\r\n"


@dataclass
class Server:
    """`ways`: what becomes of each completion in turn, the last for all that follow. `bodies` and `heads`: what was
    asked; `left`: a connection has ended.
    """

    ways: list[str]
    card: dict
    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    connections: set[asyncio.Task] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head.decode())
                await self._answer(head.decode(), reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            """The client has hung up."""
        finally:
            self.left.set()
            writer.close()

    async def close(self) -> None:
        for task in self.connections:
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if head.startswith("GET /v1/models"):
            return _send(writer, "200 OK", {"data": [self.card]})
        if head.startswith("GET /version"):
            return _send(writer, "200 OK", {"version": "1.2.3"})
        lengths = [line.partition(":")[2] for line in head.splitlines() if line.lower().startswith("content-length")]
        body = json.loads(await reader.readexactly(int(lengths[0])))
        self.bodies.append(body)
        way = self.ways[0] if len(self.ways) == 1 else self.ways.pop(0)
        await WAYS[way](writer, body["max_tokens"])


@asynccontextmanager
async def served(*ways: str, card: dict | None = None) -> AsyncIterator[Server]:
    server = Server(list(ways), CARD if card is None else card)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        await server.close()


def _send(writer: asyncio.StreamWriter, status: str, body: dict) -> None:
    said = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(said)}\r\n\r\n"
    writer.write(head.encode() + said)


def _chunk(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


def event(**fields: object) -> bytes:
    return _chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")


def token(text: str = "x", finish: str | None = None) -> bytes:
    return event(choices=[{"text": text, "finish_reason": finish}])


DONE = _chunk(b"data: [DONE]\n\n") + END


async def good(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    """Answer as vLLM does: the last token carries the reason, then comes one event with usage."""
    usage = event(choices=[], usage={"completion_tokens": num_tokens})
    writer.write(STREAM + token() * (num_tokens - 1) + token(finish="length") + usage + DONE)


async def bare_end(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    """Answer as Tandem does: the reason may come by itself, and three tokens may make one character."""
    usage = event(choices=[], usage={"completion_tokens": num_tokens})
    named = event(choices=[{"text": "", "finish_reason": "length"}], system_fingerprint="tandem-1.2.3-synthetic-2")
    writer.write(STREAM + token("…") + token() * (num_tokens - 3) + named + usage + DONE)


async def merged(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    """Answer as vLLM does when its front is late: gathered tokens are one event, and a token may have no text yet."""
    usage = event(choices=[], usage={"completion_tokens": num_tokens})
    writer.write(STREAM + token("") + token("xx") + token("xxx", finish="length") + usage + DONE)


async def by_toy_proxy(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    """Answer as vLLM's toy proxy of a pair does: with the decode instance's stream, called JSON."""
    writer.write(STREAM.replace(b"text/event-stream", b"application/json"))
    writer.write(token() * (num_tokens - 1) + token(finish="length") + DONE)


async def short(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(STREAM + token() + token(finish="stop") + DONE)


async def empty(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(STREAM + token("", finish="stop") + event(choices=[], usage={"completion_tokens": 0}) + DONE)


async def refused(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    _send(writer, "429 Too Many Requests", {"error": {"message": "too much work"}})


async def hanging(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    await asyncio.sleep(600)


async def hanging_midway(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(STREAM + token())
    await asyncio.sleep(600)


async def no_http(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(b"\x00\xff what is this\r\n\r\n")


async def page(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>")


async def no_json(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(STREAM + token() + _chunk(b"data: {broken\n\n") + DONE)


async def no_choices(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(STREAM + event(choices="none") + DONE)


async def no_object(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(STREAM + _chunk(b"data: [1]\n\n") + DONE)


async def deep(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(STREAM + _chunk(b"data: " + b"[" * 200_000 + b"\n\n") + DONE)


async def long_line(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(STREAM + _chunk(b"data: " + b"x" * (8 << 20)))
    await writer.drain()
    await asyncio.sleep(600)


async def unfinished(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(STREAM + token() * num_tokens + DONE)


async def failing(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(STREAM + token() + event(error={"message": "the worker died"}) + DONE)


async def cut(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(STREAM + token())
    await writer.drain()
    writer.close()


async def endless(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(STREAM)
    while not writer.is_closing():
        writer.write(token() * 16)
        await writer.drain()
        await asyncio.sleep(0)


async def endless_comments(writer: asyncio.StreamWriter, num_tokens: int) -> None:
    writer.write(STREAM)
    while not writer.is_closing():
        writer.write(_chunk(b": still here\n\n"))
        await writer.drain()
        await asyncio.sleep(0.01)


_GARBAGE = (no_http, page, no_json, no_choices, no_object, deep, long_line)
_BROKEN = (empty, refused, hanging, hanging_midway, unfinished, failing, cut, endless, endless_comments)
WAYS: dict[str, Callable[[asyncio.StreamWriter, int], Awaitable[None]]] = {
    way.__name__: way for way in (good, bare_end, merged, by_toy_proxy, short, *_GARBAGE, *_BROKEN)
}
