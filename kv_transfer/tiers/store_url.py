"""The URLs of stores that workers share, checked before anything is started."""

import re
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, urlsplit

SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "file")
_EXAMPLE = "redis://HOST:6379/0"
_OWN_PARAMETERS = (
    "decode_responses", "encoding", "retry", "retry_on_error", "retry_on_timeout", "socket_connect_timeout",
    "socket_timeout",
)  # fmt: skip
"""What the tier sets itself: a prompt may wait so long for a store, and records are bytes."""


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
    return _wrong_redis(parts) if host else f"it must name a host, such as {_EXAMPLE}"


def _wrong_redis(parts: SplitResult) -> str:
    if not re.fullmatch("/?[0-9]*/?", parts.path):  # redis-py takes any other for database 0
        return f"the number of a database stands behind the host, such as {_EXAMPLE}"
    if "+cluster" in parts.scheme and parts.path.strip("/0"):
        return "a cluster has only database 0"
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    own = [name for name in _OWN_PARAMETERS if name in given]
    return f"leave out {', '.join(own)}, which Tandem sets itself" if own else ""
