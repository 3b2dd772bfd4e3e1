"""The GPU's adapter on the reference kernels: FP8, running ahead, drawing, and what needs the host."""

import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from msgspec import structs

from checkpoint import open_checkpoint
from contracts.errors import ConfigError
from contracts.events import Token
from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.backend import ignore_progress
from engine.cuda.device_sampler import DevicePendingTokens, TopLogprobs
from engine.cuda.inputs.decode_state import DecodeState
from engine.cuda.inputs.sampling_columns import DrawnRow, columns, draw_keys
from engine.cuda.launcher import Launcher
from engine.cuda.model.attention import DeviceAttention, are_few
from engine.cuda.model.format_choice import smooths_keys
from engine.cuda.model.fused_decode import is_fusible
from engine.cuda.model.matrices import quantize_finely, quantize_rows
from engine.cuda.model.number_formats import DEVICE_FORMATS
from engine.cuda.model.required_kernels import require_kernels
from engine.cuda.model.weight_loader import load_device_weights
from engine.cuda.runner import DeviceRunner
from engine.cuda.runtime.bindings import OUT_OF_MEMORY
from engine.cuda.runtime.shared_memory import HostMemory, cuda_allocated
from engine.loader import load_engine
from engine.model_loader.checkpoint_weights import open_weights
from engine.scheduler.batch import ScheduledChunk
from engine.scheduler.launch_pacer import WAKING_S
from engine.sequence import Sequence
from kernels import catalog
from kernels.caps import Caps
from kernels.cases import relative_error
from kernels.reference import attention
from kernels.registry import Impl, Registry
from kernels.specs import FusedAttnSpec, GemmSpec, NormSpec, RopeSpec
from kv_transfer.connection.handshake_frames import Terms
from kv_transfer.connection.layout_negotiation import is_possible
from tests.engine.device_engines import (
    FUSIBLE,
    beside_of,
    chunks_of,
    device_engine,
    endings_of,
    logits_beside_a_prompt,
    logits_of,
    noted_launches_of,
)
from tests.engine.driving import answers, drain, greedy, random_prompts, request, settings, tokens_of
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(VOCAB, (9, 64, 100))
RANDOM = SamplingParams(max_tokens=24, seed=5, temperature=0.9, top_p=0.9, top_k=40, ignore_eos=True)
ADJUSTED = [
    greedy(24, repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1, bad_words=((3, 4),)),
    greedy(24, grammar=LLMatcher.grammar_from_regex("([a-f]{3}[x-z]){20}")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, "llama", **FUSIBLE)
    return folder


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.04), ("float8", 0.3), ("float8-head", 0.3)])
def test_rounded_formats_stay_near_float32(folder, dtype, bound):
    """The tiny model's weights are large, so that it amplifies rounding; e4m3 has four bits fewer than bf16."""
    expected = logits_of(device_engine(folder, "float32"), PROMPTS)
    error = relative_error(logits_of(device_engine(folder, dtype), PROMPTS), expected)
    assert 1e-4 < error < bound


def test_a_request_id_that_comes_again_has_blocks_of_its_own(folder):
    """A request that is tried once more has the same id."""
    engine, (first, second) = device_engine(folder), [[prompt] for prompt in random_prompts(VOCAB, (9, 20))]
    answers(engine, first, greedy())
    engine.submit(request("held", PROMPTS[2], greedy(1), handoff=True))
    drain(engine)
    assert answers(engine, second, greedy()) == answers(device_engine(folder), second, greedy())


@pytest.mark.parametrize(
    ("family", "changes", "is_whole"),
    [("llama", {}, False), ("llama", FUSIBLE, True), ("qwen2", FUSIBLE, False), ("qwen3", FUSIBLE, False)],
)
def test_small_models_are_rounded_whole_only_for_a_llama_s_fused_step(tmp_path, family, changes, is_whole):
    save_tiny(tmp_path, family, **changes)
    checkpoint, device = open_checkpoint(str(tmp_path)), torch.device("cpu")
    number_format = DEVICE_FORMATS["float8"]
    weights = load_device_weights(
        checkpoint.config, open_weights(checkpoint), number_format, 64, device, lambda *_: None
    )
    recipes = [[matrix.recipe for matrix in layer.matrices()] for layer in weights.layers]
    expected = [["row"] * 4] * 3 if is_whole else [["w8"] * 4, ["w8"] * 4, ["w8", "w8", "plain", "plain"]]
    assert recipes == expected
    assert is_fusible(checkpoint.config, number_format, weights) == is_whole


def test_rounding_sparingly_brings_logits_nearer(tmp_path, monkeypatch):
    save_tiny(tmp_path, "llama")
    expected = logits_of(device_engine(tmp_path, "float32"), PROMPTS)
    sparing = relative_error(logits_of(device_engine(tmp_path, "float8"), PROMPTS), expected)
    monkeypatch.setattr("engine.cuda.model.weight_loader.rounds_sparingly", lambda _: False)
    rounded = relative_error(logits_of(device_engine(tmp_path, "float8"), PROMPTS), expected)
    assert sparing < 0.9 * rounded


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gpt_oss", "llama4"])
def test_products_left_unscaled_take_their_bias_and_head_norms_behind(tmp_path, monkeypatch, family):
    monkeypatch.setattr("engine.cuda.model.weight_loader.rounds_sparingly", lambda _: False)
    asked, get = [], Registry.get

    def get_noted(registry, op, spec):
        asked.append(spec)
        return get(registry, op, spec)

    save_tiny(tmp_path, family)
    expected = logits_of(device_engine(tmp_path, "float32"), PROMPTS)
    monkeypatch.setattr(Registry, "get", get_noted)
    found = logits_of(device_engine(tmp_path, "float8"), PROMPTS)
    norms = [spec for spec in asked if isinstance(spec, NormSpec)]
    kinds = {(spec.biased, spec.normed, spec.deferred) for spec in asked if isinstance(spec, RopeSpec)}
    biased = family in ("qwen2", "gpt_oss")
    normed = {"qwen3_moe": {True}, "llama4": {True, False}}.get(family, {False})
    assert kinds == {(biased, each, True) for each in normed}
    assert {spec.hidden for spec in norms} == {96}
    assert any(spec.biased and spec.deferred for spec in norms) == (family == "gpt_oss")
    assert 1e-4 < relative_error(found, expected) < 0.3


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "gpt_oss"])
def test_readers_add_up_the_parts_of_few_rows(tmp_path, monkeypatch, family):
    """Which only wide matrices have."""
    asked, get = set(), Registry.get

    def get_noted(registry, op, spec):
        asked.add((type(spec), getattr(spec, "parts", 1), getattr(spec, "deferred", False)))
        return get(registry, op, spec)

    save_tiny(tmp_path, family, **FUSIBLE)
    monkeypatch.setattr("engine.cuda.model.weight_loader.rounds_sparingly", lambda _: False)
    monkeypatch.setattr("engine.cuda.loader.is_fusible", lambda *_: False)
    whole = logits_of(device_engine(tmp_path, "float8"), PROMPTS)
    monkeypatch.setattr("engine.cuda.model.linear.skinny_parts", lambda rows, *_, **__: 2 if rows <= 64 else None)
    monkeypatch.setattr(Registry, "get", get_noted)
    parted = logits_of(device_engine(tmp_path, "float8"), PROMPTS)
    kinds = {(kind, parts) for kind in (GemmSpec, RopeSpec, NormSpec) for parts in (1, 2)}
    assert asked >= {(kind, parts, parts == 1) for kind, parts in kinds}
    assert relative_error(parted, whole) < 0.1


def save_uneven(folder):
    """A tiny Qwen2, of whose keys one channel a head stands out and hardly turns, as real models have them."""
    model = save_tiny(folder, "qwen2")
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.view(2, -1)[:, -1] = 40.0
    model.save_pretrained(folder)


def take_e4m3(monkeypatch):
    """The reference's attention, as if it took such queries."""

    def taking(impl):
        return replace(impl, wants_e4m3=True) if (impl.op, impl.name) == ("attn_prefill", "reference") else impl

    monkeypatch.setattr(catalog, "IMPLS", tuple(map(taking, catalog.IMPLS)))


@pytest.mark.parametrize(
    ("dtype", "is_rounded", "bound"),
    [("float32", False, 1e-5), ("bfloat16", False, 0.02), ("float8", False, 0.2), ("float8", True, 0.2)],
)
def test_an_answer_beside_a_prompt_has_the_logits_that_it_has_alone(folder, monkeypatch, dtype, is_rounded, bound):
    if is_rounded:
        take_e4m3(monkeypatch)
    alone, beside = logits_beside_a_prompt(device_engine(folder, dtype).runner, PROMPTS)
    assert relative_error(beside, alone) < bound


def test_answers_and_the_prompts_beside_them_read_the_weights_once(folder, monkeypatch):
    runner, passes = device_engine(folder).runner, []
    assert isinstance(runner, DeviceRunner)
    launcher = runner.launcher
    compute = launcher.model.__class__.fill
    monkeypatch.setattr(
        launcher.model.__class__,
        "fill",
        lambda model, rows, *args: (passes.append(rows), compute(model, rows, *args))[1],
    )
    monkeypatch.setattr(launcher.steps, "compute", lambda key: pytest.fail("a step beside the pass"))
    monkeypatch.setattr(launcher.steps, "sample", lambda key: pytest.fail("a step beside the pass"))
    answering = Sequence(RequestId("a"), PROMPTS[0], greedy())
    answering.tokens.append(7)
    prompt = Sequence(RequestId("b"), PROMPTS[1], greedy())
    answering.blocks.append(0)
    prompt.blocks.append(1)
    drawn = runner.forward([ScheduledChunk(answering, 9, 1), ScheduledChunk(prompt, 0, 64)]).pending_tokens
    assert drawn is not None and len(drawn.wait()) == 2
    assert [(len(rows.token_ids), int(rows.num_decodes)) for rows in passes] == [(65, 1)]


def test_attention_that_takes_queries_in_e4m3_gets_those_of_prompts_so(folder, monkeypatch):
    given = set()

    def noted(attend):
        def noting(spec, q, *args, **kwargs):
            given.add((attend.__name__, q.dtype))
            attend(spec, q, *args, **kwargs)

        return noting

    monkeypatch.setattr("engine.cuda.loader.is_fusible", lambda *_: False)
    plain = device_engine(folder, "float8")
    expected, told = logits_of(plain, PROMPTS), answers(plain, PROMPTS, greedy(8))
    take_e4m3(monkeypatch)
    for name in ("attn_prefill", "attn_decode"):
        monkeypatch.setattr(attention, name, noted(getattr(attention, name)))
    engine = device_engine(folder, "float8")
    given.clear()  # calibration asks all rows of the last layer too, whose queries are left as decodes want them
    assert 0 < relative_error(logits_of(engine, PROMPTS), expected) < 0.15
    assert [len(tokens) for tokens in answers(engine, PROMPTS, greedy(8))] == [len(tokens) for tokens in told]
    assert given == {("attn_prefill", torch.float8_e4m3fn), ("attn_decode", torch.bfloat16)}


def test_few_rows_behind_many_keys_attend_by_what_shares_keys_out(tmp_path, monkeypatch):
    """The best has its plan of the others."""
    taken = []

    def noted(name):
        def attend(spec, q, *args, **kwargs):
            taken.append((name, len(q), kwargs["prepared"]))
            attend_all(spec, q, *args, **kwargs)

        return attend

    attend_all = attention.attn_prefill
    monkeypatch.setattr(attention, "best", noted("best"), raising=False)
    monkeypatch.setattr(attention, "sharing", noted("sharing"), raising=False)
    monkeypatch.setattr(attention, "Plans", lambda spec: lambda *batch: "plan", raising=False)
    module = attention.__name__
    impls = (
        Impl("attn_prefill", "best", 9, catalog.always, f"{module}:best", prepare=f"{module}:Plans", for_few="sharing"),
        Impl("attn_prefill", "sharing", 8, catalog.always, f"{module}:sharing"),
    )
    monkeypatch.setattr(catalog, "IMPLS", (*catalog.IMPLS, *impls))
    save_tiny(tmp_path, "llama", max_position_embeddings=4096)
    engine = device_engine(tmp_path, max_batched_tokens=4096, kv_cache_nbytes=32 << 20)
    prompt = [token % 50 for token in range(3100)]
    taken.clear()
    answers(engine, [prompt], greedy(1))
    assert set(taken) == {("best", 3100, "plan")}
    taken.clear()
    answers(engine, [prompt[:3090]], greedy(1))  # 3072 are cached
    assert set(taken) == {("sharing", 18, None)}


@pytest.mark.parametrize(
    ("counts", "length", "is_few"),
    [([64], 3071, False), ([64], 3072, True), ([65], 6143, False), ([128], 6144, True), ([129], 8191, False),
     ([129], 8192, True), ([64, 64], 8192, True), ([64, 64, 64], 1 << 20, False), ([257], 1 << 20, False)],
)  # fmt: skip
def test_which_rows_are_few(counts, length, is_few):
    assert are_few(np.array(counts), np.array([1] * (len(counts) - 1) + [length]), num_heads=32) is is_few


def test_smooth_keys_bring_logits_nearer(tmp_path, monkeypatch):
    save_uneven(tmp_path)
    expected = logits_of(device_engine(tmp_path, "float32"), PROMPTS)
    smooth = device_engine(tmp_path, "float8")
    error = relative_error(logits_of(smooth, PROMPTS), expected)
    monkeypatch.setattr("engine.cuda.loader.smooths_keys", lambda _: False)
    uneven = device_engine(tmp_path, "float8")
    assert error < 0.8 * relative_error(logits_of(uneven, PROMPTS), expected)
    assert (uneven.layout.difference(smooth.layout) or ("",))[0] == "groups[0].scales"


def test_smooth_keys_are_the_same_in_every_process_and_take_no_bf16_ones(tmp_path):
    save_uneven(tmp_path)
    engines = [device_engine(tmp_path, dtype) for dtype in ("float8", "float8", "bfloat16")]
    ours, again, plain = (
        Terms(engine.layout, 64, "auto", ["ucx"], "a", True, "cuda", engine.transfer_pool.scales) for engine in engines
    )
    assert is_possible(again, ours) and not is_possible(plain, ours)


@pytest.mark.parametrize(("family", "changes"), [("llama", FUSIBLE), ("qwen3", {})])
def test_a_context_of_the_first_tokens_alone_has_scales_and_smooth_keys_too(tmp_path, family, changes):
    save_tiny(tmp_path, family, **changes)
    expected, found = [], []
    for dtype, logprobs in (("float32", expected), ("float8", found)):
        engine = device_engine(tmp_path, dtype, max_model_len=4)
        engine.submit(request("a", [5, 6, 7], greedy(1, prompt_logprobs=0)))
        logprobs += [token.logprob for output in drain(engine) for item in output.scored for token in item.tokens]
    assert found == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(("family", "changes"), [("gpt_oss", {}), ("llama", FUSIBLE), ("llama", {"head_dim": 24})])
def test_keys_that_are_not_smoothed(tmp_path, family, changes):
    """Those beside sinks, of the fused step, and of heads that no Hadamard matrix fits."""
    save_tiny(tmp_path, family, **changes)
    assert not smooths_keys(open_checkpoint(str(tmp_path)).config)


def test_a_searched_scale_cuts_off_nothing_and_leaves_less_of_an_error():
    weight = torch.randn(64, 300) * torch.rand(64, 1)
    errors = {}
    for rounding in (quantize_rows, quantize_finely):
        matrix = rounding(weight)
        assert matrix.scale is not None
        scale = matrix.scale[:, None] if matrix.scale.dim() == 1 else matrix.scale.repeat_interleave(32, 1)[:, :300]
        widened = matrix.weight.float() * scale
        errors[rounding] = (widened - weight).square().sum(1)
        assert (widened.abs().amax(1) > 0.93 * weight.abs().amax(1)).all()
    assert (errors[quantize_finely] < errors[quantize_rows]).all()
    assert errors[quantize_finely].mean() < 0.6 * errors[quantize_rows].mean()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_fused_step_computes_what_the_plain_one_does(tmp_path, monkeypatch, family):
    save_tiny(tmp_path, family, **FUSIBLE)
    monkeypatch.setattr("engine.cuda.model.format_choice.MIN_FP8_HIDDEN", 0)
    asked, get = [], Registry.get

    def get_noted(registry, op, spec):
        asked.append(spec)
        return get(registry, op, spec)

    monkeypatch.setattr(Registry, "get", get_noted)
    fused = logits_of(device_engine(tmp_path, "float8"), PROMPTS)
    kinds = {(spec.biased, spec.normed) for spec in asked if isinstance(spec, FusedAttnSpec)}
    assert kinds == {(family == "qwen2", family == "qwen3")}
    monkeypatch.setattr("engine.cuda.loader.is_fusible", lambda *_: False)
    plain = logits_of(device_engine(tmp_path, "float8"), PROMPTS)
    assert torch.equal(fused[0], plain[0])
    # Attention's output and the MLP's middle are rounded by other scales; a scale applied wrongly gives 1 and more.
    assert 0 < relative_error(fused[1:], plain[1:]) < 0.2


@pytest.mark.parametrize("params", [greedy(24), RANDOM, *ADJUSTED], ids=["greedy", "random", "penalties", "grammar"])
@pytest.mark.parametrize("dtype", ["float32", "float8"])
def test_running_ahead_changes_no_token(folder, dtype, params, monkeypatch):
    ahead = answers(device_engine(folder, dtype), PROMPTS, params)
    monkeypatch.setattr("engine.step_pipeline.StepPipeline._may_run_ahead", lambda *_: False)
    assert answers(device_engine(folder, dtype), PROMPTS, params) == ahead


def test_nobody_is_preempted_for_pages_that_the_batch_under_way_sets_free(folder):
    """`a` has the last of five pages, and its last token is drawn with that after which `b` needs one: the next batch
    is not launched before that page is free.
    """
    engine = device_engine(folder, kv_cache_nbytes=5 * device_engine(folder).layout.block_nbytes)
    for name, prompt in zip("ab", random_prompts(VOCAB, (126, 120)), strict=True):
        engine.submit(request(name, prompt, greedy(9 if name == "a" else 12)))
    while engine.stats().free_tokens:
        engine.step()
    assert engine.stats().num_running == 2
    drain(engine)
    assert engine.stats().num_preemptions == 0


def test_a_batch_of_adjusted_logits_is_launched_before_the_tokens_of_the_last_are_told(folder):
    """Whatever they want: each step but those of the first and the last token leaves a batch behind that is being
    computed.
    """
    engine, wants = device_engine(folder), [greedy(8), *(structs.replace(params, max_tokens=8) for params in ADJUSTED)]
    for index, (prompt, params) in enumerate(zip(PROMPTS, wants, strict=True)):
        engine.submit(request(str(index), prompt, params))
    for grammar in engine.grammars._open.values():  # a busy machine compiles it for longer than a step waits
        grammar.compiled.result(60)
    ahead = []
    while engine.has_work():
        engine.step()
        ahead.append(engine.pipeline.in_flight is not None)
    assert ahead == [True] * 7 + [False]


@pytest.mark.parametrize(("quick", "waits"), [(64, True), (2048, False)])
def test_tokens_of_answers_do_not_wait_until_a_long_batch_is_launched(folder, monkeypatch, quick, waits):
    """One of 8192 rows took the host 16 to 35 ms to launch, beside answers that had a token every 3 (H200)."""
    engine = device_engine(folder, max_batched_tokens=256, max_mixed_tokens=256)
    monkeypatch.setattr(DeviceRunner, "max_graph_rows", property(lambda _: quick))
    engine.submit(request("answer", PROMPTS[0], greedy(12)))
    for _ in range(3):
        engine.step()
    engine.submit(request("long", [3] * 200, greedy(2)))
    forward, unlanded = engine.runner.forward, []

    def launched(pieces, *told):
        if sum(piece.num_tokens for piece in pieces) > 64:
            unlanded.append(engine.deferred.num_in_flight - 1)
        return forward(pieces, *told)

    monkeypatch.setattr(engine.runner, "forward", launched)
    while engine.has_work():
        engine.step()
    assert unlanded == [0 if waits else 1]


def test_a_step_may_wait_as_long_as_the_device_has_work(folder, monkeypatch):
    engine, now_s, is_done = device_engine(folder), [0.0], [False]
    monkeypatch.setattr(engine.pipeline, "_clock", lambda: now_s[0])
    monkeypatch.setattr(DevicePendingTokens, "is_done", property(lambda _: is_done[0]))
    engine.submit(request("0", PROMPTS[0], greedy(12)))
    slack_s = []
    while engine.has_work():
        engine.step()
        slack_s.append(engine.slack_s)
        is_done[0] = len(slack_s) == 5
        now_s[0] += 0.01
    # Not before a step of decodes was seen, nor behind one that was done when the host came, nor when nothing is being
    # computed.
    slack = 0.01 - WAKING_S
    assert slack_s == pytest.approx([0.0, *[slack] * 4, 0.0, *[slack] * 5, 0.0])


def test_a_step_whose_draw_is_the_hosts_to_launch_does_not_wait(folder, monkeypatch):
    engine, now_s = device_engine(folder), [0.0]
    monkeypatch.setattr(engine.pipeline, "_clock", lambda: now_s[0])
    engine.submit(request("0", PROMPTS[0], structs.replace(ADJUSTED[0], max_tokens=8)))
    while engine.has_work():
        engine.step()
        assert engine.slack_s == 0.0
        now_s[0] += 0.01


def test_what_adjusts_some_answers_of_a_batch_changes_no_other(folder):
    wants = [greedy(12), ADJUSTED[0], ADJUSTED[1]]
    alone = [answers(device_engine(folder), [prompt], params)[0] for prompt, params in zip(PROMPTS, wants, strict=True)]
    engine = device_engine(folder)
    for index, (prompt, params) in enumerate(zip(PROMPTS, wants, strict=True)):
        engine.submit(request(str(index), prompt, params))
    outputs = drain(engine)
    assert [tokens_of(outputs, str(index)) for index in range(3)] == alone


def test_tokens_that_can_not_be_drawn_together_are_drawn_one_by_one(folder, monkeypatch):
    """And the next batch goes on from them."""
    expected = answers(device_engine(folder), PROMPTS, ADJUSTED[0])
    engine, draw, refused = device_engine(folder), DeviceRunner.sample, []

    def refuse(runner, sequences, *rest):
        refused.append(len(sequences))
        if len(refused) % 3 == 0:
            raise RuntimeError("out of memory")
        return draw(runner, sequences, *rest)

    monkeypatch.setattr(DeviceRunner, "sample", refuse)
    assert answers(engine, PROMPTS, ADJUSTED[0]) == expected
    assert len(refused) == 24


@pytest.mark.parametrize("dtype", ["float32", "float8"])
def test_prompts_in_padded_chunks_change_no_token(folder, dtype):
    engine = device_engine(folder, dtype, max_batched_tokens=100)
    launched = noted_launches_of(chunks_of(engine))
    plain = device_engine(folder, dtype, max_batched_tokens=100)
    assert answers(engine, PROMPTS, greedy(12)) == answers(plain, PROMPTS, greedy(12))
    assert len(launched) == 2 * engine.layout.only_group.num_layers  # 173 rows, 100 at a time


def staggered(engine):
    for index in range(3):
        engine.submit(request(str(index), PROMPTS[index], greedy(12)))
        engine.step()
        engine.step()
    outputs = drain(engine)
    return [tokens_of(outputs, str(index)) for index in range(3)]


@pytest.mark.parametrize("dtype", ["float32", "float8"])
def test_attention_of_answers_beside_prompts_changes_no_token_where_it_is_held(folder, dtype):
    engine = device_engine(folder, dtype, max_batched_tokens=100)
    launched = noted_launches_of(beside_of(engine))
    assert staggered(engine) == staggered(device_engine(folder, dtype, max_batched_tokens=100))
    assert launched and len(launched) % (engine.layout.only_group.num_layers - 1) == 0


@pytest.mark.parametrize("dtype", ["float32", "float8"])
def test_what_follows_the_last_keys_of_a_pass_changes_no_token_where_it_is_held(folder, dtype):
    """It is tried with a prompt alone, then with answers beside prompts, of one to three rows."""
    engine = device_engine(folder, dtype, max_batched_tokens=100)
    launched = noted_launches_of(endings_of(engine))
    assert staggered(engine) == staggered(device_engine(folder, dtype, max_batched_tokens=100))
    assert [launch.args[0] for launch in launched][:1] == [1] and {launch.args[0] for launch in launched} == {1, 2, 4}


def test_rows_that_pad_an_ending_are_of_one_token_whoever_was_there_before(folder):
    engine = device_engine(folder)
    answers(engine, [*PROMPTS, PROMPTS[0]], greedy(2))
    answers(engine, PROMPTS, greedy(2))
    assert endings_of(engine)._lengths[:4].tolist() == [*map(len, PROMPTS), 1]


def test_rows_are_padded_further_where_that_is_faster(folder):
    chunks, launched = chunks_of(device_engine(folder, max_batched_tokens=300)), []

    def record(launch):
        def held() -> None:
            launched.append(len(launch.args[0].token_ids))
            launch()

        return held

    def time(launch):
        launch()
        return {64: 1.0, 128: 2.2, 192: 2.0, 256: 2.05, 300: 2.0}[launched[-1]]

    chunks.capture(record, chunks.sizes)
    chunks.leave_out_slow(time)
    counts = (1, 64, 65, 129, 193, 257)
    for count in counts:
        advance = chunks.advance(count)
        assert advance is not None
        advance(0)
    assert launched[-len(counts) :] == [64, 64, 192, 192, 256, 300]


def test_chunks_of_more_rows_than_are_held_are_launched_as_they_are(folder, monkeypatch):
    monkeypatch.setattr("engine.cuda.inputs.buckets._MAX_CHUNK_ROWS", 65)
    engine, called = device_engine(folder), []
    chunks = chunks_of(engine)
    chunks.capture(lambda launch: lambda: called.append(launch), chunks.sizes)
    answers(engine, [PROMPTS[2]], greedy(2))
    assert not called


def test_answers_of_different_lengths_and_stops_end_where_they_should(folder):
    engine, whole = device_engine(folder), answers(device_engine(folder), PROMPTS, greedy(24))
    stop = whole[1][7]
    engine.submit(request("short", PROMPTS[0], greedy(3)))
    engine.submit(request("stopped", PROMPTS[1], greedy(24, stop_token_ids=(stop,))))
    engine.submit(request("one", PROMPTS[2], greedy(1)))
    outputs = drain(engine)
    assert tokens_of(outputs, "short") == whole[0][:3]
    assert tokens_of(outputs, "stopped") == whole[1][: whole[1].index(stop) + 1]
    assert tokens_of(outputs, "one") == whole[2][:1]
    ended = {end.request_id: (end.num_tokens, str(end.reason)) for output in outputs for end in output.ended}
    assert ended == {"short": (3, "length"), "stopped": (whole[1].index(stop) + 1, "stop"), "one": (1, "length")}


def test_a_request_released_while_its_batch_is_computed_says_no_more(folder):
    engine, expected = device_engine(folder), answers(device_engine(folder), PROMPTS[:2], greedy(8))
    for index in range(2):
        engine.submit(request(str(index), PROMPTS[index], greedy(8)))
    outputs = [engine.step(), engine.step()]
    engine.release(RequestId("0"))
    outputs += drain(engine)
    assert tokens_of(outputs, "0") == expected[0][:2]
    assert tokens_of(outputs, "1") == expected[1]


def test_a_handoff_stops_after_token_0_and_goes_on_when_kept(folder):
    engine, expected = device_engine(folder), answers(device_engine(folder), PROMPTS[:1], greedy(8))[0]
    engine.submit(request("0", PROMPTS[0], greedy(8), handoff=True))
    outputs = drain(engine)
    assert tokens_of(outputs, "0") == expected[:1]
    assert engine.stats().num_held == 1
    engine.keep_local(RequestId("0"))
    assert tokens_of([*outputs, *drain(engine)], "0") == expected


def test_draws_do_not_depend_on_the_batch(folder):
    together = answers(device_engine(folder), PROMPTS, RANDOM)
    alone = [answers(device_engine(folder), [prompt], RANDOM)[0] for prompt in PROMPTS]
    assert together == alone
    again = [
        answers(device_engine(folder), [PROMPTS[0]], RANDOM),
        answers(device_engine(folder), [PROMPTS[0]], greedy(24)),
    ]
    assert again[0][0] == together[0] != again[1][0]


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": {7: 100.0}},
        {"allowed_token_ids": (3, 4, 5)},
        {"bad_words": ((3,), (4, 5))},
        {"min_tokens": 5, "stop_token_ids": tuple(range(100))},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_adjusted_logits_give_what_the_cpu_gives(folder, changes):
    params = greedy(10, **changes)
    expected = answers(load_engine(settings(model=str(folder))), PROMPTS, params)
    assert answers(device_engine(folder), PROMPTS, params) == expected


def test_a_batch_that_fails_is_computed_piece_by_piece(folder):
    engine, expected = device_engine(folder), answers(device_engine(folder), PROMPTS, greedy(6))
    forward = engine.runner.forward

    def refuse_decodes(pieces, written=ignore_progress):
        if pieces[0].is_decode:
            raise RuntimeError("no decodes")
        return forward(pieces, written)

    engine.runner.forward = refuse_decodes
    assert answers(engine, PROMPTS, greedy(6)) == expected


def test_a_batch_that_fails_has_told_the_device_no_tables(folder, monkeypatch):
    """What is tried again alone would be computed on the blocks of whoever came before."""
    engine, expected = device_engine(folder), answers(device_engine(folder), PROMPTS[1:], greedy())
    assert answers(engine, PROMPTS[1:2], greedy()) == expected[:1]
    assert isinstance(engine.runner, DeviceRunner)
    state, attempts = engine.runner.launcher.state, []
    put_tables = state.put_tables

    def fails_once(tables):
        attempts.append(tables)
        if len(attempts) == 1:
            raise RuntimeError("no memory for tables")
        put_tables(tables)

    monkeypatch.setattr(state, "put_tables", fails_once)
    assert answers(engine, PROMPTS[2:], greedy()) == expected[1:]
    assert len(attempts) > 1


def test_one_that_fails_alone_leaves_no_parameters_for_the_others_draw(folder, monkeypatch):
    expected = answers(device_engine(folder), PROMPTS[:1], RANDOM)
    engine = device_engine(folder)
    assert isinstance(engine.runner, DeviceRunner)
    launcher = engine.runner.launcher
    compute = launcher._with_prompts

    def fails_with_the_second(batch, prompts, *rest):
        if len(PROMPTS[1]) in prompts.queries.counts.tolist():
            raise RuntimeError("no memory for its rows")
        return compute(batch, prompts, *rest)

    monkeypatch.setattr(launcher, "_with_prompts", fails_with_the_second)
    engine.submit(request("goes on", PROMPTS[0], RANDOM))
    engine.submit(request("fails", PROMPTS[1], greedy(6)))
    outputs = drain(engine)
    assert [failed.request_id for output in outputs for failed in output.failed] == ["fails"]
    assert tokens_of(outputs, "goes on") == expected[0]


@pytest.mark.parametrize("part", ["prompts", "logprobs"])
def test_a_batch_that_fails_behind_its_draw_changes_no_token(folder, monkeypatch, part):
    """Its answers' tokens are those of the batch before, which are on the device alone."""
    params = greedy(10, logprobs=1) if part == "logprobs" else greedy(10)
    engine, expected = device_engine(folder), answers(device_engine(folder), PROMPTS, params)
    attempts = []

    def fail_once(compute):
        def computed(*args):
            attempts.append(args)
            if len(attempts) == 1:
                raise RuntimeError("out of memory")
            return compute(*args)

        return computed

    for index in range(2):
        engine.submit(request(str(index), PROMPTS[index], params))
    outputs = [engine.step(), engine.step()]
    assert isinstance(engine.runner, DeviceRunner)
    if part == "prompts":
        monkeypatch.setattr(engine.runner.launcher, "_with_prompts", fail_once(engine.runner.launcher._with_prompts))
    else:
        monkeypatch.setattr("engine.cuda.runner.TopLogprobs.of", fail_once(TopLogprobs.of))
    engine.submit(request("2", PROMPTS[2], params))
    outputs += drain(engine)
    assert [tokens_of(outputs, str(index)) for index in range(3)] == expected
    assert len(attempts) > 1


def test_an_undrawn_batch_that_nobody_wants_is_waited_for(folder, monkeypatch):
    """Its blocks are free then, and a transfer may write there at once."""
    engine, waited = device_engine(folder, max_batched_tokens=64), []
    monkeypatch.setattr(engine.runner, "wait", lambda: waited.append(engine.stats().free_tokens))
    params = greedy(8, presence_penalty=0.5)
    engine.submit(request("gone", PROMPTS[2], params, handoff=True))
    engine.step()  # the first chunk; the last is being computed
    engine.release(RequestId("gone"))
    assert not engine.step().sampled
    assert waited and waited[0] < engine.stats().free_tokens == engine.capacity_tokens
    assert answers(engine, PROMPTS, params) == answers(device_engine(folder), PROMPTS, params)


def test_a_grammar_is_forgotten_if_its_request_went_before_its_first_mask(folder, monkeypatch):
    engine = device_engine(folder, max_batched_tokens=64)
    grammars, gone = engine.grammars, threading.Event()
    masks = grammars._masks
    monkeypatch.setattr(grammars, "_masks", lambda sequences: (gone.wait(60), masks(sequences))[1])
    engine.submit(request("gone", PROMPTS[2], greedy(8, grammar=LLMatcher.grammar_from_regex("[a-f]+"))))
    engine.step()
    engine.release(RequestId("gone"))
    gone.set()
    engine.step()
    assert not grammars._open


def test_more_handoffs_kept_than_there_are_places_take_turns(folder):
    prompts = random_prompts(VOCAB, (20, 20, 20, 20))
    engine, expected = device_engine(folder, max_num_seqs=2), answers(device_engine(folder), prompts, greedy(8))
    for index, prompt in enumerate(prompts):
        engine.submit(request(str(index), prompt, greedy(8), handoff=True))
    outputs = drain(engine)
    for index in range(4):
        engine.keep_local(RequestId(str(index)))
    outputs += drain(engine)
    assert [tokens_of(outputs, str(index)) for index in range(4)] == expected


def test_an_adopted_answer_has_the_place_that_was_reserved(folder):
    engine = device_engine(folder, max_num_seqs=2)
    engine.submit(request("first", PROMPTS[0], greedy(20)))
    engine.step()
    engine.reserve(request("adopted", PROMPTS[1], greedy(8)))
    engine.submit(request("late", PROMPTS[2], greedy(4)))
    outputs = [engine.step(), engine.step()]
    engine.adopt(RequestId("adopted"), Token(0, 5))
    engine.incoming_writer_ended(RequestId("adopted"))
    outputs += drain(engine)
    assert [len(tokens_of(outputs, name)) for name in ("first", "adopted", "late")] == [19, 7, 4]


def test_heads_that_no_kernel_takes_are_refused_by_their_size(folder):
    config = replace(open_checkpoint(str(folder)).config, head_dim=80)
    registry = catalog.registry(Caps("cuda", 90, "an H200", triton=(3, 6, 0)))
    with pytest.raises(ConfigError, match=r"head_dim is 80, .*power of two.*: use dtype float32"):
        require_kernels(registry, config, DEVICE_FORMATS["bfloat16"], 64)
    require_kernels(registry, replace(config, head_dim=64), DEVICE_FORMATS["bfloat16"], 64)


def test_a_machine_where_triton_cannot_build_its_launchers_is_refused_in_words(folder, monkeypatch):
    """A container with a GPU may have no C compiler."""
    found = Caps("cuda", 90, "an H200", triton=(3, 6, 0), triton_error="Failed to find C compiler")
    monkeypatch.setattr("kernels.caps.detect", lambda _: found)
    with pytest.raises(ConfigError, match=r"\(Failed to find C compiler\): apt-get install gcc python3-dev"):
        device_engine(folder)


@pytest.mark.parametrize("cc", [90, 100])
def test_heads_that_flashinfer_alone_takes_are_refused_too(folder, cc):
    config = replace(open_checkpoint(str(folder)).config, head_dim=96)
    registry = catalog.registry(Caps("cuda", cc, "a GPU", 132, (2, 11, 0), (3, 6, 0), (0, 6, 13), True, True))
    with pytest.raises(ConfigError, match=r"head_dim is 96, .*power of two.*: use dtype float32"):
        require_kernels(registry, config, DEVICE_FORMATS["float8"], 64)
    require_kernels(registry, replace(config, head_dim=64), DEVICE_FORMATS["float8"], 64)


def test_prompts_attend_by_our_kernel_where_flashinfer_cannot_build_its_own(folder, monkeypatch, caplog):
    def fa3_module(spec):
        raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist")

    monkeypatch.setitem(sys.modules, "kernels.flashinfer", SimpleNamespace(fa3_module=fa3_module))
    config = replace(open_checkpoint(str(folder)).config, head_dim=64)
    registry = catalog.registry(Caps("cuda", 90, "an H200", 132, (2, 11, 0), (3, 6, 0), (0, 6, 13), True))
    own = DeviceAttention(config, registry, "e4m3", 64, 512, 4, torch.device("cpu"))
    assert not own.wants_e4m3
    assert {choice.impl.name for (op, _), choice in registry.choices.items() if op == "attn_prefill"} == {"triton"}
    assert "attn_prefill runs as triton" in caplog.text and "Could not find nvcc" in caplog.text


def free_of_gpu(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Pretend that there is a GPU of 80 GiB with this much free memory."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (nbytes, 80 << 30))


def test_a_gpu_that_a_model_fills_is_said_to_be_full(folder, monkeypatch):
    """A GiB of what is free is left to captured graphs, and what logits and the transfer take."""
    free_of_gpu(monkeypatch, 900 << 20)
    with pytest.raises(ConfigError, match=r"0\.88 GiB of the GPU's memory are free beside the model, .* smaller model"):
        device_engine(folder, kv_cache_nbytes=None)


def test_the_cache_leaves_what_captured_graphs_will_take(folder, monkeypatch):
    """For 80 layers on several GPUs they took more than the GiB that was left to them."""
    free_of_gpu(monkeypatch, 2500 << 20)

    def capacity(captured_mib: int) -> int:
        monkeypatch.setattr("engine.cuda.loader.DeviceBackendBuilder._captured_nbytes", lambda *_: captured_mib << 20)
        return device_engine(folder, kv_cache_nbytes=None).capacity_tokens

    assert capacity(0) == capacity(400) > 2 * capacity(1800) > 0
    with pytest.raises(ConfigError, match=r"2\.44 GiB of the .*, of which 2\.8\d are for other things"):
        capacity(2400)


def test_the_cache_leaves_what_a_full_step_of_scored_prompts_takes(folder, monkeypatch):
    """Prompts that ask for their log-probabilities may fill a step: all of its rows go past the last layer's K and V,
    where else a few do.
    """
    free_of_gpu(monkeypatch, 1200 << 20)

    def cache_nbytes(num_rows: int) -> int:
        engine = device_engine(folder, kv_cache_nbytes=None, max_batched_tokens=num_rows)
        return engine.capacity_tokens // 64 * engine.layout.block_nbytes

    row_nbytes = 4 * (8 * 32 + 2 * 256)  # queries, residuals and what comes of them, float32
    less = cache_nbytes(1024) - cache_nbytes(16 * 1024)
    assert abs(less - 15 * 1024 * row_nbytes) <= 8 << 20  # planes end where a GPU's pages of memory do


def test_the_cache_leaves_what_the_rooms_of_steps_will_take(folder, monkeypatch):
    """They are made behind the cache, as what is captured is. Of 1024 sequences of 8B they took half a GB."""
    free_of_gpu(monkeypatch, 2500 << 20)
    monkeypatch.setattr("engine.cuda.loader.require_kernels", lambda *_: None)
    monkeypatch.setattr("engine.cuda.loader.DeviceBackendBuilder._captures", True)
    monkeypatch.setattr("engine.cuda.loader.DeviceBackendBuilder._compile", lambda *_: None)
    monkeypatch.setattr(Launcher, "capture", lambda _: None)
    monkeypatch.setattr(Launcher, "expected_nbytes", lambda _: 600 << 20)
    monkeypatch.setattr("engine.cuda.graphs.prefill_graphs.PrefillGraphs.leave_out_slow", lambda *_: None)

    def capacity(rooms_mib: int) -> int:
        left = iter([4000 << 20, 4000 - rooms_mib << 20, 2500 << 20])
        monkeypatch.setattr("engine.cuda.loader.free_nbytes", lambda: next(left))
        return device_engine(folder, kv_cache_nbytes=None).capacity_tokens

    assert capacity(0) > 2 * capacity(900) > 0


def test_nothing_is_made_for_positions_that_no_cache_could_hold(tmp_path, monkeypatch):
    """Tables of ten million positions are gigabytes of each GPU. A cache that takes what is free could have it all."""
    save_tiny(tmp_path, "llama", max_position_embeddings=1 << 17)
    free_of_gpu(monkeypatch, 2500 << 20)
    rows, made = [], DecodeState

    def state(max_rows: int, max_blocks: int, *others: Any) -> DecodeState:
        rows.append(max_blocks * 64)
        return made(max_rows, max_blocks, *others)

    monkeypatch.setattr("engine.cuda.loader.DecodeState", state)
    engine = device_engine(tmp_path, kv_cache_nbytes=16 << 20, max_batched_tokens=512)
    assert engine.capacity_tokens <= rows.pop() < 1.1 * engine.capacity_tokens
    unbound = device_engine(tmp_path, kv_cache_nbytes=None, max_batched_tokens=512)
    assert answers(engine, [PROMPTS[2]], greedy(4)) == answers(unbound, [PROMPTS[2]], greedy(4))
    assert rows == [1 << 17]


def test_a_model_that_a_gpu_does_not_hold_is_refused_in_words(folder, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB "
            "is free. Including non-PyTorch memory, this process has 77.90 GiB memory in use."
        )

    monkeypatch.setattr("engine.cuda.loader.load_device_weights", full)
    with pytest.raises(
        ConfigError, match=r"do not fit on the GPU \(.* of which 1\.20 GiB is free\.\): .*tensor_parallel"
    ):
        device_engine(folder)


def test_pages_are_made_of_what_torch_has_in_reserve(monkeypatch):
    """Loading leaves torch memory that only torch can use, until it is told to give it back."""
    free_nbytes = 1 << 30

    def empty() -> None:
        nonlocal free_nbytes
        free_nbytes = 3 << 30

    runtime = SimpleNamespace(
        cudaMalloc=lambda _, nbytes: 0 if nbytes <= free_nbytes else OUT_OF_MEMORY, cudaGetLastError=lambda: None
    )
    monkeypatch.setattr("engine.cuda.runtime.shared_memory.runtime", lambda: runtime)
    for name, faked in (("device", nullcontext), ("current_stream", lambda: None), ("empty_cache", empty)):
        monkeypatch.setattr(torch.cuda, name, faked)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_nbytes, 80 << 30))
    cuda_allocated(2 << 30, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"^4\.00 GiB are wanted, and the GPU has 3\.00 free$"):
        cuda_allocated(4 << 30, torch.device("cpu"))


@pytest.mark.parametrize(
    ("num_fitting", "words"),
    [
        (0, r"the model and a full batch do not fit on the GPU \(4 GiB are wanted\): .* max_batched_tokens, or share"),
        (1, r"the KV cache does not fit on the GPU \(4 GiB are wanted\): lower kv_cache_mib"),
    ],
)
def test_pages_that_a_gpu_does_not_hold_are_refused_by_what_would_help(folder, monkeypatch, num_fitting, words):
    """The first are a full prompt's, whatever the cache is set to."""
    made = []

    def allocate(nbytes: int, device: torch.device) -> HostMemory:
        if len(made) == num_fitting:
            raise ConfigError("4 GiB are wanted")
        made.append(nbytes)
        return HostMemory(nbytes)

    monkeypatch.setattr("engine.cuda.kv.kv_cache.allocate", allocate)
    with pytest.raises(ConfigError, match=words):
        device_engine(folder)


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "NCCL error: Cuda failure 'out of memory'"])
def test_a_gpu_that_is_full_when_launches_are_captured_is_told_in_the_same_words(folder, monkeypatch, words):
    """Neither CUDA's error nor NCCL's is torch's own. Others stay what they are."""

    def failing(words: str) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr("engine.cuda.loader.DeviceBackendBuilder._share", lambda *_: failing(words))
    with pytest.raises(ConfigError, match=r"do not fit on the GPU \(.*out of memory.*\): .*tensor_parallel"):
        device_engine(folder)
    monkeypatch.setattr(
        "engine.cuda.loader.DeviceBackendBuilder._share", lambda *_: failing("CUDA error: invalid argument")
    )
    with pytest.raises(RuntimeError, match=r"^CUDA error: invalid argument$"):
        device_engine(folder)


def test_budgets_hold_a_device_s_block(folder):
    with pytest.raises(ConfigError, match=r"max_mixed_tokens is 63; a step needs room for a block of .*, 64 tokens"):
        device_engine(folder, max_mixed_tokens=63)


def test_a_draw_is_that_of_its_distribution(folder):
    engine = device_engine(folder)
    logits = logits_of(engine, PROMPTS[:1], 0)[0, 0]
    counts = np.zeros(VOCAB)
    sampler = engine.sampler
    for first in range(0, 4000, 500):
        rows = [
            Sequence(RequestId(str(seed)), PROMPTS[0], SamplingParams(max_tokens=1, seed=seed // 2, choice=seed % 2))
            for seed in range(first, first + 500)
        ]
        for token in sampler.sample(rows, logits.expand(len(rows), -1).contiguous()):
            counts[token.token_id] += 1
    shares = logits.softmax(-1).numpy()
    assert np.abs(counts / counts.sum() - shares).sum() < 0.25


def test_a_grammar_gives_what_the_cpu_gives(folder):
    grammar = LLMatcher.grammar_from_regex("[a-f]{4,9}[xyz]{2}")
    params = greedy(20, grammar=grammar, ignore_eos=False)
    told = []
    for engine in (load_engine(settings(model=str(folder))), device_engine(folder)):
        for index, prompt in enumerate(PROMPTS):
            engine.submit(request(str(index), prompt, params if index else greedy(5)))
        outputs = drain(engine)
        assert not [failure for output in outputs for failure in output.failed]
        told.append([tokens_of(outputs, str(index)) for index in range(len(PROMPTS))])
    assert told[0] == told[1]
    assert len({len(answer) for answer in told[1]}) > 1


def test_draw_keys_are_made_once_and_are_those_of_seed_and_choice():
    sequences = [Sequence(RequestId(str(seed)), [1, 2], structs.replace(RANDOM, seed=seed)) for seed in (5, 6, 7)]
    sequences.insert(1, Sequence(RequestId("greedy"), [1, 2], greedy()))
    rows = [DrawnRow(sequence) for sequence in sequences]
    columns(rows[:2])
    before = [sequence.draw_key for sequence in sequences]
    assert before[0] is not None and before[1:] == [None, None, None]
    assert columns(rows).seeds.tolist() == [int(draw_keys([5], [0])[0]), 0, *draw_keys([6, 7], [0, 0]).tolist()]
    assert sequences[0].draw_key == before[0]
