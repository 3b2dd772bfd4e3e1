"""A tiny model and a head for it, of random weights, as the tests of all backends draft with."""

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from checkpoint import open_checkpoint
from tests.engine.speculative.tiny_heads import save_head, speculators
from tests.engine.tiny_models import save_tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("target")
    return folder, save_tiny(folder, "llama")


@pytest.fixture(scope="module")
def head(target: tuple[Path, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head(tmp_path_factory.mktemp("head"), speculators(), open_checkpoint(str(target[0])).config)
