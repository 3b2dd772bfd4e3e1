"""What the dashboard and the alert rules ask Prometheus. Not a test."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docker" / "observability"
DASHBOARD = FOLDER / "grafana" / "dashboards" / "tandem.json"
RULES = FOLDER / "rules.yml"
NAME = re.compile(r"(?:tandem_|vllm:)[a-z0-9_]+")
_QUOTED = re.compile(r'"[^"]*"')


@dataclass(frozen=True)
class Query:
    where: str
    expr: str

    @property
    def names(self) -> set[str]:
        """The metrics that it reads, of ours."""
        return set(NAME.findall(_QUOTED.sub("", self.expr)))


def panels() -> list[dict]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def dashboard() -> list[Query]:
    return [
        Query(f"{panel['title']}, {target['legendFormat'] or target['refId']}", target["expr"])
        for panel in panels()
        for target in panel["targets"]
    ]


def rules() -> list[dict]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[Query]:
    return [Query(rule["alert"], rule["expr"]) for rule in rules()]
