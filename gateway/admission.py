"""How many answers this gateway works on at once."""

from contracts.errors import Overloaded


class Admission:
    """Counts from the moment a place is looked for to the last byte, so that many who wait for one are counted too."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_taken = 0

    def take(self, count: int) -> None:
        """Raises Overloaded, and then nothing is taken."""
        if self.num_taken + count > self._limit:
            raise Overloaded(f"more than {self._limit} answers in progress")
        self.num_taken += count

    def give_back(self, count: int) -> None:
        assert count <= self.num_taken
        self.num_taken -= count
