"""The engine on a GPU: against transformers, against its own reference kernels, against itself."""

import pytest
import torch
from llguidance import LLMatcher

from bench.models.transformers_oracle import greedy as oracle_greedy
from contracts.sampling import SamplingParams
from engine.cuda.runner import DeviceRunner
from engine.loader import load_engine
from kernels.cases import relative_error
from tests.engine.device_engines import (
    FUSIBLE,
    beside_of,
    chunks_of,
    endings_of,
    engine_of,
    logits_beside_a_prompt,
    logits_of,
    noted_launches_of,
)
from tests.engine.driving import answers, drain, greedy, random_prompts, request, settings
from tests.engine.tiny_models import DEVICE_FAMILIES, FAMILIES, VOCAB, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# Heads of 32, and experts of whole tiles, as the kernels want them.
CARD = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1}
PROMPTS = random_prompts(VOCAB, (1, 5, 63, 64, 65, 150, 300))
FEW = PROMPTS[1:5]


def card_logits(engine, prompts=FEW):
    return logits_of(engine, prompts).cpu()


@pytest.fixture(scope="module", params=DEVICE_FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_tiny(folder, request.param, **CARD)


@pytest.fixture(scope="module", params=DEVICE_FAMILIES)
def steady(request, tmp_path_factory):
    """A model's folder; where it has experts every row goes through all: rounded otherwise, it might go to another."""
    folder = tmp_path_factory.mktemp(f"{request.param}-steady")
    chosen = {"num_experts_per_tok": 8} if "num_experts_per_tok" in FAMILIES[request.param].extra else {}
    chosen = {"num_local_experts": 1} if request.param == "llama4" else chosen  # which sends a row to one alone
    save_tiny(folder, request.param, **CARD, **chosen)
    return folder


@pytest.fixture(scope="module")
def fusible(tmp_path_factory):
    return fusible_folder(tmp_path_factory, "llama")


def fusible_folder(tmp_path_factory, family):
    folder = tmp_path_factory.mktemp(f"{family}-fusible")
    save_tiny(folder, family, **FUSIBLE)
    return folder


@pytest.fixture(scope="module", params=["fusible", "llama4"])
def stepped(request, fusible, tmp_path_factory):
    """One whose steps are fused, one whose steps look on the device for where segments begin."""
    if request.param == "fusible":
        return fusible
    folder = tmp_path_factory.mktemp("stepped")
    save_tiny(folder, "llama4", **CARD)
    return folder


def test_greedy_answers_in_float32_equal_transformers(family):
    folder, model = family
    expected = [oracle_greedy(model, prompt, 12) for prompt in PROMPTS]
    assert answers(engine_of(folder, "float32"), PROMPTS, greedy()) == expected
    chunked = load_engine(settings(model=str(folder), device="cuda", max_batched_tokens=70, max_num_seqs=3))
    assert answers(chunked, PROMPTS, greedy()) == expected


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.02), ("float8", 0.15)])
def test_kernels_compute_what_the_reference_does(steady, dtype, bound):
    expected = card_logits(engine_of(steady, dtype, "cpu"))
    assert relative_error(card_logits(engine_of(steady, dtype)), expected) < bound


@pytest.mark.parametrize("dtype", ["float8", "float8-head"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_fused_step_computes_what_the_reference_does(tmp_path_factory, monkeypatch, family, dtype):
    monkeypatch.setattr("engine.cuda.model.format_choice.MIN_FP8_HIDDEN", 0)
    folder = fusible_folder(tmp_path_factory, family)
    expected = card_logits(engine_of(folder, dtype, "cpu"))
    assert relative_error(card_logits(engine_of(folder, dtype)), expected) < 0.15


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_a_captured_step_gives_the_bits_of_an_eager_one(stepped, dtype):
    engine = engine_of(stepped, dtype)
    answers(engine, PROMPTS, greedy(4))  # leaves inputs of a real batch
    assert isinstance(engine.runner, DeviceRunner)
    steps, state = engine.runner.launcher.steps, engine.runner.launcher.state
    for num_rows in (1, 2, 5, 8):
        for is_greedy in (True, False):
            key = steps.key(num_rows, 300, is_greedy)
            steps._step((key.num_rows, key.max_len))()
            eager, drawn = state.logits.clone(), state.sampled.clone()
            for _ in range(3):
                state.logits.zero_()
                state.sampled.copy_(drawn)  # a step reads the tokens of the one before, and writes its own there
                steps.sample(key)
                assert torch.equal(state.logits[: key.num_rows], eager[: key.num_rows])


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_a_captured_chunk_gives_the_bits_of_an_eager_one(steady, dtype):
    engine = engine_of(steady, dtype)
    captured = [card_logits(engine), card_logits(engine, PROMPTS[5:6])]
    launched = noted_launches_of(chunks_of(engine))
    eager = [card_logits(engine), card_logits(engine, PROMPTS[5:6])]
    assert launched
    assert all(torch.equal(*pair) for pair in zip(captured, eager, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_a_captured_ending_gives_the_bits_of_an_eager_one(stepped, dtype):
    engine = engine_of(stepped, dtype)
    captured = [card_logits(engine), card_logits(engine, PROMPTS[5:6])]
    launched = noted_launches_of(endings_of(engine))
    eager = [card_logits(engine), card_logits(engine, PROMPTS[5:6])]
    assert launched
    assert all(torch.equal(*pair) for pair in zip(captured, eager, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_captured_attention_of_answers_beside_a_prompt_gives_the_bits_of_an_eager_one(steady, dtype):
    engine = engine_of(steady, dtype)
    _, captured = logits_beside_a_prompt(engine.runner, PROMPTS[4:])
    launched = noted_launches_of(beside_of(engine))
    _, eager = logits_beside_a_prompt(engine.runner, PROMPTS[4:])
    assert bool(launched) == ("llama4" not in steady.name)  # whose attention in segments is not captured
    assert torch.equal(captured, eager)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
@pytest.mark.parametrize(
    "params",
    [
        greedy(40),
        SamplingParams(max_tokens=40, seed=5, temperature=0.9, top_p=0.9, top_k=40, ignore_eos=True),
        greedy(40, repetition_penalty=1.3, frequency_penalty=0.2, bad_words=((5, 6),)),
        greedy(40, grammar=LLMatcher.grammar_from_regex("([a-f]{3}[x-z]){20}")),
    ],
    ids=["greedy", "random", "penalties", "grammar"],
)
def test_running_ahead_changes_no_token(fusible, dtype, params, monkeypatch):
    ahead = answers(engine_of(fusible, dtype), PROMPTS, params)
    monkeypatch.setattr("engine.step_pipeline.StepPipeline._may_run_ahead", lambda *_: False)
    assert answers(engine_of(fusible, dtype), PROMPTS, params) == ahead


@pytest.mark.parametrize("dtype", ["float8", "bfloat16"])
@pytest.mark.parametrize(
    "params",
    [greedy(60), SamplingParams(max_tokens=60, seed=5, temperature=0.9, top_p=0.9, ignore_eos=True)],
    ids=["greedy", "random"],
)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_decode_step_makes_the_host_wait_unasked(fusible, dtype, params):
    """torch raises where an operation would wait for the device by itself; the tokens' event is waited for by name."""
    engine = engine_of(fusible, dtype)
    for index, prompt in enumerate(FEW):
        engine.submit(request(str(index), prompt, params))
    while engine.step().num_decode_tokens < len(FEW):
        pass
    try:
        torch.cuda.set_sync_debug_mode("error")
        sampled = [engine.step().num_decode_tokens for _ in range(30)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    drain(engine)
    assert sampled == [len(FEW)] * 30


def test_penalties_and_logprobs_equal_the_cpu_engine(family):
    folder, _ = family
    params = greedy(8, repetition_penalty=1.5, presence_penalty=0.5, logprobs=2)
    expected = answers(load_engine(settings(model=str(folder))), PROMPTS, params)
    assert answers(engine_of(folder, "float32"), PROMPTS, params) == expected


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.05), ("float8", 0.2)])
@pytest.mark.parametrize("changes", [CARD, FUSIBLE], ids=["plain", "fusible"])
def test_an_answer_beside_a_prompt_has_the_logits_that_it_has_alone(tmp_path, changes, dtype, bound):
    """Three answers, padded to four."""
    save_tiny(tmp_path, "llama", **changes)
    alone, beside = logits_beside_a_prompt(engine_of(tmp_path, dtype).runner, PROMPTS[4:])
    assert relative_error(beside, alone) < bound
