"""The HTTP client for processes of this machine."""

import http.client
import urllib.request


def open_local(request: str | urllib.request.Request, timeout_s: float) -> http.client.HTTPResponse:
    """Call `urlopen` without the proxy that the environment names, which does not know our ports.

    Raise what `urlopen` raises.
    """
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s)
