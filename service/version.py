"""Which Tandem this is."""

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    """The installed version, or 0.0.0 when run from a checkout."""
    try:
        return version("tandem")
    except PackageNotFoundError:
        return "0.0.0"
