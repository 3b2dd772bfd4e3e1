"""The faults of jobs that threads do for others, who wait for the next ones: a thread outlives each."""

import logging

_log = logging.getLogger(__name__)


class JobFaults:
    """The errors of a thread's jobs that nobody foresaw.

    All are counted, and the first of each type is told with its traceback.
    `what`: of the jobs, as the log names them, such as "loading KV from the disk tier".
    """

    def __init__(self, what: str) -> None:
        self.num_failed = 0
        self._what, self._told = what, set[type[Exception]]()

    def add(self, error: Exception) -> None:
        """Count a job that failed."""
        self.num_failed += 1
        if type(error) not in self._told:
            self._told.add(type(error))
            name = type(error).__name__
            _log.error("%s failed, and goes on with what is next; %s is told once", self._what, name, exc_info=error)
