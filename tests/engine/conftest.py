"""Models that several tests share are written once, and what transformers answers is computed once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.loader import load_engine
from tests.engine.device_engines import device_engine
from tests.engine.driving import settings
from tests.engine.tiny_models import DEVICE_FAMILIES, save_answered, save_tiny


@pytest.fixture(scope="module", params=DEVICE_FAMILIES)
def family(request, tmp_path_factory):
    """A tiny model's folder, prompts of the module's LENGTHS, and transformers' 12 greedy tokens after each."""
    return save_answered(tmp_path_factory.mktemp(request.param), request.param, request.module.LENGTHS)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama; modules of another model have a `folder` of their own."""
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "llama")
    return path


@pytest.fixture(scope="module", params=["cpu", "device"])
def make(request: pytest.FixtureRequest, folder: Path) -> Callable[..., Engine]:
    """Engines of the CPU, and of the GPU's adapter on the reference kernels, which launches a batch ahead."""
    if request.param == "device":
        return lambda **changes: device_engine(folder, **changes)
    return lambda **changes: load_engine(settings(model=str(folder), **changes))


@pytest.fixture
def nothing_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was rounded on load")

    monkeypatch.setattr("engine.cuda.model.weight_loader.quantize_rows", refuse)
