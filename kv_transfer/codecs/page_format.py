"""What a codec must know of the pages that it is given."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from contracts.layout import ITEM_NBYTES


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The format of pages `[num_kv_heads, block_size, head_dim]` of `dtype`, a key of ITEM_NBYTES.

    Keys are those that attention reads, after the rotary embedding. A latent goes as keys do: attention multiplies
    queries by it.
    """

    dtype: str
    num_kv_heads: int
    block_size: int
    head_dim: int

    @property
    def item_nbytes(self) -> int:
        return ITEM_NBYTES[self.dtype]

    @property
    def num_items(self) -> int:
        """Return the numbers of one page."""
        return self.num_kv_heads * self.block_size * self.head_dim

    @property
    def page_nbytes(self) -> int:
        return self.num_items * self.item_nbytes


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages of one plane that follow each other in token order.

    `num_exact`: so many at the start keep every bit at every level.
    """

    num_pages: int
    is_key: bool
    num_exact: int = 0


def runs_of(first: int, last: int, pages_a_plane: int, plane_is_key: Sequence[bool], num_exact: int) -> list[PageRun]:
    """Return the runs of the pages `[first, last)` of a chunk that lies plane by plane.

    `num_exact`: pages at the start of each plane that keep every bit.
    """
    return list(_runs(first, last, pages_a_plane, plane_is_key, num_exact))


def _runs(first: int, last: int, pages_a_plane: int, plane_is_key: Sequence[bool], num_exact: int) -> Iterable[PageRun]:
    while first < last:
        plane, start = divmod(first, pages_a_plane)
        end = min(last, (plane + 1) * pages_a_plane)
        size = end - first
        yield PageRun(size, plane_is_key[plane], min(max(0, num_exact - start), size))
        first = end
