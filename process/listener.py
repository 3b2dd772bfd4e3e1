"""A listening socket that pauses while this process has no file descriptors left for more connections.

asyncio goes on accepting where that fails, as often as the backlog is long, and writes a traceback each time: 47 MB in
20 s. And a service whose clients have all its descriptors reaches neither Redis nor its peers.
"""

import errno
import logging
import os
import resource
import socket
import time
from typing import Any

log = logging.getLogger(__name__)

RESERVE = 64
"""Descriptors that clients never get, or an eighth of all where there are few: for peers, Redis and files."""
PAUSE_S = 0.5
"""Less than what asyncio waits before it accepts again, which is 1 s."""
LOG_PERIOD_S = 60.0


class AcceptPauses:
    """How often accepting paused since the start of this process."""

    def __init__(self) -> None:
        self.num = 0
        self._logged_s = -LOG_PERIOD_S

    def note(self, limit: int, now: float) -> None:
        self.num += 1
        if now - self._logged_s >= LOG_PERIOD_S:
            self._logged_s = now
            log.warning(
                "out of file descriptors (the limit is %d): new connections wait; raise it (ulimit -n), "
                "or let fewer clients connect",
                limit,
            )


PAUSES = AcceptPauses()
"""The pauses of this process, whose listeners share the descriptors."""


class PausingListener(socket.socket):
    """A socket whose `accept` leaves a reserve of descriptors."""

    _paused_until_s = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a connection.

        Raises BlockingIOError within a pause, and as one begins OSError of EMFILE, for which asyncio stops to look at
        this socket for a second.
        """
        now = time.monotonic()
        if now < self._paused_until_s:
            raise BlockingIOError(errno.EAGAIN, "accepting pauses")
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            _require_room(self.fileno(), limit)
            return super().accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._paused_until_s = now + PAUSE_S
                PAUSES.note(limit, now)
            raise


def _require_room(fileno: int, limit: int) -> None:
    """Raise OSError unless the next descriptor, which is the lowest that is free, is below the reserve."""
    probe = os.dup(fileno)
    os.close(probe)
    if probe >= limit - min(RESERVE, limit // 8):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def is_accept_pause(context: dict[str, Any]) -> bool:
    """Return whether asyncio reports such a pause to its exception handler; the log has it already."""
    error = context.get("exception")
    return "socket" in context and isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
