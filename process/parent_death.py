"""The program that becomes another one, which the kernel kills when the parent dies.

`python parent_death.py PARENT_PID PROGRAM ARG...`

Processes are started through it (`die_with_parent`), so that nothing is left behind even when the parent is killed. It
runs as a file, in isolated mode, and imports as little as it can.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(command: Sequence[str]) -> list[str]:
    """Return the command that runs `command`, which then dies with the thread that started it."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), *command]


def main() -> None:
    parent_pid, program = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # the parent died before the line above
        sys.exit("the parent is gone")
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"{program[0]} can't be run: {error.strerror}")


if __name__ == "__main__":
    main()
