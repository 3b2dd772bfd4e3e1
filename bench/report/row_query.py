"""The look-up of a row in a result file by name and parameters."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bench.report.result import RESULTS

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class RowQuery:
    """The name and some parameters that the one row of a file must have."""

    file: str
    name: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def row(self) -> Mapping[str, Any]:
        """Return the one row that fits; raise LookupError if there is none, or more than one."""
        found = [row for row in rows(self.file) if row["name"] == self.name and self._fits(row["params"])]
        if len(found) != 1:
            raise LookupError(f"{self.file} has {len(found)} rows {self.name!r} with {dict(self.params)}, not one")
        return found[0]

    def _fits(self, params: Mapping[str, Any]) -> bool:
        return all(params.get(key) == value for key, value in self.params.items())


@cache
def rows(file: str) -> list[Mapping[str, Any]]:
    """Return the rows of bench/results/`file`.json."""
    return json.loads((ROOT / RESULTS / f"{file}.json").read_text(encoding="utf-8"))["rows"]


def digits(value: float) -> str:
    """Return three digits, or whole hundreds with a space between thousands from 10 000 on."""
    if value >= 10_000:
        return f"{round(value, -2):,.0f}".replace(",", " ")
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
