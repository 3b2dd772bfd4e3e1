"""The EAGLE3 head that comes with the package, on the default model."""

import pytest
import torch

from checkpoint import open_checkpoint
from checkpoint.huggingface.eagle3_folder import open_eagle3, shipped_head
from tools.eagle3.acceptance import draft_hits, head_acceptance, ngram_acceptance
from tools.eagle3.generation import Request, Writer
from tools.eagle3.head_folder import open_draft
from tools.eagle3.target import TargetModel
from tools.eagle3.writing import Conversations

pytestmark = pytest.mark.slow

PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "Give me three healthy breakfasts.",
)
TOKENS = 30


def test_it_fits_the_default_model_by_its_name() -> None:
    checkpoint = open_checkpoint()
    folder = shipped_head(checkpoint.name)
    assert folder is not None and folder == shipped_head(f"HuggingFaceTB/{checkpoint.name}")
    config = open_eagle3(folder, checkpoint.config).config
    assert (config.aux_layers, config.draft_vocab_size, config.hidden_size) == ((2, 15, 27), 6144, 576)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 15_000_000
    assert shipped_head("another-model") is None


@pytest.mark.timeout(300)
def test_what_it_drafts_is_accepted() -> None:
    """The result file has 2.33 tokens a round for chat; three answers need not have that, but far more than one."""
    checkpoint = open_checkpoint()
    target = TargetModel(checkpoint, torch.device("cpu"), torch.float32)
    talk = Conversations(checkpoint)
    prompts = talk.encode([talk.render([{"role": "user", "content": text}]) for text in PROMPTS])
    writer = Writer(target, checkpoint.eos_token_ids, len(prompts), 128, len(prompts))
    texts = [text for text in writer.write([Request(ids, 0.0, TOKENS) for ids in prompts]) if text is not None]
    assert len(texts) == len(PROMPTS)
    folder = shipped_head(checkpoint.name)
    assert folder is not None
    hits = draft_hits(open_draft(folder, target), target, texts, 3)
    found = head_acceptance(hits, texts, 3)
    assert found.length > 1.8
    assert found.length > ngram_acceptance(texts, 3).length
