"""An engine core whose steps are counted out.

`stepped_worker` runs a worker whose core this is. Once the file that the environment names exists, the core takes as
many steps in all as it says, and goes on with everything else meanwhile. Not a test.
"""

import os
import time
from pathlib import Path

from mixed_svc.core import make_roles
from worker.core.engine_core import EngineCore
from worker.core.main import run

STEPS_FILE = "TEST_STEPS_FILE"
"""Its name in the environment."""
POLL_S = 0.002


class StepCount:
    """The steps that were taken since they are counted."""

    def __init__(self, file: Path) -> None:
        self._file, self._num_taken = file, 0

    def takes(self) -> bool:
        """Return whether the next step may be taken, which counts it."""
        try:
            num_let = int(self._file.read_text("utf-8"))
        except FileNotFoundError:
            return True
        self._num_taken += (is_left := self._num_taken < num_let)
        return is_left


def count_steps(count: StepCount) -> None:
    """Let the core of this process take only steps that `count` allows."""
    step = EngineCore._step

    def counted(core: EngineCore) -> None:
        if count.takes():
            step(core)
        else:
            time.sleep(POLL_S)

    EngineCore._step = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    count_steps(StepCount(Path(os.environ[STEPS_FILE])))
    run(make_roles)
