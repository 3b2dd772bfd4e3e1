"""Families of other distributions, found by their entry points: each test writes one as an installer would."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from checkpoint import open_checkpoint
from contracts.errors import ConfigError
from engine.loader import load_engine
from models.registry import family_of, installed_families
from tests.engine.driving import answers, greedy, random_prompts, settings
from tests.engine.tiny_models import VOCAB, save_tiny

ACORN = """
from models.family import Family, TensorNames

def read(config, source):
    return {"norm_eps": config["epsilon"]}

FAMILY = Family(
    "AcornForCausalLM",
    "acorn",
    read=read,
    names=TensorNames(renamed=(("oak.", "model."), (".query.", ".q_proj."))),
    defaults={"rms_norm_eps": 1e-6},
)
NO_FAMILY = 3
"""

Install = Callable[[str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return what installs a distribution with one entry point of this value."""

    def installed(value: str) -> Path:
        site = tmp_path / "site"
        (site / "acorn_tandem-1.0.dist-info").mkdir(parents=True)
        (site / "acorn_tandem.py").write_text(ACORN)
        metadata = "Metadata-Version: 2.1\nName: acorn-tandem\nVersion: 1.0\n"
        (site / "acorn_tandem-1.0.dist-info" / "METADATA").write_text(metadata)
        (site / "acorn_tandem-1.0.dist-info" / "entry_points.txt").write_text(f"[tandem.models]\nacorn = {value}\n")
        monkeypatch.syspath_prepend(str(site))
        return site

    installed_families.cache_clear()
    yield installed
    installed_families.cache_clear()


def test_a_family_of_another_distribution_is_served(install: Install, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_tiny(folder, "llama", rms_norm_eps=1e-3)
    prompts = random_prompts(VOCAB, (5, 40))
    expected = answers(load_engine(settings(model=str(folder))), prompts, greedy())
    file = folder / "model.safetensors"
    renamed = {name.replace("model.", "oak.").replace(".q_proj.", ".query."): t for name, t in load_file(file).items()}
    save_file(renamed, file)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["AcornForCausalLM"], "epsilon": config.pop("rms_norm_eps")}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'AcornForCausalLM' is not supported"):
        open_checkpoint(str(folder))
    installed_families.cache_clear()
    install("acorn_tandem:FAMILY")
    assert answers(load_engine(settings(model=str(folder))), prompts, greedy()) == expected
    with pytest.raises(ConfigError, match="'BeechForCausalLM' is not supported; supported are acorn, "):
        family_of("BeechForCausalLM", "here")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "acorn_tandem:NO_FAMILY",
            "'acorn' = 'acorn_tandem:NO_FAMILY' .* is a int; a models.family.Family is expected",
        ),
        ("acorn_tandem:MISSING", "'acorn' .* cannot be loaded: .*MISSING.*; mend or uninstall its distribution"),
        ("no_such_module:FAMILY", "cannot be loaded: No module named 'no_such_module'"),
    ],
)
def test_what_is_no_family_is_refused_where_it_might_be_the_one(install: Install, value: str, words: str) -> None:
    install(value)
    assert family_of("LlamaForCausalLM", "here").architecture == "LlamaForCausalLM"
    with pytest.raises(ConfigError, match=words):
        family_of("AcornForCausalLM", "here")
