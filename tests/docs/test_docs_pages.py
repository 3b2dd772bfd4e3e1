"""What the pages say of settings and of each other is what the code says."""

import json
import re
import subprocess
from shutil import which
from typing import get_args

import pytest
import yaml

from coordinator.settings import CoordinatorSettings
from gateway.settings import GatewaySettings
from tests.docs.fences import DOCS, PAGES, ROOT, SITE, page_name
from tests.docs.lookup import compose_defaults, compose_variables
from tests.environment import plain_environment
from tools import configuration
from worker.settings import Transfer, WorkerSettings

LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)")


def test_the_configuration_page_is_that_of_the_settings() -> None:
    """`make docs` writes it anew."""
    assert configuration.PAGE.read_text() == configuration.page()


def test_the_chart_takes_the_settings_that_there_are() -> None:
    """`make docs` writes its schema anew."""
    assert configuration.CHART_SCHEMA.read_text() == configuration.chart_schema()


def test_every_setting_is_on_the_configuration_page() -> None:
    text = configuration.PAGE.read_text()
    for kind in configuration.COMMANDS.values():
        for name in kind.model_fields:
            assert f"<br>`TANDEM_{name.upper()}` |" in text


def settings_of_compose() -> list[tuple[list[str], str, str]]:
    """Names, default and words of each row of the deployment page's table."""
    rows = [line.split("|") for line in (DOCS / "deployment.md").read_text().splitlines() if line.startswith("| `")]
    found = [(re.findall(r"`([A-Z][A-Z_]+)`", names), default, words) for _, names, default, words, _ in rows]
    return [row for row in found if row[0]]


def test_the_deployment_page_has_every_variable_of_compose() -> None:
    named = {name for names, _, _ in settings_of_compose() for name in names}
    assert named == compose_variables() - {"OTEL_EXPORTER_OTLP_ENDPOINT"}


def test_the_deployment_page_has_the_defaults_of_both_compose_files() -> None:
    """Empty ones, and two that say less than their words do, in words."""
    in_words, defaults = {"TANDEM_SECRET": "a public one", "TANDEM_REDIS_URL": "its own"}, compose_defaults()
    for names, told, _ in settings_of_compose():
        each = ["; GPU: ".join(f"`{default}`" for default in defaults[name]) for name in names]
        expected = in_words.get(names[0], ", ".join(each))
        assert (names, told.strip()) == (names, expected) or (not expected and re.fullmatch(r"\w+", told.strip()))


OWN = {
    "worker": {"role", "worker_id", "advertise_host", "ready_file", "device", "tensor_parallel"},
    "gateway": {"ready_file"},
    "coordinator": {"ready_file"},
}
"""The settings that compose.yaml leaves alone: names, files, and devices, which compose.gpu.yaml gives."""


@pytest.mark.parametrize("service", ["prefill", "decode", "mixed", "gateway", "coordinator"])
def test_compose_passes_on_every_setting_of_a_service(service: str) -> None:
    kind = service if service in OWN else "worker"
    settings = {"worker": WorkerSettings, "gateway": GatewaySettings, "coordinator": CoordinatorSettings}[kind]
    passed = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"][service]["environment"].keys()
    assert {f"TANDEM_{name.upper()}" for name in settings.model_fields.keys() - OWN[kind]} - passed == set()


@pytest.mark.skipif(which("docker") is None, reason="docker is not installed")
def test_what_is_set_reaches_the_services_of_compose_and_what_is_not_does_not() -> None:
    given = {"TANDEM_KV_DISK": "/var/lib/tandem/kv", "TANDEM_KV_HOST_GIB": "0.5", "TANDEM_ROLE_OBJECTIVE_S": "2"}
    command = ["docker", "compose", "--file", str(ROOT / "compose.yaml"), "--env-file", "/dev/null", "config"]
    found = subprocess.run(
        [*command, "--format", "json"], env=plain_environment() | given, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    services = json.loads(found.stdout)["services"]
    prefill, coordinator = services["prefill"], services["coordinator"]["environment"]
    assert {name: prefill["environment"].get(name) for name in given} == given | {"TANDEM_ROLE_OBJECTIVE_S": None}
    assert coordinator["TANDEM_ROLE_OBJECTIVE_S"] == "2"
    assert not prefill["environment"].get("TANDEM_KV_STORE") and not prefill["environment"].get("TANDEM_MAX_MODEL_LEN")
    mounted = {volume["target"]: volume["source"] for volume in prefill["volumes"] if volume["type"] == "volume"}
    assert mounted == {given["TANDEM_KV_DISK"]: "kv"}


def test_the_deployment_page_has_every_transport() -> None:
    ((_, _, words),) = [row for row in settings_of_compose() if row[0] == ["TANDEM_TRANSFER"]]
    assert set(get_args(Transfer)) <= set(re.findall(r"`([^`]+)`", words))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_link_leads_somewhere(page) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_file_that_a_page_names_exists(page) -> None:
    """But for those that are to come."""
    text = page.read_text().partition("## Where new capabilities go")[0]
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", text)
    missing = [name for name in named if not any((ROOT / f"{name}{end}").exists() for end in ("", ".py"))]
    assert [name for name in missing if not name.startswith("build/")] == []


def test_every_page_is_in_the_site() -> None:
    indexes = [page for page in SITE if page.name == "index.md"]
    listed = {
        (index.parent / line).with_suffix(".md")
        for index in indexes
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", index.read_text(), re.DOTALL)
        for line in tree.splitlines()
        if line and not line.startswith(":")
    }
    assert [page for page in SITE if page not in listed] == [DOCS / "index.md"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")])
def test_compose_can_read_its_files_with_every_profile(files: tuple[str, ...]) -> None:
    if not which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("no docker compose here")
    named = [word for file in files for word in ("-f", file)]
    command = ["docker", "compose", *named, "--profile", "*", "config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
