"""The gateway's preStop hook: wait until no answers are in progress, or until the time is over.

`python -IS wait_idle.py http://127.0.0.1:8000/metrics --settle-s=10 --timeout-s=600`

A gateway that is told to stop ends its streams, so it is told only then. First it waits until load balancers have read
that it gets no new requests.
"""

import argparse
import http.client
import re
import time
from urllib.parse import urlsplit

HTTP_TIMEOUT_S, POLL_S = 3.0, 1.0
INFLIGHT = re.compile(r"^tandem_gateway_inflight (\S+)", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the gateway's metrics")
    parser.add_argument("--settle-s", type=float, default=10.0, help="how long new requests may still arrive")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="how long to wait after that")
    options = parser.parse_args()
    time.sleep(options.settle_s)
    deadline_s = time.monotonic() + options.timeout_s
    while time.monotonic() < deadline_s and num_inflight(options.url):
        time.sleep(POLL_S)


def num_inflight(metrics_url: str) -> float:
    """Return the number of answers in progress.

    Raises OSError or ValueError where the gateway does not say.
    """
    url = urlsplit(metrics_url)
    connection = http.client.HTTPConnection(url.netloc, timeout=HTTP_TIMEOUT_S)
    try:
        connection.request("GET", url.path)
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    if (found := INFLIGHT.search(text)) is None:
        raise ValueError(f"{metrics_url} has no tandem_gateway_inflight")
    return float(found[1])


if __name__ == "__main__":
    main()
