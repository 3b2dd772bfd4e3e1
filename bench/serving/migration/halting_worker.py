"""A worker whose core halts at a point of a migration; in all else it is a worker."""

import sys

from worker import main as worker_main

CORE = "bench.serving.migration.halting_core"

if __name__ == "__main__":
    worker_main.CORE_MODULE = CORE
    sys.exit(worker_main.main())
