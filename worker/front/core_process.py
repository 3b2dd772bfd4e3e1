"""The control of the engine core's process by its front: start it, talk to it, notice its death."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator

from contracts.codec import FrameReader, decoder, frame
from contracts.errors import ConfigError
from process.parent_death import die_with_parent
from process.supervision import describe_exit
from process.thread_times import ThreadTimes, look_at_threads
from worker.front.progress_log import ProgressLog
from worker.messages import CoreFailed, CoreReady, Loading, Start, Stop, ToCore, ToFront

log = logging.getLogger(__name__)

READ_NBYTES = 1 << 20
STOP_TIMEOUT_S = 5.0
THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""The settings of OpenMP's threads, which spin for work by default.

Two cores of one host that do so starve each other: 8 streams of 256-token prompts gave 5 to 18 tokens a second spinning
and 28 to 49 sleeping, on two CPUs. Threads that sleep at once are woken hundreds of times a step: one stream of a mixed
worker made 35 tokens a second and makes 79 if they first spin for at most 10 000 turns, some tenths of a millisecond
(4000: 74; 30 000: 78, and the pair's 8 streams 47 in all, not 65).
"""


class CoreProcess:
    """The program `module` as the core of this worker.

    Call `start()`, wait for `ready()`, read `frames()`: when they end the core has died.
    """

    def __init__(self, module: str, start: Start) -> None:
        self._module, self._start = module, start
        self._is_given_up = False
        self._reader = FrameReader()
        self._decoder = decoder(ToFront)
        self._backlog: list[ToFront] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def look_at_threads(self) -> ThreadTimes:
        """Return the time that its threads have used so far, and whether one could run now."""
        return look_at_threads(self.pid)

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = die_with_parent([sys.executable, "-m", self._module, str(theirs.fileno())])
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=THREADS | os.environ
            )
        self._stream, self._writer = await asyncio.open_unix_connection(sock=ours, limit=READ_NBYTES)
        self.send(self._start)

    async def ready(self) -> CoreReady:
        """Wait for the model to load, logging progress.

        Raises ConfigError with the core's message if it can't start.
        """
        progress = ProgressLog()
        async for message in self.frames():
            match message:
                case CoreReady():
                    return message
                case CoreFailed(words):
                    raise ConfigError(words)
                case Loading(stage, done, total):
                    if line := progress.line(stage, done, total, time.monotonic()):
                        log.info("starting, %s", line)
        raise ConfigError(f"the engine core {describe_exit(await self._exit_code())} while starting; see the log above")

    async def frames(self) -> AsyncIterator[ToFront]:
        """Yield the messages from the core, in order, until it closes its end."""
        while True:
            while self._backlog:
                yield self._backlog.pop(0)
            data = await self._read()
            if not data:
                return
            self._backlog += [self._decoder.decode(payload) for payload in self._reader.feed(data)]

    def send(self, message: ToCore) -> None:
        """Send a message without blocking.

        What the core can't take yet is buffered. After the core's death nothing is sent, and `frames()` ends.
        """
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    def kill(self) -> None:
        """Kill the core; `frames()` ends soon."""
        self._is_given_up = True
        self._process.kill()

    async def describe_end(self) -> str:
        """Return how the process ended, to follow its name in a message. Call it after the last frame."""
        if self._is_given_up:
            return "was killed by this worker"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                return describe_exit(await self._exit_code())
        return "closed its connection and does not end"

    async def stop(self) -> None:
        """Ask the core to stop, wait, then kill it; on return the process is gone."""
        self.send(Stop())
        for insist in (lambda: None, self._process.kill):
            insist()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._exit_code()
                break
        self._writer.close()

    async def _read(self) -> bytes:
        try:
            return await self._stream.read(READ_NBYTES)
        except ConnectionError:
            return b""

    async def _exit_code(self) -> int:
        while (code := self._process.poll()) is None:
            await asyncio.sleep(0.02)
        return code
