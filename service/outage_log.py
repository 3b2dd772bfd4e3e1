"""The log of repeated failures, which notes when they begin and when they are over."""

import logging


class OutageLog:
    """A log of one kind of outage; `over` is the message at its end, or nothing."""

    def __init__(self, log: logging.Logger, over: str = "") -> None:
        self._log, self._over = log, over
        self._kinds: set[str] = set()

    @property
    def is_on(self) -> bool:
        return bool(self._kinds)

    def failed(self, words: str, kind: str = "") -> None:
        """Note a failure; only the first of each kind is logged.

        One reason may follow another without success in between.
        """
        if kind not in self._kinds:
            self._log.warning("%s", words)
        self._kinds.add(kind)

    def worked(self) -> None:
        if self.is_on and self._over:
            self._log.warning("%s", self._over)
        self._kinds.clear()
