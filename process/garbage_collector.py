"""Python's garbage collector stops every thread of a process while it looks for cycles among all objects there are.
What a service's start leaves, modules mostly, is looked at in vain: 110 000 objects in a gateway, 210 000 in an engine
core. Under 45 requests a second a gateway did so every 15 s, and gave no token to anybody for 40 to 60 ms; it is 2 to 4
since they are frozen.
"""

import gc
import time


class GcMetrics:
    """The collector's work since `settle()`: how often, seconds in all, the longest."""

    def __init__(self) -> None:
        self.num = 0
        self.seconds = self.longest_s = self._began_s = 0.0

    def __call__(self, phase: str, _info: dict[str, int]) -> None:
        """As an entry of gc.callbacks."""
        if phase == "start":
            self._began_s = time.perf_counter()
            return
        took_s = time.perf_counter() - self._began_s
        self.num += 1
        self.seconds += took_s
        self.longest_s = max(self.longest_s, took_s)


COLLECTIONS = GcMetrics()
"""Of this process: there is one collector in it."""


def freeze_startup_objects() -> None:
    """To be called once a process is ready: what is there now stays, and the collector looks at what comes only."""
    gc.collect()
    gc.freeze()
    if COLLECTIONS not in gc.callbacks:
        gc.callbacks.append(COLLECTIONS)
