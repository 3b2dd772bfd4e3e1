"""Dashboard, alert rules and the operations page name metrics that exist, and the page names all of them."""

import re
from pathlib import Path

import pytest
import yaml

from gateway.error_codes import NOT_OURS
from tests.observability import exposition
from tests.observability.queries import FOLDER, ROOT, Query, alerts, dashboard, panels, rules

OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


@pytest.fixture(scope="module")
def samples() -> set[str]:
    return exposition.samples()


@pytest.mark.parametrize("query", [*dashboard(), *alerts()], ids=lambda query: query.where)
def test_a_query_asks_for_what_is_exposed(query: Query, samples: set[str]) -> None:
    assert query.names - samples == set()
    assert query.names or "up" in query.expr


def test_the_dashboard_asks_under_both_sets_of_names() -> None:
    asked = {name for query in dashboard() for name in query.names}
    services = ("tandem_gateway", "tandem_worker", "tandem_link", "tandem_coordinator", "vllm:")
    assert all(any(name.startswith(service) for name in asked) for service in services)


def test_the_page_names_every_metric_and_no_other(samples: set[str]) -> None:
    page = set(re.findall(r"`((?:tandem_|vllm:|http_)[a-z0-9_]+)`", OPERATIONS))
    assert page == exposition.families().keys()


def test_the_page_explains_every_alert_and_no_other() -> None:
    rows = [line.split("|")[1] for line in OPERATIONS.splitlines() if line.startswith("| `Tandem")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == {rule["alert"] for rule in rules()}


def test_the_page_speaks_of_panels_that_exist() -> None:
    titles = {panel["title"] for panel in panels()}
    for word in re.findall(r"panels? ((?:\"[^\"]+\"(?: and )?)+)", OPERATIONS):
        assert set(re.findall(r'"([^"]+)"', word)) <= titles | {"Handoff"}


def test_errors_of_ours_are_those_that_are_not_the_clients() -> None:
    """What the gateway answers decides: an end that is no error, or a status below 500, is not ours."""
    passed_over = [codes for query in (*dashboard(), *alerts()) for codes in re.findall(r'code!~"([^"]*)"', query.expr)]
    at_the_door = {"unauthorized", "not_found", "method_not_allowed"}  # of which strangers send what they like
    found = [set(codes.split("|")) for codes in passed_over]
    assert found.count(set(NOT_OURS)) == 2 and found.count(at_the_door) == 3 and len(found) == 5


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_prometheus_reads_every_service_of_compose_by_its_port() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    found = {job["job_name"]: job["dns_sd_configs"][0] for job in jobs}
    ours = {name for name, service in services.items() if "healthcheck" in service and "image" in service} - {
        "redis",
        "prometheus",
        "grafana",
    }
    assert found.keys() == ours
    for name, job in found.items():
        assert job["names"] == [name]
        assert str(job["port"]) == str(services[name]["environment"]["TANDEM_PORT"])


def test_what_compose_mounts_exists() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    mounted = [Path(volume["source"]) for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    assert mounted and all((ROOT / path).exists() for path in mounted)
