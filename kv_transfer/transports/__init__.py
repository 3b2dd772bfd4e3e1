"""The transports that carry staged bytes from one process to another, behind the interface in base.py."""

import os

# ucxx sets a variable that its own UCX does not know, and each process would warn about it on standard output. UCX
# reads this when it is loaded.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
# All other logs go there too; standard output is for the results of a program.
os.environ.setdefault("UCX_LOG_FILE", "stderr")
