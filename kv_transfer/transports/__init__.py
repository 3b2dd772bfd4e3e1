"""Ways to carry staged bytes from one process to another, behind the interface in base.py."""

import os

# ucxx sets a variable that its own UCX does not know, of which each process would warn on standard output. Read when
# UCX is loaded.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
# Where all else is logged; standard output is for what a program was asked for.
os.environ.setdefault("UCX_LOG_FILE", "stderr")
