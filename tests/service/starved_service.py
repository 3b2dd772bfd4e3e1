"""A service with few file descriptors: `python -m tests.service.starved_service PORT_FILE`. Not a test."""

import asyncio
import logging
import resource
import sys
from pathlib import Path

from fastapi import FastAPI

from process.listener import PAUSES
from process.sockets import listen
from service.server import serving

LIMIT = 96


async def main(port_file: Path) -> None:
    app = FastAPI()

    @app.get("/pauses")
    async def pauses() -> int:
        return PAUSES.num

    listener = listen("127.0.0.1", 0, backlog=256)
    async with serving(app, listener):
        port_file.write_text(str(listener.getsockname()[1]))
        await asyncio.sleep(3600)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    asyncio.run(main(Path(sys.argv[1])))
