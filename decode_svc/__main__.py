"""The decode service: `python -m decode_svc --help`."""

import sys

from worker.main import run_role

sys.exit(run_role("decode", sys.argv[1:]))
