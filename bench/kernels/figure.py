"""The figures of the kernel benchmark."""

import sys
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One figure of a result file.

    `limit` is the fraction of the byte or FLOP limit that the value reaches; `peer` is another way of doing the same
    work.
    """

    name: str
    params: dict[str, Any]
    value: float | bool
    unit: str
    limit: float | None = None
    peer: str | None = None
    peer_value: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def show(row: Figure) -> Figure:
    """Print a row at once, so that a run that is cut short still leaves figures, and return it."""
    params = " ".join(f"{k}={v}" for k, v in row.params.items())
    limit = "" if row.limit is None else f"  {row.limit:.0%} of limit"
    peer = "" if row.peer is None else f"  | {row.peer} {row.peer_value:.4g}"
    extra = "" if not row.extra else f"  {row.extra}"
    sys.stdout.write(f"{row.name:22} {params:48} {row.value:.5g} {row.unit}{limit}{peer}{extra}\n")
    sys.stdout.flush()
    return row
