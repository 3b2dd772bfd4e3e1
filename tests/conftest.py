"""Threads that wait must not spin here: tests run beside the processes they started, on few cores."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is first imported, which is after this
