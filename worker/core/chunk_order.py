"""The order in which chunks arrive: tokens in turn, and of each stretch every group of layers."""

from dataclasses import dataclass

from contracts.errors import Corrupt
from contracts.handoff import ChunkHeader


@dataclass
class ChunkOrder:
    """How far the chunks of an attempt have come, which bring `num_groups` groups of layers.

    All tokens before `next_token` are here with all of their groups.
    """

    num_groups: int = 1
    next_token: int = 0
    num_chunks: int = 0
    nbytes: int = 0
    _group: int = 0
    _num_tokens: int = 0

    def take(self, header: ChunkHeader) -> None:
        """Count a chunk that has arrived. Raises Corrupt if it is not the next."""
        place = header.index, header.first_token, header.group
        if place != (self.num_chunks, self.next_token, self._group):
            expected = f"expected {self.num_chunks} at {self.next_token} of group {self._group}"
            raise Corrupt(f"chunk {header.index} at token {header.first_token} of group {header.group}; {expected}")
        if self._group and header.num_tokens != self._num_tokens:
            raise Corrupt(f"num_tokens is {header.num_tokens} in group {self._group}, {self._num_tokens} before")
        self.num_chunks += 1
        self.nbytes += header.nbytes
        self._num_tokens = header.num_tokens
        self._group = (self._group + 1) % self.num_groups
        if self._group == 0:
            self.next_token += header.num_tokens

    def contradiction(self, num_chunks: int, num_blocks: int) -> str | None:
        """Return why so many chunks in all can't bring the `num_blocks` that are missing, or None.

        Each stretch of tokens holds a block at least. What has come of one that is not whole is counted as missing.
        """
        num_coming = num_chunks - (self.num_chunks - self._group)
        if min(num_blocks, 1) * self.num_groups <= num_coming <= num_blocks * self.num_groups:
            return None
        return f"{num_chunks} chunks are claimed, {self.num_chunks} came and {num_blocks} blocks are missing"
