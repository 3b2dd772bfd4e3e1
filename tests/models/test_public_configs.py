"""The config.json of released models: each resolves to a family, or is refused by the name of a field."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from checkpoint.huggingface.model_config import model_config, text_part
from checkpoint.quantization import read_quantization
from contracts.errors import ConfigError
from models.registry import FAMILIES

RELEASED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "public_configs.json").read_text())
"""Configurations with the repository that they were read in; fields of vision towers and of training are left out."""
DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def outcome(released: dict[str, Any]) -> str:
    """Return the family, with the quantization if there is one, or the refusal by the field's name."""
    try:
        config = text_part(released["config"], "folder")
        model = model_config(config, "folder")
        is_gpt_oss = model.experts is not None and model.experts.as_gpt_oss
        quantized = None if is_gpt_oss else read_quantization(config, released.get("hf_quant_config", {}), "folder")
    except ConfigError as error:
        return refusal(str(error))
    family = next(name for name, family in FAMILIES.items() if family.gguf_architecture == model.family)
    return family if quantized is None else f"{family}, {quantized.scheme}"


def refusal(words: str) -> str:
    said = words.removeprefix("folder: ").removeprefix("the ").partition(" is not supported")[0]
    return f"no: {said.partition('; supported')[0]}".replace("'", "`")


def test_there_are_forty_of_them_each_with_its_source() -> None:
    assert len({released["model"] for released in RELEASED}) == len(RELEASED) >= 40
    assert all(released["source"].startswith("github.com/") for released in RELEASED)


@pytest.mark.parametrize("released", RELEASED, ids=lambda released: released["model"])
def test_a_released_configuration_is_read_as_the_documentation_says(released: dict[str, Any]) -> None:
    assert f"| {released['model']} | {outcome(released)} |" in DOCS.read_text()


def test_every_family_stands_in_the_table_of_families() -> None:
    table = DOCS.read_text().partition("\n| family |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == sorted(FAMILIES)
