"""What the pages say of settings and of each other is what the code says."""

import re
import subprocess
from shutil import which

import pytest

from tests.docs.fences import PAGES, ROOT
from tests.docs.lookup import compose_variables
from tools import configuration

DOCS = ROOT / "docs"
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)")


def test_the_configuration_page_is_that_of_the_settings() -> None:
    """`make docs` writes it anew."""
    assert configuration.PAGE.read_text() == configuration.page()


def test_every_setting_is_on_the_configuration_page() -> None:
    text = configuration.PAGE.read_text()
    for kind in configuration.COMMANDS.values():
        for name in kind.model_fields:
            assert f"<br>`TANDEM_{name.upper()}` |" in text


def test_the_deployment_page_has_every_variable_of_compose() -> None:
    rows = [line for line in (DOCS / "deployment.md").read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([A-Z][A-Z_]+)`", row.split("|")[1])}
    assert named == compose_variables() - {"OTEL_EXPORTER_OTLP_ENDPOINT"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_somewhere(page) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_in_the_site() -> None:
    tree = (DOCS / "index.md").read_text()
    missing = [page.stem for page in DOCS.glob("*.md") if page.stem != "index" and f"\n{page.stem}\n" not in tree]
    assert missing == []


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")])
def test_compose_can_read_its_files_with_every_profile(files: tuple[str, ...]) -> None:
    if not which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("no docker compose here")
    named = [word for file in files for word in ("-f", file)]
    command = ["docker", "compose", *named, "--profile", "*", "config", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
