"""The prefill service: `python -m prefill_svc --help`."""

import sys

from worker.main import run_role

sys.exit(run_role("prefill", sys.argv[1:]))
