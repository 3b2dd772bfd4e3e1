"""The mixed service: `python -m mixed_svc --help`."""

import sys

from worker.main import run_role

sys.exit(run_role("mixed", sys.argv[1:]))
