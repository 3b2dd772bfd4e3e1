"""Tile sizes by operation, shape and token count.

Shipped defaults per architecture, overlaid by a tuned file.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels.caps import Caps

Plan = dict[str, Any]
HERE = Path(__file__).parent
_AGAIN = "the shipped plans are taken; run python -m kernels.tune again, or remove it"


class PlanTable:
    """Plans of one operation and shape, by the largest token count each is meant for.

    `cc` serves fallbacks, and `sm_count` what depends on the batch too.
    """

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
    """rows: {"op/implementation|spec key": {bucket: plan}} from the tuned cache.

    The shipped defaults lie beneath.
    """

    tuned: Mapping[str, Mapping[int, Plan]] = field(default_factory=dict)

    def table(self, op: str, key: str, cc: int, sm_count: int = 1) -> PlanTable:
        name = f"{op}|{key}"
        rows = self.tuned.get(name) or defaults(cc).get(name, {})
        return PlanTable(rows, cc, sm_count)


def defaults(cc: int) -> dict[str, dict[int, Plan]]:
    """The plans shipped in the package.

    Blackwell has none of its own yet, and the code's fallbacks apply there.
    """
    path = HERE / "defaults" / f"sm_{cc}.json"
    return _parse(json.loads(path.read_text())) if path.exists() else {}


class TuningRefused(ValueError):
    """A file of tuned plans that is damaged, or was made for another card or other versions.

    Its words say which.
    """


def cache_path(root: Path, caps: Caps) -> Path:
    """Return the file of this kind of card."""
    return root / f"{re.sub(r'[^a-z0-9]+', '-', caps.name.lower()).strip('-')}.json"


def load(path: Path, caps: Caps) -> TunedPlans:
    """Read what was tuned for this card and these versions; nothing, if nothing was. Raises TuningRefused."""
    if not path.exists():
        return TunedPlans()
    try:
        found = json.loads(path.read_text())
        made_for, plans = dict(found["made_for"]), decode(json.dumps(found["plans"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise TuningRefused(f"{path} is damaged ({error}): {_AGAIN}") from error
    for name, value in _facts(caps).items():
        if made_for.get(name) != value:
            raise TuningRefused(f"{path} was tuned for {name} {made_for.get(name)}, and here it is {value}: {_AGAIN}")
    return plans


def save(path: Path, plans: TunedPlans, caps: Caps) -> None:
    """Write atomically: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    document = {"made_for": _facts(caps), "plans": plans.tuned}
    scratch.write_text(json.dumps(document, indent=1, sort_keys=True))
    os.replace(scratch, path)


def encode(plans: TunedPlans) -> str:
    return json.dumps(plans.tuned, sort_keys=True)


def decode(text: str) -> TunedPlans:
    """Return what `encode` wrote. Raises ValueError, TypeError or AttributeError for anything else."""
    return TunedPlans(_parse(json.loads(text)))


def _facts(caps: Caps) -> dict[str, str]:
    """Return what a plan must not outlive: the card, the versions, and the kernels' source."""
    versions = {"torch": caps.torch, "triton": caps.triton, "flashinfer": caps.flashinfer}
    return {
        "card": caps.name,
        "compute capability": str(caps.cc),
        "number of multiprocessors": str(caps.sm_count),
        **{name: ".".join(map(str, found or ())) or "none" for name, found in versions.items()},
        "kernels": source_hash(),
    }


def source_hash() -> str:
    text = b"".join(path.read_bytes() for path in sorted(HERE.rglob("*.py")))
    return hashlib.sha256(text).hexdigest()[:16]


def _parse(raw: Mapping[str, Mapping[str, Plan]]) -> dict[str, dict[int, Plan]]:
    return {name: {int(bucket): dict(plan) for bucket, plan in rows.items()} for name, rows in raw.items()}
