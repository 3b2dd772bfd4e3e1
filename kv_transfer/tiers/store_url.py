"""The URLs of stores that workers share, checked before anything is started."""

from pathlib import Path
from urllib.parse import urlsplit

SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "file")
_EXAMPLE = "redis://HOST:6379/0"


def wrong_store_url(url: str) -> str:
    """Return what is wrong with the URL of a store, and how it should be; empty if it can be used.

    What it says holds no part of a password.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # parsed only on access
    except ValueError:  # its message may hold a part of the password
        return "its port must be a number, and / ? # [ in a password are written as %2F %3F %23 %5B"
    if parts.scheme not in SCHEMES or "://" not in url:
        return f"it must begin with {', '.join(f'{name}://' for name in SCHEMES)}"
    if parts.scheme == "file":
        is_folder = parts.netloc in ("", "localhost") and Path(parts.path).is_absolute()
        return "" if is_folder else "a folder is named by three slashes: file:///mnt/kv"
    return "" if host else f"it must name a host, such as {_EXAMPLE}"
