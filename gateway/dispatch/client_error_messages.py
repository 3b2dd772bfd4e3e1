"""What clients hear of a worker's fault: what it was and what to do, without anything internal.

Workers' own words are for the log: they name links, hosts and memory, which clients can't use and need not know.
"""

import msgspec

from contracts.errors import (
    AdapterMissing,
    AuthFailed,
    Corrupt,
    DeadlineExceeded,
    LayoutMismatch,
    NotFound,
    OutOfBlocks,
    Overloaded,
    PeerLost,
    RequestError,
    TransferError,
    Unavailable,
)
from contracts.events import Failed

AGAIN = "send the request again"
OF_THE_REQUEST = frozenset({RequestError.code, NotFound.code})
"""Errors that are the client's own, whose words name what it sent."""

_HANDOFF = f"the KV cache of this answer could not be handed from prefill to decode; {AGAIN}"
WORDS = {
    TransferError.code: _HANDOFF,
    AuthFailed.code: _HANDOFF,
    LayoutMismatch.code: _HANDOFF,
    PeerLost.code: f"a worker of this request was lost; {AGAIN}",
    Corrupt.code: f"the KV cache of this answer arrived damaged; {AGAIN}",
    Unavailable.code: f"a worker can't take this request now; {AGAIN}",
    AdapterMissing.code: f"a worker that was to take this request has not loaded its adapter; {AGAIN}",
    "draining": f"a worker that was to take this request is being stopped; {AGAIN}",
    OutOfBlocks.code: f"a worker has no room left for this answer; {AGAIN} later",
    Overloaded.code: "the workers are full",
    DeadlineExceeded.code: "no complete answer within the request's time",
}


def for_clients(event: Failed) -> Failed:
    """Return `event` with the words that its client is to hear."""
    if event.code in OF_THE_REQUEST:
        return event
    return msgspec.structs.replace(event, message=WORDS.get(event.code, "internal error; see the gateway's log"))
