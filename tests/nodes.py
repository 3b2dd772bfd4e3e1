"""A worker as the registry lists it. Not a test."""

from typing import Any

from contracts.ids import Incarnation, WorkerId
from contracts.node import NodeInfo, Role


def node_info(**changes: Any) -> NodeInfo:
    fields: dict[str, Any] = {
        "worker_id": WorkerId("w"),
        "incarnation": Incarnation("1"),
        "role": Role.PREFILL,
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
    return NodeInfo(**(fields | changes))
