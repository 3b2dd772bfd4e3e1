"""The release of this installation."""

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    """Return the installed version, or 0.0.0 when run from a checkout."""
    try:
        return version("tandem")
    except PackageNotFoundError:
        return "0.0.0"
