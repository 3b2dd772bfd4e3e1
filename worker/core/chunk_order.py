"""The order in which chunks arrive: tokens in turn, and of each stretch every group with pages there."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.errors import Corrupt
from contracts.handoff import ChunkHeader


@dataclass
class ChunkOrder:
    """How far the chunks of an attempt have come, those of each group from `first_tokens` on.

    All tokens before `next_token` are here with all that moves of them.
    """

    first_tokens: Sequence[int] = (0,)
    next_token: int = field(init=False)
    num_chunks: int = 0
    nbytes: int = 0
    _group: int = 0
    _end: int | None = None
    _num_in_stretch: int = 0

    def __post_init__(self) -> None:
        self.next_token = min(self.first_tokens)

    @property
    def num_groups(self) -> int:
        return len(self.first_tokens)

    def take(self, header: ChunkHeader) -> None:
        """Count a chunk that has arrived. Raises Corrupt if it is not the next."""
        end = header.first_token + header.num_tokens
        group = self._next_group(end if self._end is None else self._end)
        expected = self.num_chunks, max(self.next_token, self.first_tokens[group]), group
        if (header.index, header.first_token, header.group) != expected:
            words = f"expected {expected[0]} at {expected[1]} of group {group}"
            raise Corrupt(f"chunk {header.index} at token {header.first_token} of group {header.group}; {words}")
        if self._end is not None and end != self._end:
            raise Corrupt(f"a chunk ends at token {end} in group {group}, one before it at {self._end}")
        self.num_chunks += 1
        self.nbytes += header.nbytes
        self._group, self._end, self._num_in_stretch = group + 1, end, self._num_in_stretch + 1
        if not any(first < end for first in self.first_tokens[group + 1 :]):
            self.next_token, self._group, self._end, self._num_in_stretch = end, 0, None, 0

    def contradiction(self, num_chunks: int, num_tokens: int, block_size: int) -> str | None:
        """Return why so many chunks in all can't bring what is missing of `num_tokens`, or None.

        Each stretch of tokens holds a block at least. What has come of one that is not whole is counted as missing.
        """
        missing = [max(0, -(-(num_tokens - max(self.next_token, t)) // block_size)) for t in self.first_tokens]
        num_coming = num_chunks - (self.num_chunks - self._num_in_stretch)
        if sum(count > 0 for count in missing) <= num_coming <= sum(missing):
            return None
        return f"{num_chunks} chunks are claimed, {self.num_chunks} came and {max(missing)} blocks are missing"

    def _next_group(self, end: int) -> int:
        """Return the next group of the stretch up to token `end`, the last of all if none has pages there."""
        left = range(self._group, self.num_groups)
        return next((group for group in left if self.first_tokens[group] < end), self.num_groups - 1)
