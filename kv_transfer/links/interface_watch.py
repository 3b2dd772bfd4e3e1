"""The check whether this process still has the network interfaces that it started with.

UCX reads the interfaces and their routes only once.
"""

import socket


class InterfaceWatch:
    """The interfaces at start.

    An interface that is detached and attached again, as a container's, comes back with another index.
    """

    def __init__(self) -> None:
        self._first = set(socket.if_nameindex())

    def replaced(self) -> list[str]:
        """Return the names of the interfaces that came since; none if one is missing and none replaced it."""
        now = set(socket.if_nameindex())
        return sorted(name for _, name in now - self._first) if self._first - now else []
