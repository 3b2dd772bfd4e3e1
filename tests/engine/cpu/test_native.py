"""The native step: the same answers as transformers where nothing is rounded, and whatever shares its batch."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from bench.models.transformers_oracle import greedy as oracle_greedy
from checkpoint import open_checkpoint
from contracts.errors import ConfigError
from engine.cache.sizing import kv_layout
from engine.cpu.native.choice import chosen_kernels, self_check, unfit
from engine.cpu.native.loader import load_native_backend
from engine.engine import Engine
from engine.loader import load_engine
from engine.model_loader.checkpoint_weights import StoredBlocks, open_weights
from engine.speculative.choice import PROPOSERS
from kernels.cpu.native import LEVELS, NUMERICS, load_kernels
from tests.engine.driving import answers, drain, greedy, leave_nans, random_prompts, request, settings
from tests.engine.speculative.drafting import KnowingProposer
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LENGTHS = [1, 7, 70, 33, 150, 16]
SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}


def native_engine(folder, kv_dtype: str = "float32", threads: int = 2, **changes) -> Engine:
    """An engine on the native path over a folder's own numbers, with KV that rounds nothing."""
    chosen = settings(model=str(folder), **changes)
    checkpoint = open_checkpoint(chosen.model)
    kernels, source = load_kernels(), open_weights(checkpoint)
    backend = load_native_backend(chosen, checkpoint, source, kernels, threads, lambda *_: None, kv_dtype)
    return Engine(chosen, checkpoint, backend)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiny(folder, request.param, **SHAPE)
    prompts = random_prompts(VOCAB, LENGTHS)
    return folder, prompts, [oracle_greedy(model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("level", LEVELS)
def test_answers_equal_transformers(family, level):
    folder, prompts, expected = family
    kernels = load_kernels()
    if kernels.set_level(level) != level:
        pytest.skip(f"this CPU has no {level}")
    try:
        assert answers(native_engine(folder), prompts, greedy()) == expected
    finally:
        kernels.set_level(kernels.best_level)


def test_windows_are_those_of_transformers(tmp_path):
    model = save_tiny(tmp_path, "mistral", **SHAPE, sliding_window=40)
    prompts = random_prompts(VOCAB, LENGTHS)
    expected = [oracle_greedy(model, prompt, 12) for prompt in prompts]
    assert answers(native_engine(tmp_path, max_batched_tokens=48), prompts, greedy()) == expected


def test_answers_do_not_depend_on_batch_chunks_threads_or_pages(family):
    folder, prompts, expected = family
    cases: list[dict[str, Any]] = [{"max_batched_tokens": 48, "max_num_seqs": 3}, {"threads": 1}, {"threads": 3}]
    for changes in [*cases, {"block_size": 32}]:
        engine = native_engine(folder, **changes)
        leave_nans(engine)
        assert answers(engine, prompts, greedy()) == expected


def test_a_prompts_log_probabilities_are_those_of_torch(family):
    folder, prompts, _ = family
    scores = []
    for engine in (native_engine(folder), load_engine(settings(model=str(folder)))):
        engine.submit(request("a", prompts[4], greedy(1, prompt_logprobs=0)))
        found = [token.logprob for output in drain(engine) for item in output.scored for token in item.tokens]
        scores.append(np.array(found))
    np.testing.assert_allclose(scores[0], scores[1], atol=2e-4)


def test_a_prompt_whose_first_blocks_are_cached_gives_the_same(family):
    folder, prompts, expected = family
    engine = native_engine(folder)
    assert [answers(engine, [prompts[4]], greedy())[0] for _ in range(2)] == [expected[4]] * 2


def test_models_that_the_step_cannot_compute_are_told_of(folder):
    checkpoint = open_checkpoint(str(folder))
    config = dataclasses.replace(checkpoint.config, head_dim=24, sinks=True)
    assert "attention sinks" in (unfit(config) or "")
    assert "head_dim 24" in (unfit(dataclasses.replace(config, sinks=False)) or "")
    with pytest.raises(ConfigError, match="dtype 'native' is not possible here"):
        load_engine(settings(model=str(folder), dtype="native"))


def test_the_self_check_finds_a_wrong_product(monkeypatch):
    kernels = load_kernels()
    weight = np.random.default_rng(0).standard_normal((16, 64), np.float32)
    blocks = StoredBlocks(GGMLQuantizationType.F32, weight.view(np.uint8), weight.shape)
    assert self_check(kernels, blocks) is None
    linear = kernels.linear
    monkeypatch.setattr(kernels, "linear", lambda *given: linear(*given) * np.float32(1.1))
    assert "wrong by 10%" in (self_check(kernels, blocks) or "")
    monkeypatch.setattr(kernels, "linear", lambda *given: linear(*given) * np.float32("nan"))
    assert "wrong by" in (self_check(kernels, blocks) or "")


def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("kernels.cpu.build.BUILT", tmp_path)
    monkeypatch.setattr("kernels.cpu.build.DEFAULT_CACHE", tmp_path)
    return settings(dtype="auto", cache_dir=tmp_path / "cache")


def test_without_a_compiler_torch_serves_and_a_line_says_why(monkeypatch, tmp_path, caplog):
    chosen, checkpoint = no_compiler(monkeypatch, tmp_path), open_checkpoint("default")
    caplog.set_level("WARNING")
    assert chosen_kernels(chosen, checkpoint, open_weights(checkpoint)) is None
    (line,) = caplog.messages
    assert "no-such-compiler" in line and "--dtype float16" in line


def test_on_a_cpu_for_which_it_has_plain_loops_alone_a_line_says_why(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("engine.cpu.native.choice.platform.machine", lambda: "aarch64")
    checkpoint = open_checkpoint("default")
    caplog.set_level("WARNING")
    assert chosen_kernels(settings(dtype="auto", cache_dir=tmp_path), checkpoint, open_weights(checkpoint)) is None
    (line,) = caplog.messages
    assert "no AVX2" in line and "--dtype float16" in line


def test_named_without_a_compiler_it_is_refused(monkeypatch, tmp_path):
    chosen, checkpoint = no_compiler(monkeypatch, tmp_path), open_checkpoint("default")
    with pytest.raises(ConfigError, match="no-such-compiler"):
        chosen_kernels(dataclasses.replace(chosen, dtype="native"), checkpoint, open_weights(checkpoint))


def test_auto_takes_it_for_quantized_files_alone(folder):
    checkpoint = open_checkpoint("default")
    source = open_weights(checkpoint)
    if load_kernels().best_level == "plain":
        pytest.skip("this CPU has no AVX2")
    assert chosen_kernels(settings(dtype="auto"), checkpoint, source) is not None
    assert chosen_kernels(settings(dtype="float16"), checkpoint, source) is None
    plain = open_checkpoint(str(folder))
    assert chosen_kernels(settings(dtype="auto"), plain, open_weights(plain)) is None


def test_native_kv_meets_no_other(tmp_path):
    engine = load_engine(settings(dtype="native", cache_dir=tmp_path))
    found = engine.layout.difference(kv_layout(engine.checkpoint, engine.layout.block_size, "bfloat16", "bfloat16"))
    assert found is not None and found[0] == "model"


def test_native_kv_of_another_rounding_is_another_layout(monkeypatch, tmp_path):
    """KV outlives a release on disks and in stores: equal tokens of both have other keys."""
    ours = load_engine(settings(dtype="native", cache_dir=tmp_path)).layout
    monkeypatch.setattr("engine.cpu.native.loader.NUMERICS", NUMERICS + 1)
    theirs = load_engine(settings(dtype="native", cache_dir=tmp_path)).layout
    found = ours.difference(theirs)
    assert ours.shared_id != theirs.shared_id and found is not None and found[0] == "model"


def test_a_step_of_many_threads_gives_the_bits_of_one(family):
    folder, prompts, _ = family
    scores = []
    for threads in (1, 4):
        engine = native_engine(folder, threads=threads)
        engine.submit(request("a", prompts[4], greedy(1, prompt_logprobs=0)))
        scores.append([t.logprob for output in drain(engine) for item in output.scored for t in item.tokens])
    assert scores[0] == scores[1]


def test_a_native_model_that_drafts_for_itself_is_right(tmp_path):
    """In bfloat16, so a guess whose row was computed in other company may differ now and then."""
    chosen = settings(model="default", dtype="native", cache_dir=tmp_path)
    path = str(open_checkpoint("default").path)
    drafting = load_engine(dataclasses.replace(chosen, speculate=path, adapts_drafts=False))
    prompts = [list(range(500, 500 + count)) for count in (5, 40)]
    assert answers(drafting, prompts, greedy(20)) == answers(load_engine(chosen), prompts, greedy(20))
    stats = drafting.stats()
    assert sum(stats.num_accepted_by_place) > 0.9 * stats.num_draft_tokens > 0


def test_what_is_guessed_changes_no_answer(family, monkeypatch):
    folder, prompts, expected = family
    monkeypatch.setitem(PROPOSERS, "knowing", KnowingProposer)
    KnowingProposer.answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
    engine = native_engine(folder, speculate="knowing", draft_tokens=5, adapts_drafts=False)
    assert answers(engine, prompts, greedy()) == expected
    stats = engine.stats()
    assert 0 < sum(stats.num_accepted_by_place) < stats.num_draft_tokens
