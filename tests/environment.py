"""The variables that a command is started with. Not a test."""

import os


def plain_environment() -> dict[str, str]:
    """Ours without settings: a test run has some of its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
