"""The variables that a command is started with. Not a test."""

import os


def plain_environment() -> dict[str, str]:
    """Ours without settings: a test run has some of its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}


def import_path(*first: object) -> str:
    """A PYTHONPATH with these folders first: what is on ours stays, since packages may lie there."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*map(str, first), *filter(None, before)])
