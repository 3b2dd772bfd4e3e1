"""promtool takes the configuration, and every alert fires when it should."""

import subprocess
from pathlib import Path
from shutil import which

import pytest
import yaml

from tests.observability.queries import FOLDER, rules

pytestmark = pytest.mark.skipif(which("promtool") is None, reason="no promtool here: apt-get install prometheus")


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_configuration_and_the_rules() -> None:
    promtool("check", "config", str(FOLDER / "prometheus.yml"))


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    cases = Path(__file__).with_name("rules_test.yml")
    expected = [one for case in yaml.safe_load(cases.read_text())["tests"] for one in case["alert_rule_test"]]
    assert {one["alertname"] for one in expected if one["exp_alerts"]} == {rule["alert"] for rule in rules()}
    assert {one["alertname"] for one in expected if not one["exp_alerts"]} == {rule["alert"] for rule in rules()}
    promtool("test", "rules", str(cases))
