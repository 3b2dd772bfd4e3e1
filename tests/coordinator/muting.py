"""A way to a Redis server on which answers get lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def muting(port: int) -> AsyncIterator[tuple[int, list[str]]]:
    """A way to a server; once the list begins with `mute`, scripts are sent there, noted, and not answered."""
    sent: list[str] = []
    open_ends: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        open_ends.extend([writer, back])
        is_muted = False

        async def answer() -> None:
            while data := await there.read(1 << 16):
                if not is_muted:
                    writer.write(data)

        answering = asyncio.create_task(answer())
        while data := await reader.read(1 << 20):
            if sent[:1] == ["mute"] and b"EVALSHA" in data:
                is_muted = True
                sent.append("EVALSHA")
            back.write(data)
        answering.cancel()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1], sent
        for end in open_ends:
            end.close()
