"""The workflow of the repository host and the hooks call what exists."""

import re

import yaml

from tests.docs.fences import ROOT


def test_the_workflow_calls_targets_of_make() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    targets = workflow["jobs"]["make"]["strategy"]["matrix"]["target"]
    makefile = (ROOT / "Makefile").read_text()
    assert {"check", "test", "docs"} <= set(targets)
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_a_hook_runs_a_program_of_ours() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    programs = [word for hook in hooks for word in hook["entry"].split() if word.startswith("tools/")]
    assert programs and all((ROOT / program).exists() for program in programs)
