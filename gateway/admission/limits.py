"""How much this gateway takes at once: answers that it works on, and bodies that arrive."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from contracts.errors import Overloaded

SMALL_NBYTES = 64 << 10


class ConcurrencyLimit:
    """A limit of the answers in progress, those that wait for a place included."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_taken = 0

    @property
    def num_free(self) -> int:
        return self.limit - self.num_taken

    def take(self, count: int) -> None:
        """Raises Overloaded, and then nothing is taken."""
        if count > self.num_free:
            raise Overloaded(f"more than {self.limit} answers in progress")
        self.num_taken += count

    def give_back(self, count: int) -> None:
        assert count <= self.num_taken
        self.num_taken -= count


class BodyMemoryLimit:
    """A limit of what is held of bodies that are not whole yet.

    The first SMALL_NBYTES of each are free: a small request is read whatever large ones others send.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self._limit_nbytes = limit_nbytes
        self.nbytes = 0

    @contextmanager
    def arriving(self) -> Iterator[Callable[[int], None]]:
        """One body. Its reader tells how long it is so far, and gets Overloaded if there is no room for that."""
        held_nbytes = 0

        def grown(nbytes: int) -> None:
            nonlocal held_nbytes
            more = max(0, nbytes - SMALL_NBYTES) - held_nbytes
            if self.nbytes + more > self._limit_nbytes:
                raise Overloaded("more is being sent to this gateway than it can hold")
            self.nbytes += more
            held_nbytes += more

        try:
            yield grown
        finally:
            self.nbytes -= held_nbytes
