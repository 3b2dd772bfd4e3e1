"""The pages of groups of layers that live shorter than a sequence, as far as one holder has them."""

from dataclasses import dataclass


@dataclass(eq=False)
class PageLease:
    """What one sequence, writer or reader holds of the groups of short life.

    `quotas`: of each group, the pages that it may have at any time. `held`: of each, the blocks whose pages it holds,
    by their index in the sequence. `branches`: at the end of so many blocks others may go on. `pinned`:
    what a continuation behind the first so many tokens needs is not let go up to the last, since a peer reads it.
    `num_owners`: it ends with the last of them.
    """

    quotas: list[int]
    held: list[dict[int, int]]
    branches: tuple[int, ...] = ()
    pinned: range | None = None
    num_owners: int = 1

    def weight(self, number: int) -> int:
        return max(self.quotas[number], len(self.held[number]))
