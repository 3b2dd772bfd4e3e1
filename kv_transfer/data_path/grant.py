"""What may land where: the facts that a chunk must meet before one byte of it reaches a page. Plain data, no
sockets, no threads.
"""

from contracts.handoff import ChunkHeader, Grant, Offer
from contracts.ids import BlockId
from contracts.layout import KVLayout
from kv_transfer.chunks import chunk_plan as plan


class GrantedPages:
    """One granted attempt. Raises ValueError if the grant does not fit its offer or the pool."""

    def __init__(self, offer: Offer, grant: Grant, layout: KVLayout, num_blocks: int) -> None:
        plan.check_pages(grant.pages, num_blocks)
        if grant.skip_tokens % layout.block_size or not 0 <= grant.skip_tokens < offer.num_tokens:
            raise ValueError(
                f"skip_tokens is {grant.skip_tokens} of {offer.num_tokens}; blocks are {layout.block_size}"
            )
        expected = layout.num_blocks(offer.num_tokens - grant.skip_tokens)
        if len(grant.pages) != expected:
            raise ValueError(f"{len(grant.pages)} pages granted, {expected} are needed")
        self.offer, self.grant, self._layout = offer, grant, layout
        self._landed: set[int] = set()
        self.nbytes = 0
        self._filled = [False] * expected

    def check(self, header: ChunkHeader) -> str | None:
        """Why this chunk must not land, or None."""
        if header.layout_id != self._layout.layout_id:
            return f"layout_id is {header.layout_id}, granted was {self._layout.layout_id}"
        if header.index in self._landed:
            return f"chunk {header.index} has landed already"
        if reason := self._check_tokens(header):
            return reason
        if header.nbytes != plan.chunk_nbytes(self._layout, header.num_tokens):
            return f"{header.nbytes} bytes for {header.num_tokens} tokens"
        if any(self._filled[self._blocks(header)]):
            return f"tokens from {header.first_token} on have landed already"
        return None

    def pages(self, header: ChunkHeader) -> list[BlockId]:
        """The granted pages of a checked chunk, in token order."""
        return self.grant.pages[self._blocks(header)]

    def chunk_received(self, header: ChunkHeader) -> None:
        blocks = self._blocks(header)
        self._landed.add(header.index)
        self.nbytes += header.nbytes
        self._filled[blocks] = [True] * (blocks.stop - blocks.start)

    def is_whole(self, num_chunks: int) -> bool:
        """So many chunks have landed, and hold every token that was granted."""
        return len(self._landed) == num_chunks and all(self._filled)

    def _check_tokens(self, header: ChunkHeader) -> str | None:
        first, end, block_size = header.first_token, header.first_token + header.num_tokens, self._layout.block_size
        if first % block_size or first < self.grant.skip_tokens:
            return f"first_token is {first}; the grant starts at {self.grant.skip_tokens}, blocks are {block_size}"
        if header.num_tokens <= 0 or end > self.offer.num_tokens:
            return f"tokens {first} to {end} are not all in the {self.offer.num_tokens} offered"
        if end % block_size and end != self.offer.num_tokens:
            return f"the chunk ends at token {end}, inside a block"
        return None

    def _blocks(self, header: ChunkHeader) -> slice:
        first = (header.first_token - self.grant.skip_tokens) // self._layout.block_size
        return slice(first, first + self._layout.num_blocks(header.num_tokens))
