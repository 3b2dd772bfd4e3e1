"""What the tests of tiers share: a model, and what it answers without tiers."""

from pathlib import Path

import pytest

from engine.loader import load_engine
from tests.engine.driving import settings
from tests.engine.tiny_models import save_tiny
from tests.worker.core.tier_rig import PROMPTS, answer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "llama")
    return path


@pytest.fixture(scope="session")
def expected(folder: Path) -> list[list[int]]:
    engine = load_engine(settings(model=str(folder), prefix_cache=False))
    return [answer(engine, prompt, str(index)) for index, prompt in enumerate(PROMPTS)]
