"""The offers and grants of one link: a chunk is checked against them before it reaches a page."""

import threading
import time
from collections import Counter
from collections.abc import Sequence

from contracts.handoff import ChunkHeader, Commit, Fin, Grant, Offer
from contracts.ids import BlockId
from contracts.layout import KVLayout
from kv_transfer.chunks import chunk_plan as plan
from kv_transfer.data_path.sender import Key

ALONE_S = 0.25


class GrantedPages:
    """One granted attempt. Raises ValueError if the grant does not fit its offer or the pool."""

    def __init__(self, offer: Offer, grant: Grant, layout: KVLayout, num_blocks: Sequence[int]) -> None:
        if len(grant.pages) != len(layout.groups):
            raise ValueError(f"pages of {len(grant.pages)} groups granted, the layout has {len(layout.groups)}")
        if grant.skip_tokens % layout.block_size or not 0 <= grant.skip_tokens < offer.num_tokens:
            raise ValueError(
                f"skip_tokens is {grant.skip_tokens} of {offer.num_tokens}; blocks are {layout.block_size}"
            )
        self._skips = grant.skips()
        if len(self._skips) != len(layout.groups):
            raise ValueError(f"group_skips are {grant.group_skips}, of {len(layout.groups)} groups")
        facts = zip(layout.groups, grant.pages, self._skips, num_blocks, strict=True)
        for group, pages, skip, pool_blocks in facts:
            if skip % layout.block_size or not grant.skip_tokens <= skip <= offer.num_tokens:
                raise ValueError(f"group_skips are {grant.group_skips} of {offer.num_tokens} tokens")
            plan.check_pages(pages, pool_blocks)
            expected = group.num_blocks(offer.num_tokens - skip)
            if len(pages) != expected:
                raise ValueError(f"{len(pages)} pages granted, {expected} are needed")
        self.offer, self.grant, self._layout = offer, grant, layout
        self._arrived: set[int] = set()
        self.nbytes = 0
        self._filled = [[False] * len(pages) for pages in grant.pages]

    def check(self, header: ChunkHeader) -> str | None:
        """Return why this chunk must not be written, or None."""
        if header.layout_id != self._layout.layout_id:
            return f"layout_id is {header.layout_id}, granted was {self._layout.layout_id}"
        if not 0 <= header.group < len(self._filled):
            return f"group is {header.group}; the layout has {len(self._filled)}"
        if header.index in self._arrived:
            return f"chunk {header.index} has arrived already"
        if reason := self._check_tokens(header):
            return reason
        if header.nbytes != plan.chunk_nbytes(self._layout, header.num_tokens, header.group):
            return f"{header.nbytes} bytes for {header.num_tokens} tokens"
        if any(self._filled[header.group][self._blocks(header)]):
            return f"tokens from {header.first_token} on have arrived already"
        return None

    def pages(self, header: ChunkHeader) -> list[BlockId]:
        """Return the granted pages of a checked chunk, in token order."""
        return self.grant.pages[header.group][self._blocks(header)]

    def chunk_received(self, header: ChunkHeader) -> None:
        blocks = self._blocks(header)
        self._arrived.add(header.index)
        self.nbytes += header.nbytes
        self._filled[header.group][blocks] = [True] * (blocks.stop - blocks.start)

    def is_whole(self, fin: Fin) -> bool:
        """Return whether as many chunks have arrived as Fin says, and hold every token that was granted.

        Never of an offer that is a bound: its sender goes on with the answer until the owner has taken it over, and
        has said so by its own Commit.
        """
        return not self.offer.is_bound and len(self._arrived) == fin.num_chunks and all(map(all, self._filled))

    def _check_tokens(self, header: ChunkHeader) -> str | None:
        first, end, block_size = header.first_token, header.first_token + header.num_tokens, self._layout.block_size
        skip = self._skips[header.group]
        if first % block_size or first < skip:
            return f"first_token is {first}; the grant starts at {skip}, blocks are {block_size}"
        if header.num_tokens <= 0 or end > self.offer.num_tokens:
            return f"tokens {first} to {end} are not all in the {self.offer.num_tokens} offered"
        if end % block_size and end != self.offer.num_tokens and not self.offer.is_bound:
            return f"the chunk ends at token {end}, inside a block"
        return None

    def _blocks(self, header: ChunkHeader) -> slice:
        group = self._layout.groups[header.group]
        first = (header.first_token - self._skips[header.group]) // group.block_size
        return slice(first, first + group.num_blocks(header.num_tokens))


class GrantTable:
    """The offers and grants of one link. Any thread grants or ends; one thread writes pages.

    `num_blocks`: of the pool of each group. A link between workers that share only some groups tells by `agreed`.
    """

    def __init__(self, layout: KVLayout, num_blocks: Sequence[int]) -> None:
        self._layout, self._num_blocks = layout, num_blocks
        self._offers: dict[Key, Offer] = {}
        self._grants: dict[Key, GrantedPages] = {}
        self._fins: dict[Key, Fin] = {}
        self._committed: set[Key] = set()
        self._alone_until = 0.0
        self._writing: Counter[Key] = Counter()
        self._draining: set[Key] = set()
        self._lock = threading.Lock()

    def agreed(self, layout: KVLayout, num_blocks: Sequence[int]) -> None:
        """Expect pages of these groups alone. Called before anything is offered."""
        self._layout, self._num_blocks = layout, num_blocks

    def offered(self, offer: Offer) -> None:
        with self._lock:
            self._offers.setdefault((offer.request_id, offer.epoch), offer)

    @property
    def num_alive(self) -> int:
        """Return how many attempts are offered and not over."""
        with self._lock:
            return len(self._offers)

    def knows(self, key: Key) -> bool:
        """Return whether the attempt is offered, or over while a page of it is still being written."""
        with self._lock:
            return key in self._offers or key in self._writing

    def grant(self, grant: Grant) -> bool:
        """Record a grant; return False if the offer is gone.

        Raises ValueError if it does not fit the offer or the pool, or a page is granted to another attempt.
        """
        key = grant.request_id, grant.epoch
        with self._lock:
            if key not in self._offers:
                return False
            granted = GrantedPages(self._offers[key], grant, self._layout, self._num_blocks)
            for index, pages in enumerate(grant.pages):
                taken = {page for other in self._grants.values() for page in other.grant.pages[index]}
                if taken.intersection(pages):
                    raise ValueError(f"a page granted to {grant.request_id} is granted to another attempt")
            self._grants[key] = granted
            self._alone_until = time.monotonic() + ALONE_S
            return True

    def find(self, key: Key) -> GrantedPages | None:
        with self._lock:
            return self._grants.get(key)

    def finished(self, fin: Fin) -> Commit | None:
        """Record token 0; return the Commit to send if nothing else was missing."""
        with self._lock:
            key = fin.request_id, fin.epoch
            if key in self._grants:
                self._fins[key] = fin
            return self._commit(key)

    def chunk_received(self, header: ChunkHeader) -> Commit | None:
        """Record a chunk whose bytes are all right; return the Commit to send if nothing else was missing."""
        with self._lock:
            key = header.request_id, header.epoch
            if granted := self._grants.get(key):
                granted.chunk_received(header)
            return self._commit(key)

    @property
    def is_alone(self) -> bool:
        """Return whether a single handoff has lately begun, so that nothing else keeps this process awake."""
        return len(self._grants.keys() - self._committed) == 1 and time.monotonic() < self._alone_until

    def is_committed(self, key: Key) -> bool:
        """Return whether Commit was sent already."""
        with self._lock:
            return key in self._committed

    def enter(self, key: Key) -> bool:
        """Mark pages of this attempt as about to be written; return False if it is over and they must not be."""
        with self._lock:
            if key in self._grants:
                self._writing[key] += 1
            return key in self._grants

    def leave(self, key: Key) -> bool:
        """End a write that was entered; return True if the attempt was ended meanwhile and is drained now."""
        with self._lock:
            self._writing[key] -= 1
            if self._writing[key]:
                return False
            del self._writing[key]
            is_drained = key in self._draining
            self._draining.discard(key)
            return is_drained

    def end(self, key: Key) -> bool:
        """Forget the attempt; return True if nothing writes its pages now. If not, `leave` reports the end."""
        with self._lock:
            self._offers.pop(key, None)
            self._grants.pop(key, None)
            self._fins.pop(key, None)
            self._committed.discard(key)
            if key in self._writing:
                self._draining.add(key)
            return key not in self._writing

    def _commit(self, key: Key) -> Commit | None:
        """Return the Commit to send if the attempt is whole, and mark it as sent; under the lock."""
        granted, fin = self._grants.get(key), self._fins.get(key)
        if granted is None or fin is None or key in self._committed or not granted.is_whole(fin):
            return None
        if key in self._writing:
            return None
        self._committed.add(key)
        return Commit(request_id=fin.request_id, epoch=fin.epoch, num_chunks=fin.num_chunks, nbytes=granted.nbytes)
