"""HTTP to a process of this machine."""

import http.client
import urllib.request


def open_local(request: str | urllib.request.Request, timeout_s: float) -> http.client.HTTPResponse:
    """`urlopen` without the proxy that the environment names: it stands elsewhere, and knows none of our ports.

    Raises what `urlopen` raises.
    """
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s)
