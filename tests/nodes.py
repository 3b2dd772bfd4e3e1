"""A worker as the registry lists it. Not a test."""

from typing import Any

from contracts.ids import Incarnation, WorkerId
from contracts.node import NodeInfo, TransferCapabilities, WorkerRole


def node_info(**changes: Any) -> NodeInfo:
    fields: dict[str, Any] = {
        "worker_id": WorkerId("w"),
        "incarnation": Incarnation("1"),
        "role": WorkerRole.PREFILL,
        "url": "http://w",
        "transfer": "w:1",
        "model": "m",
        "layout_id": "l",
        "max_model_len": 100,
        "capacity_tokens": 1000,
        "version": "0",
        "pid": 1,
        "core_pid": 2,
    }
    fields |= changes
    fields.setdefault("ways", ways(fields["layout_id"]))
    return NodeInfo(**fields)


def ways(*layout_ids: str, by: str = "tcp", memory: str = "host") -> TransferCapabilities:
    """To send and take KV of these layouts. `by`: transports, in a line."""
    return TransferCapabilities(
        memory=memory, sends=by.split(), takes={layout_id: by.split() for layout_id in layout_ids}
    )
