"""What fails at each attempt for a while, in the log when that begins and when it is over."""

import logging


class Outage:
    """`over`: what is said at its end; nothing if that is no news."""

    def __init__(self, log: logging.Logger, over: str = "") -> None:
        self._log, self._over = log, over
        self.is_on = False

    def failed(self, words: str) -> None:
        if not self.is_on:
            self._log.warning("%s", words)
        self.is_on = True

    def worked(self) -> None:
        if self.is_on and self._over:
            self._log.warning("%s", self._over)
        self.is_on = False
