"""The links of a node: the one in use for each peer and direction, and others not yet gone."""

import threading
from collections.abc import Sequence

from contracts.errors import Overloaded
from contracts.ids import Incarnation, WorkerId
from kv_transfer.data_path.sender import Key
from kv_transfer.links.incoming_link import IncomingLink
from kv_transfer.links.link import Link
from kv_transfer.links.outgoing_link import OutgoingLink


class LinkTable:
    """The links by peer and direction (True: outgoing) in `placed`, changed only under `lock`.

    `aside`: links that are alive without a place: they are yet to prove themselves, or were replaced. `unfenced`: lost
    links with a thread that did not stop, until their loss is reported.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.placed: dict[tuple[WorkerId, bool], Link] = {}
        self.aside: list[Link] = []
        self.unfenced: list[Link] = []

    def outgoing(self, peer_id: WorkerId) -> OutgoingLink | None:
        with self.lock:
            link = self.placed.get((peer_id, True))
        return link if isinstance(link, OutgoingLink) else None

    def incoming(self, peer_id: WorkerId) -> IncomingLink | None:
        with self.lock:
            link = self.placed.get((peer_id, False))
        return link if isinstance(link, IncomingLink) else None

    def has_room_for(self, peer_id: WorkerId, max_links: int) -> bool:
        """Return whether an outgoing link to this peer is missing, and would be within `max_links`."""
        with self.lock:
            return (peer_id, True) not in self.placed and len(self.placed) < max_links

    def is_up(self, peer_id: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether pages can be sent to this peer now."""
        link = self.outgoing(peer_id)
        return link is not None and link.incarnation == incarnation and link.state == "up"

    def in_place(self) -> list[Link]:
        with self.lock:
            return list(self.placed.values())

    def alive(self) -> list[Link]:
        with self.lock:
            return [*self.placed.values(), *self.aside]

    def all(self) -> list[Link]:
        with self.lock:
            return [*self.placed.values(), *self.aside, *self.unfenced]

    def alive_with(self, peer_id: WorkerId, incarnation: Incarnation) -> list[Link]:
        """Return the links to this worker and incarnation; under the lock."""
        return links_with([*self.placed.values(), *self.aside], peer_id, incarnation)

    def failed_with(self, peer_id: WorkerId, incarnation: Incarnation) -> list[Link]:
        """Return those of the links to this worker and incarnation that have failed, and are not gone yet."""
        with self.lock:
            return [link for link in self.alive_with(peer_id, incarnation) if link.failed]

    def having(self, peer_id: WorkerId, key: Key) -> Link | None:
        """Return the link of this peer that knows the attempt."""
        links = [link for link in self.all() if link.peer_id == peer_id and link.knows(key)]
        return links[0] if links else None

    def place(self, link: Link, max_peers: int) -> None:
        """Put a new link in its place, under the lock.

        Raises Overloaded if the place is taken, or there are too many links.
        """
        place = link.peer_id, link.outgoing
        if place in self.placed or len(self.placed) >= max_peers:
            raise Overloaded(f"no room for another peer: {len(self.placed)} of {max_peers} links are in use")
        self.placed[place] = link

    def drop(self, link: Link) -> None:
        """Remove a link that is gone from `placed` or `aside`; under the lock."""
        if self.placed.get((link.peer_id, link.outgoing)) is link:
            del self.placed[link.peer_id, link.outgoing]
        if link in self.aside:
            self.aside.remove(link)

    def take_unfenced(self, peer_id: WorkerId, incarnation: Incarnation) -> list[Link]:
        """Remove and return the unfenced links to this worker and incarnation; under the lock."""
        taken = links_with(self.unfenced, peer_id, incarnation)
        self.unfenced = [other for other in self.unfenced if other not in taken]
        return taken


def links_with(links: Sequence[Link], peer_id: WorkerId, incarnation: Incarnation) -> list[Link]:
    """Return those of `links` that go to this worker and incarnation."""
    return [link for link in links if (link.peer_id, link.incarnation) == (peer_id, incarnation)]
