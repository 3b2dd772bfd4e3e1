"""What fails at each attempt for a while, in the log when that begins and when it is over."""

import logging


class OutageLog:
    """`over`: what is said at its end; nothing if that is no news."""

    def __init__(self, log: logging.Logger, over: str = "") -> None:
        self._log, self._over = log, over
        self._kinds: set[str] = set()

    @property
    def is_on(self) -> bool:
        return bool(self._kinds)

    def failed(self, words: str, kind: str = "") -> None:
        """The words of the first of each kind are said: one reason may follow another, and nothing work between."""
        if kind not in self._kinds:
            self._log.warning("%s", words)
        self._kinds.add(kind)

    def worked(self) -> None:
        if self.is_on and self._over:
            self._log.warning("%s", self._over)
        self._kinds.clear()
