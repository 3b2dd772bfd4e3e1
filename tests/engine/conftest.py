"""Models that several tests share are written once, and what transformers answers is computed once."""

import pytest

from bench.models.transformers_oracle import greedy as oracle_greedy
from tests.engine.driving import random_prompts
from tests.engine.tiny_models import FAMILIES, VOCAB, save_tiny


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, tmp_path_factory):
    """A tiny model's folder, prompts of the module's LENGTHS, and transformers' 12 greedy tokens after each."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiny(folder, request.param)
    prompts = random_prompts(VOCAB, request.module.LENGTHS)
    return folder, prompts, [oracle_greedy(model, prompt, 12) for prompt in prompts]


@pytest.fixture
def nothing_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was rounded on load")

    monkeypatch.setattr("engine.cuda.model.weight_loader.quantize_rows", refuse)
