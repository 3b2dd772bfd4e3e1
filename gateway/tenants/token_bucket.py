"""A limit by the minute, whose unused rest may be taken at once."""


class TokenBucket:
    """A bucket that fills by `per_minute` in a minute, and holds so much at most; it begins full.

    What is known only afterwards may be taken beyond its end: it is owed then, and nothing is given until it is paid.
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._level, self._at_s = float(per_minute), 0.0

    def change(self, per_minute: int, now: float) -> None:
        """Have another limit from now on; what was taken stays taken."""
        taken = self._per_minute - self._level_at(now)
        self._per_minute, self._level, self._at_s = per_minute, per_minute - taken, now

    def wait_s(self, amount: int, now: float) -> float:
        """Return in how many seconds `amount` could be taken, of more than the bucket holds when it is full."""
        missing = min(amount, self._per_minute) - self._level_at(now)
        return max(0.0, missing * 60 / self._per_minute)

    def is_full(self, now: float) -> bool:
        return self._level_at(now) >= self._per_minute

    def take(self, amount: int, now: float) -> None:
        """Take an amount, whether it is there or not; a negative one gives back."""
        self._level, self._at_s = min(self._level_at(now) - amount, float(self._per_minute)), now

    def _level_at(self, now: float) -> float:
        filled = max(0.0, now - self._at_s) * self._per_minute / 60
        return min(self._level + filled, float(self._per_minute))
