"""The container's health check: exit 0 if the URL answers 200, or else 1 with the reason.

`python -IS healthcheck.py http://127.0.0.1:9000/health`
"""

import http.client
import sys
from urllib.parse import urlsplit

TIMEOUT_S = 3.0


def main() -> None:
    url = urlsplit(sys.argv[1])
    connection = http.client.HTTPConnection(url.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("GET", url.path)
        answer = connection.getresponse()
        body = answer.read()
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
    finally:
        connection.close()
    if answer.status != 200:
        sys.exit(f"{sys.argv[1]}: {answer.status} {body[:500]!r}")


if __name__ == "__main__":
    main()
