"""The check whether this process still has the network interfaces that it started with.

UCX reads the interfaces and their routes only once.
"""

import socket


class InterfaceWatch:
    """The interfaces at start.

    An interface that is detached and attached again, as a container's, comes back with another index. `broken` says
    which were found to be gone, in words; it is empty if none was.
    """

    def __init__(self) -> None:
        self._first, self.broken = set(socket.if_nameindex()), ""

    def judge(self) -> None:
        """Look whether interfaces were replaced, after two connected ends found no path by UCX."""
        if names := self.replaced():
            self.broken = f"UCX uses the network interfaces of its start, and {', '.join(names)} came since"

    def replaced(self) -> list[str]:
        """Return the names of the interfaces at start that have another index now.

        Those of other containers on the host come and go under other names, and are no concern of UCX here.
        """
        names = {name for _, name in self._first}
        return sorted(name for _, name in set(socket.if_nameindex()) - self._first if name in names)
