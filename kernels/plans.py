"""Tile sizes by operation, shape and token count: shipped defaults per architecture, overlaid by a tuned cache file."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels.caps import Caps

Plan = dict[str, Any]
HERE = Path(__file__).parent


class PlanTable:
    """Plans of one operation and shape, by the largest token count each is meant for; `cc` serves fallbacks, and
    `sm_count` what depends on the batch too."""

    def __init__(self, rows: Mapping[int, Plan], cc: int = 0, sm_count: int = 1):
        self.rows = dict(sorted(rows.items()))
        self.cc, self.sm_count = cc, sm_count

    def pick(self, num_tokens: int, fallback: Plan) -> Plan:
        """The plan of the smallest bucket that holds `num_tokens`, else of the largest, else the fallback."""
        for bucket, plan in self.rows.items():
            if num_tokens <= bucket:
                return plan
        return next(reversed(self.rows.values())) if self.rows else fallback


EMPTY = PlanTable({})


@dataclass(frozen=True)
class TunedPlans:
    """rows: {"op/implementation|spec key": {bucket: plan}} from the tuned cache; the shipped defaults lie beneath."""

    tuned: Mapping[str, Mapping[int, Plan]] = field(default_factory=dict)

    def table(self, op: str, key: str, cc: int, sm_count: int = 1) -> PlanTable:
        name = f"{op}|{key}"
        rows = self.tuned.get(name) or defaults(cc).get(name, {})
        return PlanTable(rows, cc, sm_count)


def defaults(cc: int) -> dict[str, dict[int, Plan]]:
    """The plans shipped in the package; Blackwell has none of its own yet, and the code's fallbacks apply there."""
    path = HERE / "defaults" / f"sm_{cc}.json"
    return _parse(json.loads(path.read_text())) if path.exists() else {}


def cache_path(root: Path, caps: Caps) -> Path:
    """One file per card, versions and kernel source, so that a plan never outlives what it was tuned on."""
    facts = [caps.name, caps.cc, caps.sm_count, caps.torch, caps.triton, caps.flashinfer, source_hash()]
    return root / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"


def load(path: Path) -> TunedPlans:
    """Read a tuned cache; a missing or damaged file is a miss, never an error."""
    try:
        return TunedPlans(_parse(json.loads(path.read_text())))
    except (OSError, ValueError, AttributeError):
        return TunedPlans()


def save(path: Path, plans: TunedPlans) -> None:
    """Write atomically: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(plans.tuned, indent=1, sort_keys=True))
    os.replace(scratch, path)


def digest(plans: TunedPlans) -> str:
    """Equal on two ranks exactly when they would launch the same tiles."""
    return hashlib.sha256(json.dumps(plans.tuned, sort_keys=True).encode()).hexdigest()[:16]


def source_hash() -> str:
    text = b"".join(path.read_bytes() for path in sorted(HERE.rglob("*.py")))
    return hashlib.sha256(text).hexdigest()[:16]


def _parse(raw: Mapping[str, Mapping[str, Plan]]) -> dict[str, dict[int, Plan]]:
    return {name: {int(bucket): dict(plan) for bucket, plan in rows.items()} for name, rows in raw.items()}
