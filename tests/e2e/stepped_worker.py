"""A worker whose core's steps are counted out; in all else it is a worker. Not a test."""

import sys

from worker import main as worker_main

CORE = "tests.e2e.stepped_core"

if __name__ == "__main__":
    worker_main.CORE_MODULE = CORE
    sys.exit(worker_main.main())
