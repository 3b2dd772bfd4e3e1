"""The head that comes with the package, in the engine, on the default model."""

import pytest
import torch
from safetensors.torch import load_file

from bench.models.eagle3_reference import Eagle3Reference
from checkpoint import open_checkpoint
from checkpoint.huggingface.eagle3_folder import open_eagle3, shipped_head
from engine.loader import load_engine
from tests.engine.driving import answers, greedy, settings
from tests.engine.speculative.judged_drafts import note
from tools.eagle3.target import TargetModel
from tools.eagle3.writing import Conversations

pytestmark = pytest.mark.slow

PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
)
MAX_TOKENS = 30


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    talk = Conversations(open_checkpoint())
    return talk.encode([talk.render([{"role": "user", "content": text}]) for text in PROMPTS])


@pytest.mark.timeout(600)
def test_it_drafts_what_the_formulas_say_and_its_drafts_are_accepted(prompts):
    """Each draft equals the reference's, and answers are those without; again behind prefix hits."""
    checkpoint = open_checkpoint()
    plain = answers(load_engine(settings(num_threads=2)), prompts, greedy(MAX_TOKENS))
    engine = load_engine(settings(num_threads=2, speculate="eagle3", adapts_drafts=False))
    noted = note(engine).drafts
    assert answers(engine, prompts, greedy(MAX_TOKENS)) == plain
    first, drafts = engine.stats(), dict(noted)
    assert 1 + sum(first.num_accepted_by_place) / first.num_drafts > 1.8
    noted.clear()
    assert answers(engine, prompts, greedy(MAX_TOKENS)) == plain
    second = engine.stats()
    assert second.prefix_hit_tokens > 0 and noted == drafts
    assert [2 * count for count in first.num_accepted_by_place] == list(second.num_accepted_by_place)

    path = shipped_head(checkpoint.name)
    assert path is not None
    head, target = open_eagle3(path, checkpoint.config), TargetModel(checkpoint, torch.device("cpu"), torch.float32)
    tensors = load_file(path / "model.safetensors")
    for prompt, answer in zip(prompts, plain, strict=True):
        text = prompt + answer
        aux = target.rows(torch.tensor([text])).aux[0]
        reference = Eagle3Reference(head.config, tensors, target.embedding, target.head)
        of_this = sorted(
            (len(tokens), draft) for tokens, draft in drafts.items() if list(tokens) == text[: len(tokens)]
        )
        assert of_this
        for count, draft in of_this:
            expected = reference.draft(aux[: count - 1], text[:count], len(draft))
            assert list(draft) == expected, f"after {count} tokens"
