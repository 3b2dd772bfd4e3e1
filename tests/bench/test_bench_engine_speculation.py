"""What bench.engine.speculation measures and writes, with a tiny model: every row, and that answers are compared."""

import pytest

from bench.engine import speculation
from bench.engine.speculation import acceptance_rows, rate_rows, run, step_rows
from bench.engine.speculation_texts import PROMPTS
from checkpoint import Checkpoint, open_checkpoint
from engine.backend import Backend
from engine.cpu.loader import load_cpu_backend
from engine.engine import Engine
from engine.settings import EngineSettings
from tests.e2e.tiny import VOCAB, save_tiny
from tests.engine.driving import random_prompts, settings

pytestmark = pytest.mark.slow

DRAFTERS = ("ngram", "suffix")  # a tiny model has no head
Served = tuple[EngineSettings, Checkpoint, Backend]


@pytest.fixture
def served(tmp_path, monkeypatch) -> Served:
    """The settings, checkpoint and backend of a tiny model, with which all takes a second or two."""
    monkeypatch.setattr(speculation, "MAX_TOKENS", 12)
    monkeypatch.setattr(speculation, "NUM_STEPS", 2)
    monkeypatch.setattr(speculation, "CONTEXTS", (40,))
    chosen = settings(model=str(save_tiny(tmp_path)), prefix_cache=False)
    checkpoint = open_checkpoint(chosen.model)
    return chosen, checkpoint, load_cpu_backend(chosen, checkpoint, lambda *_: None)


def test_every_kind_has_as_many_prompts():
    assert {len(texts) for texts in PROMPTS.values()} == {6}


def test_rows_have_what_the_page_shows(served: Served):
    prompts = {kind: [p * 2 for p in random_prompts(VOCAB, [9, 20], seed)] for seed, kind in enumerate(("a", "b"))}
    chosen, checkpoint, backend = served
    lengths = acceptance_rows(chosen, checkpoint, backend, prompts, DRAFTERS)
    assert {row.params["k"] for row in lengths} == {1, 2, 3, 5}
    assert all(1 <= row.value <= row.params["k"] + 1 for row in lengths if row.name == "accepted length")
    rates = rate_rows(chosen, checkpoint, backend, prompts, rounds=1, length=3, drafters=DRAFTERS)
    assert {(row.params["text"], row.params["drafter"]) for row in rates} == {
        (text, drafter) for text in ("a", "b", "all kinds") for drafter in DRAFTERS
    }
    assert all(row.value > 0 and row.peer_value for row in rates)
    assert [row.params["rows"] for row in step_rows(backend.runner)] == [1, 2, 3, 4, 5, 6]


def test_a_run_counts_decoded_tokens_alone(served: Served):
    chosen, checkpoint, backend = served
    found = run(Engine(chosen, checkpoint, backend), random_prompts(VOCAB, [9, 20]), "salt")
    assert [len(answer) for answer in found.answers] == [12, 12] and found.num_drafts == 0
    assert found.num_decoded <= 22 and found.accepted_length == 1
