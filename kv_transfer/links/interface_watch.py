"""Whether this process still has the network interfaces that it began with: UCX looks at them and their routes once."""

import socket


class InterfaceWatch:
    """An interface that is taken away and attached again, as a container's, comes back with another index."""

    def __init__(self) -> None:
        self._first = set(socket.if_nameindex())

    def replaced(self) -> list[str]:
        """Return the names of those that came since; none while one is away and nothing came in its place."""
        now = set(socket.if_nameindex())
        return sorted(name for _, name in now - self._first) if self._first - now else []
