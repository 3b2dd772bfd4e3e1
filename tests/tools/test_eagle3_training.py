"""The training of EAGLE3 heads, on tiny models: each part against a plain computation, then the whole command."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.models.eagle3_reference import Eagle3Reference
from bench.models.model_folder import TINY, write_folder
from checkpoint import open_checkpoint
from checkpoint.huggingface.eagle3_folder import open_eagle3
from models.config import LongRopeScaling, ModelConfig
from tools.eagle3 import train
from tools.eagle3.acceptance import Acceptance, PromptLookup, draft_hits, head_acceptance
from tools.eagle3.corpus import Corpus
from tools.eagle3.draft_model import Eagle3Draft
from tools.eagle3.generation import Request, Writer, Written
from tools.eagle3.head_folder import head_config
from tools.eagle3.losses import draft_loss, wanted_of
from tools.eagle3.prompts import PromptWriter
from tools.eagle3.target import TargetModel
from tools.eagle3.training import HeadTrainer, TrainingPlan
from tools.eagle3.training import train as train_heads

pytestmark = pytest.mark.slow

MODEL = replace(TINY, num_layers=8, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16)
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_folder(path, MODEL, CPU, gain=2.0)
    stated = json.loads((path / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(stated))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> TargetModel:
    return TargetModel(open_checkpoint(str(folder)), CPU, torch.float32)


@pytest.fixture
def draft(target: TargetModel) -> Eagle3Draft:
    """Return a head of random weights."""
    torch.manual_seed(5)
    drafted = torch.randperm(MODEL.vocab_size)[:200].sort().values
    made = Eagle3Draft(head_config(target.config, 48, len(drafted)), target.embedding, drafted)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return made


def greedy(target: TargetModel, prompt: list[int], count: int) -> list[int]:
    """Return the prompt and what the model chooses after it, by whole passes."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        final = target.rows(torch.tensor([tokens])).final
        tokens.append(int(target.logits(final[0, -1]).argmax()))
        if tokens[-1] == 7:
            break
    return tokens


def test_a_target_with_longrope_turns_by_the_factors_of_its_longest_context(folder: Path) -> None:
    checkpoint, factors = open_checkpoint(str(folder)), tuple(map(float, range(1, 9)))
    scalings = {
        "long": LongRopeScaling((1.0,) * 8, factors, 64, 1.1),
        "same": LongRopeScaling(factors, factors, 64, 1.1),
        "short": LongRopeScaling((1.0,) * 8, (1.0,) * 8, 64, 1.1),
    }
    tokens, found = torch.arange(20)[None], {}
    for name, scaling in scalings.items():
        config = replace(checkpoint.config, rope_scaling=scaling)
        target = TargetModel(replace(checkpoint, config=config), CPU, torch.float32)
        found[name] = target.rows(tokens).final
    assert torch.equal(found["long"], found["same"]) and not torch.allclose(found["long"], found["short"])


def test_the_writer_writes_what_whole_passes_choose(target: TargetModel) -> None:
    prompts = [[3, 9, 27, 81], [5, 25, 125], [11, 121, 44, 100, 23, 9], [200, 300, 400], [1, 2, 3]]
    writer = Writer(target, [7], num_slots=2, max_len=64, capacity=8)
    for _ in range(2):  # a writer is used again
        written = writer.write([Request(prompt, 0.0, 20 + 3 * index) for index, prompt in enumerate(prompts)])
        for index, (prompt, text) in enumerate(zip(prompts, written, strict=True)):
            assert text is not None and text.start == len(prompt)
            assert text.tokens.tolist() == greedy(target, prompt, 20 + 3 * index)


def test_sampled_text_depends_on_the_seed_and_never_on_unlikely_tokens(target: TargetModel) -> None:
    found = []
    for seed in (1, 2):
        writer = Writer(target, [7], num_slots=4, max_len=32, capacity=4, seed=seed)
        texts = writer.write([Request([3, 9, 27], 1.0, 12)] * 4)
        found.append([text.tokens.tolist() for text in texts if text is not None])
        for tokens in found[-1]:
            shares = target.logits(target.rows(torch.tensor([tokens])).final)[0].softmax(-1)
            for place in range(2, len(tokens) - 1):
                assert shares[place, tokens[place + 1]] >= 0.049 * shares[place].max()
    assert found[0] != found[1]


def test_rows_at_every_depth_are_those_of_the_reference(target: TargetModel, draft: Eagle3Draft) -> None:
    torch.manual_seed(3)
    tokens, steps = torch.randint(MODEL.vocab_size, (2, 12)), 4
    aux = target.rows(tokens).aux
    with torch.no_grad():
        logits = [draft.lm_head(rows) for rows in draft.rows(aux, tokens, steps)]
    weights = dict(draft.named_parameters()) | {"d2t": draft.drafted - torch.arange(len(draft.drafted))}
    for text in range(2):
        reference = Eagle3Reference(draft.config, weights, target.embedding)
        for anchor in range(12 - 1 - steps):
            known = tokens[text, : anchor + 2].tolist()
            said, feature = reference.read(aux[text, : anchor + 1], known)
            for step in range(steps):
                assert torch.allclose(logits[step][text, anchor].double(), said, rtol=1e-3, atol=1e-3)
                following = int(tokens[text, anchor + 2 + step])
                said, feature = reference.row(feature, following, anchor + 1 + step)
            reference.forget(anchor + 1)


def test_acceptance_is_that_of_drafting_and_verifying(target: TargetModel, draft: Eagle3Draft) -> None:
    texts = [Written(torch.tensor(greedy(target, prompt, 24)), len(prompt)) for prompt in ([3, 9, 27], [5, 25, 125, 1])]
    # A head that knows something: its rows are those of the target's late layer, so some drafts are right.
    plan = TrainingPlan(passes=60, batch_tokens=256, learning_rate=3e-3, kept_nbytes=1 << 20)
    draft.start_from(target, texts[0].tokens[None].long())
    trainer = HeadTrainer(draft, target, plan)
    spent = train_heads(target, {"": trainer}, Corpus(texts, CPU), plan)
    assert spent["passes"] == 60
    draft.fold()
    weights = dict(draft.named_parameters()) | {"d2t": draft.drafted - torch.arange(len(draft.drafted))}
    hits, lengths = draft_hits(draft, target, texts, 3), []
    for text in texts:
        tokens, reference, known = text.tokens.tolist(), Eagle3Reference(draft.config, weights, target.embedding), 0
        aux, known = target.rows(text.tokens[None]).aux[0], text.start
        while known < len(tokens) - 1:
            drafts = reference.draft(aux[:known], tokens[: known + 1], 3)
            truth = tokens[known + 1 : known + 4]
            same = [a == b for a, b in zip(drafts, truth, strict=False)] + [False]
            known += min(same.index(False) + 1, len(tokens) - 1 - known)
            lengths.append(same.index(False))
    found = head_acceptance(hits, texts, 3)
    assert (found.rounds, found.tokens) == (len(lengths), sum(len(text.tokens) - 1 - text.start for text in texts))
    assert max(lengths) > 0


def test_prompt_lookup_drafts_what_followed_the_longest_earlier_suffix() -> None:
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 6, 1, 2, 3, 4, 9, 8]
    assert PromptLookup(tokens).hits(11, 3) == 2  # after 1 2 3 came 4 9 2; now 4 9 8
    assert PromptLookup(tokens).hits(11, 1) == 1
    assert PromptLookup(tokens).hits(8, 3) == 0
    found = Acceptance()
    found.walk(Written(torch.tensor(tokens), 9), 3, PromptLookup(tokens).hits)
    assert found.tokens == len(tokens) - 1 - 9


def test_the_loss_and_its_gradients_are_those_of_cross_entropy() -> None:
    torch.manual_seed(0)
    rows, head = torch.randn(50, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    logits, drafted = torch.randn(50, 30), torch.arange(0, 30, 2)
    wanted, is_drafted = wanted_of(logits[:, drafted], logits.argmax(-1), drafted, 0.5)
    assert torch.equal(is_drafted, logits.argmax(-1) % 2 == 0)
    assert torch.allclose(wanted.sum(-1)[is_drafted], torch.ones(int(is_drafted.sum())))
    wanted, weights = torch.cat([wanted, torch.zeros(50, 5)], -1), torch.rand(50)
    ours = draft_loss(rows, head, wanted, weights)
    gradients = torch.autograd.grad(2 * ours, [rows, head])
    plain = (torch.nn.functional.cross_entropy(rows @ head.t(), wanted, reduction="none") * weights).sum()
    expected = torch.autograd.grad(2 * plain, [rows, head])
    assert torch.allclose(ours, plain, rtol=1e-4)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(gradients, expected, strict=True))


def test_batches_hold_every_text_once_and_pad_little() -> None:
    draw = torch.Generator().manual_seed(1)
    sizes = torch.randint(6, 90, (40,), generator=draw).tolist()
    texts = [Written(torch.full((size,), index), 3) for index, size in enumerate(sizes)]
    corpus = Corpus([*texts, Written(torch.zeros(3), 3)], CPU)
    assert (len(corpus), corpus.num_tokens, corpus.num_written) == (40, sum(sizes), sum(sizes) - 3 * 40)
    seen = []
    for batch in corpus.batches(512, seed=3):
        assert batch.tokens.numel() <= 512
        seen += batch.tokens[:, 0].tolist()
        for row, length in zip(batch.tokens, batch.lengths.tolist(), strict=True):
            assert length == sizes[int(row[0])] and bool((row == row[0]).all())
        rows = batch.predicted()
        assert len(rows) == sum(length - 1 - 3 for length in batch.lengths.tolist())
        assert int(batch.first_drafts(rows).min()) == 0
    assert sorted(seen) == list(range(40))


def test_prompts_are_those_of_their_seed_and_the_held_out_ones_are_others() -> None:
    first, again, other = (PromptWriter(seed) for seed in (1, 1, 2))
    ours = [first.first_turn() for _ in range(300)]
    assert ours == [again.first_turn() for _ in range(300)] != [other.first_turn() for _ in range(300)]
    assert {prompt.kind for prompt in ours} == {"chat", "code", "code edits", "extraction"}
    judged = PromptWriter(9, held_out=True)
    held = {m["content"] for i in range(60) for p in (judged.chat(i), judged.code_edit()) for m in p.messages}
    assert not held & {message["content"] for prompt in ours for message in prompt.messages}


@pytest.mark.timeout(300)
def test_the_command_trains_a_head_that_loads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: TargetModel
) -> None:
    options = {
        "--model": folder, "--out": tmp_path, "--verifier": "made/here", "--device": "cpu", "--prompts": 12,
        "--held-out": 1, "--slots": 16, "--max-len": 224, "--max-new": 16, "--passes": 1, "--batch-tokens": 1024,
    }  # fmt: skip
    heads = ["--head", "48x128", "32x128:0"]
    words = [str(word) for option in options.items() for word in option]
    monkeypatch.setattr(sys, "argv", ["train", *words, *heads])
    train.main()
    for name, width in (("48x128-0.5", 48), ("32x128-0", 32)):
        head = open_eagle3(tmp_path / name, _config(folder))
        assert (head.config.intermediate_size, head.config.draft_vocab_size, head.config.aux_layers) == (
            width,
            128,
            (2, 4, 5),
        )
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert tensors["lm_head.weight"].dtype is torch.bfloat16 and int(tensors["t2d"].sum()) == 128
        assert (tensors["d2t"] + torch.arange(128)).tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
        aux = target.rows(torch.tensor([[3, 9, 27, 81]])).aux[0]
        assert len(Eagle3Reference(head.config, tensors, target.embedding).draft(aux[:3], [3, 9, 27, 81], 3)) == 3
    rows = json.loads((tmp_path / "eagle3-head.json").read_text())["rows"]
    kinds = {row["params"]["text"] for row in rows}
    assert {"chat", "code", "code edits", "extraction"} <= kinds
    assert {row["params"]["drafter"] for row in rows} == {"n-gram", "head 48x128-0.5", "head 32x128-0"}
    assert all(1 <= row["value"] <= row["params"]["k"] + 1 for row in rows if row["value"])


def _config(folder: Path) -> ModelConfig:
    return open_checkpoint(str(folder)).config
