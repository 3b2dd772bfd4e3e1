"""The limit on a device's memory that the staging of all links of a core takes together.

It is known when the cache is sized.
"""

import threading

from contracts.errors import TransferError

STAGING_NBYTES = 768 << 20
NUM_SLOTS, SLOT_NBYTES = 3, 64 << 20
"""The slots of a link, and the most bytes that one of them has."""


class Allowance:
    """The memory that is left for the staging of further links.

    Each link takes at most half of it, so that there is something for the next: with the numbers above and blocks of 4
    MiB three links have slots of 64 MiB, those after them of 32, 16, 8 and 4.
    """

    def __init__(self, nbytes: int = STAGING_NBYTES) -> None:
        self._left, self._lock = nbytes, threading.Lock()

    def take(self, unit_nbytes: int, most_nbytes: int = SLOT_NBYTES) -> int:
        """Return the bytes of each of a new link's slots.

        They are whole units, at least one, else at most `most_nbytes`. Raises TransferError if not enough is left.
        """
        with self._lock:
            share = min(most_nbytes, self._left // 2 // NUM_SLOTS)
            slot_nbytes = max(share // unit_nbytes, 1) * unit_nbytes
            if NUM_SLOTS * slot_nbytes > self._left:
                raise TransferError(
                    f"staging of {NUM_SLOTS} x {slot_nbytes >> 10} KiB is not to be had: the links there are have left "
                    f"{self._left >> 10}"
                )
            self._left -= NUM_SLOTS * slot_nbytes
            return slot_nbytes

    def give_back(self, slot_nbytes: int) -> None:
        with self._lock:
            self._left += NUM_SLOTS * slot_nbytes
