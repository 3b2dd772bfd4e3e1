"""Whatever a batch looks like, its kernels were compiled before the first request. No GPU: launches are only noted."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from contracts.errors import ConfigError
from contracts.layout import KVLayout
from contracts.sampling import SamplingParams
from engine.cuda.kv.kv_cache import DeviceCache
from engine.cuda.loader import DeviceBackendBuilder
from engine.cuda.model.calibration import Scales
from engine.cuda.runner import DeviceRunner
from engine.cuda.warmup import WarmUp, row_counts
from kernels import catalog
from kernels.registry import Impl
from kv_transfer.connection import layout_negotiation as conversion
from tests.engine.device_engines import FUSIBLE, device_engine
from tests.engine.driving import answers, drain, greedy, random_prompts, request
from tests.engine.launches import HOPPER, noted_launches
from tests.engine.quantized_models import LAYOUTS, save_quantized
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1}
MODELS = [
    ("llama", FUSIBLE, "float8"),
    ("llama", FUSIBLE, "float8-head"),
    ("qwen3", HEADS, "bfloat16"),
    ("qwen3_moe", HEADS, "float8"),
    ("gpt_oss", HEADS, "bfloat16"),
    ("llama4", HEADS, "float8"),
]
LENGTHS = [
    *((count,) for count in (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 65, 100, 127, 128, 129, 255, 256, 300, 500)),
    *((1,) * count for count in (2, 5, 17, 33, 40)),
    (500, 500, 3),
    (33, 100, 1, 200, 1),
]
WAYS = [
    greedy(3),
    greedy(3, repetition_penalty=1.5),
    SamplingParams(max_tokens=3, seed=5, temperature=0.9, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=3, seed=5, temperature=0.9, ignore_eos=True, frequency_penalty=1.0),
    greedy(1, prompt_logprobs=1),
]
MAX_ROWS, MAX_NUM_SEQS, MAX_LEN = 700, 40, 512


def engine_of(folder, dtype, max_len=MAX_LEN, max_rows=MAX_ROWS):
    return device_engine(folder, dtype, max_num_seqs=MAX_NUM_SEQS, max_model_len=max_len, max_batched_tokens=max_rows)


def device_runner(engine):
    assert isinstance(engine.runner, DeviceRunner)
    return engine.runner


def warm(engine, max_len=MAX_LEN, max_rows=MAX_ROWS):
    """What a start on a GPU launches after its weights are there."""
    runner = device_runner(engine)
    runner.launcher.run_all()
    num_blocks = runner.launcher.cache.num_blocks
    WarmUp(engine.layout, num_blocks, max(max_rows, MAX_NUM_SEQS), MAX_NUM_SEQS, max_len).run(runner)


def serve(engine):
    for lengths in LENGTHS:
        # Ways differ in what is drawn of rows, one a prompt, and in whether each row of a prompt is scored.
        for params in WAYS if len(lengths) > 1 or lengths == (1,) else (WAYS[0], WAYS[-1]):
            answers(engine, random_prompts(VOCAB, lengths), params)
    for count in (1, 3, 6, 20, 39):  # answers, and then a prompt beside them
        for index, prompt in enumerate(random_prompts(VOCAB, (*(1,) * count, 90))):
            while index == count and not engine.step().sampled:
                pass
            engine.submit(request(f"{count}-{index}", prompt, greedy(4)))
        drain(engine)
    shared = random_prompts(VOCAB, (300,))[0]
    for rest in (1, 40, 200):  # the first 256 are in the prefix cache
        answers(engine, [[*shared, *random_prompts(VOCAB, (rest,), seed=rest)[0]]], greedy(2))


def assert_nothing_compiles(folder, dtype, max_rows=MAX_ROWS):
    with noted_launches() as launches:
        engine = engine_of(folder, dtype, max_rows=max_rows)
        warm(engine, max_rows=max_rows)
        known = set(launches.kinds)
        serve(engine)
        assert launches.kinds == known


@pytest.mark.parametrize(("family", "changes", "dtype"), MODELS, ids=[f"{m[0]}-{m[2]}" for m in MODELS])
def test_nothing_compiles_while_serving(family, changes, dtype, tmp_path):
    save_tiny(tmp_path, family, **changes)
    assert_nothing_compiles(tmp_path, dtype)


def handed_over(pool, part_counts):
    """Chunks and messages of several lengths, to peers and from them."""
    for num_parts in part_counts:
        pool.agreed(num_parts, sends=True)
        buffer = pool.allocate(7 * pool.block_nbytes)
        for count in (1, 2, 3, 5, 7):
            pages = np.arange(count, dtype=np.int32)
            pool.pack(pages, buffer, num_parts)
            for checks in (False, True):
                pool.unpack(buffer, pages, checks, num_parts).wait()
            if not pool.scales:
                pool.narrow(pages, buffer, pool.narrowing([1.0] * pool.num_planes), num_parts)
            pool.in_parts(pool.checksums(pages.tolist()).wait(), pages.tolist(), num_parts)
            pool.cut_into(num_parts).verifier.sums(pages.tolist())


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_nothing_compiles_while_pages_are_handed_over_to_groups_of_any_size(dtype, tp_size):
    """Planes that are no multiple of four, of which parts of sums begin anywhere."""
    name = str(dtype).removeprefix("torch.")
    layout = KVLayout.uniform(
        model="m", num_layers=3, num_kv_heads=8, head_dim=64, block_size=64, dtype=name, tp_size=tp_size
    )
    scales = torch.ones(3, 2) if name == "float8_e4m3fn" else None
    with noted_launches() as launches:
        caches = [DeviceCache(layout, 8, dtype, torch.device("cpu"), scales) for _ in range(tp_size)]
        caches[0].share(catalog.registry(HOPPER), [cache.export() for cache in caches[1:]])
        pool, counts, own = caches[0].transfer_pool, conversion.part_counts(layout), set(launches.kinds)
        handed_over(pool, [tp_size])
        assert launches.kinds == own
        pool.expect(counts)
        known = set(launches.kinds)
        assert len(counts) > 1 and known > own
        handed_over(pool, counts)
        assert launches.kinds == known


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_nothing_compiles_behind_products_left_unscaled_with_biases_or_head_norms(family, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.cuda.model.weight_loader.rounds_sparingly", lambda _: False)
    save_tiny(tmp_path, family, **HEADS)
    assert_nothing_compiles(tmp_path, "float8")


def test_nothing_compiles_where_few_rows_are_multiplied_in_parts(tmp_path, monkeypatch):
    """Few rows of wide matrices are multiplied so."""
    monkeypatch.setattr("engine.cuda.model.linear.skinny_parts", lambda rows, *_, **__: 2 if rows <= 64 else None)
    monkeypatch.setattr("engine.cuda.model.weight_loader.rounds_sparingly", lambda _: False)
    save_tiny(tmp_path, "qwen3_moe", **HEADS)
    assert_nothing_compiles(tmp_path, "float8")


def loaded_and_captured(folder, dtype, monkeypatch):
    """Kinds of launches: those that a start runs with a few layers, and those that it records with all."""
    loaded = set()

    @contextmanager
    def compiled_ahead(progress, in_processes):
        yield
        launches.kinds.clear()

    def run_whole(builder, cache):
        loaded.update(launches.kinds)
        launches.kinds.clear()
        weights = builder._weights
        scales = Scales(torch.ones(len(weights.layers), 2), torch.ones(0)) if builder._format.is_fp8 else None
        builder._launcher(builder._model, weights, cache, scales, builder._longest).run_all()
        raise ConfigError("captured")

    monkeypatch.setattr("kernels.compiling.compiled_ahead", compiled_ahead)
    monkeypatch.setattr(DeviceBackendBuilder, "_captures", True)
    monkeypatch.setattr(DeviceBackendBuilder, "_calibrate", run_whole)
    with noted_launches() as launches, pytest.raises(ConfigError, match="captured"):
        engine_of(folder, dtype)
    return loaded, launches.kinds


@pytest.mark.parametrize(("family", "changes", "dtype"), MODELS, ids=[f"{m[0]}-{m[2]}" for m in MODELS])
def test_nothing_is_loaded_while_steps_are_captured(family, changes, dtype, tmp_path, monkeypatch):
    save_tiny(tmp_path, family, num_hidden_layers=9, **changes)
    loaded, captured = loaded_and_captured(tmp_path, dtype, monkeypatch)
    assert captured and captured <= loaded


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_loaded_while_steps_of_weights_as_they_are_stored_are_captured(layout, tmp_path, monkeypatch):
    save_quantized(tmp_path, LAYOUTS[layout])
    loaded, captured = loaded_and_captured(tmp_path, "auto", monkeypatch)
    assert captured and captured <= loaded


@pytest.mark.parametrize(
    ("layout", "max_rows"),
    [
        ("deepseek", 100),
        ("awq", 100),
        ("compressed-rows", 200),
        ("gptq", 200),
        ("deepseek", MAX_ROWS),
        ("gptq", MAX_ROWS),
    ],
)
def test_nothing_compiles_of_weights_as_they_are_stored(layout, max_rows, tmp_path):
    save_quantized(tmp_path, LAYOUTS[layout])
    assert_nothing_compiles(tmp_path, "auto", max_rows)


def test_nothing_compiles_where_there_is_no_room_to_widen_keys_for_attention(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.cuda.model.attention._MAX_WORKSPACE_NBYTES", 4 * 2 * 32 * 384)  # of one short prompt
    save_tiny(tmp_path, "llama", **FUSIBLE)
    assert_nothing_compiles(tmp_path, "float8")


@pytest.mark.parametrize("has_room", [True, False])
def test_nothing_compiles_for_short_chunks_behind_a_long_prefix(has_room, tmp_path, monkeypatch):
    """The keys of one prompt are shared out, those of several at once are not."""
    if not has_room:
        monkeypatch.setattr("engine.cuda.model.attention._MAX_WORKSPACE_NBYTES", 4 * 2 * 32 * 700)
    save_tiny(tmp_path, "llama", **FUSIBLE, max_position_embeddings=4096)
    with noted_launches() as launches:
        engine = engine_of(tmp_path, "float8", 4096)
        warm(engine, 4096)
        known = set(launches.kinds)
        assert "merge_parts_kernel" in {name for name, *_ in known}
        prefix = random_prompts(VOCAB, (3000,))[0]
        for rests in [(count,) for count in (1, 5, 12, 30, 60, 64, 65, 100, 128, 200, 300, 600)] + [(20, 70, 130)]:
            answers(engine, [[*prefix, *rest] for rest in random_prompts(VOCAB, rests)], greedy(2))
        assert launches.kinds == known


def test_nothing_compiles_for_few_rows_that_another_attention_leaves_to_ours(tmp_path, monkeypatch):
    best = Impl(
        "attn_prefill", "best", 99, catalog.always, "tests.engine.launches:attends_to_nothing", wants_e4m3=True,
        for_few="triton",
    )  # fmt: skip
    monkeypatch.setattr(catalog, "IMPLS", (*catalog.IMPLS, best))
    save_tiny(tmp_path, "llama", **FUSIBLE, max_position_embeddings=8448)
    with noted_launches() as launches:
        engine = engine_of(tmp_path, "float8", 8448)
        warm(engine, 8448)
        known = set(launches.kinds)
        assert {"attn_prefill_kernel", "attn_rows_parts_kernel"} <= {name for name, *_ in known}
        prefix = random_prompts(VOCAB, (8192,))[0]
        for rests in [(count,) for count in (1, 4, 5, 30, 64, 65, 127, 128, 200, 255)] + [(20, 70)]:
            answers(engine, [[*prefix, *rest] for rest in random_prompts(VOCAB, rests)], greedy(2))
        for length in (7730, 7800):  # scored, so nothing is cached: after chunks of 700 the last 30 and 100 are few
            answers(engine, [prefix[:length]], greedy(2, prompt_logprobs=1))
        assert launches.kinds == known


def test_a_budget_of_more_rows_than_all_sequences_have_is_warmed_up_for_as_many_as_they_have(tmp_path):
    save_tiny(tmp_path, "llama")
    with noted_launches():
        warm(engine_of(tmp_path, "float8", 16), 16)  # 44 sequences would have the 700 rows; 40 may run


def test_without_a_warm_up_kernels_would_be_compiled_while_serving(tmp_path):
    save_tiny(tmp_path, "llama", **FUSIBLE)
    with noted_launches() as launches:
        engine = engine_of(tmp_path, "float8")
        device_runner(engine).launcher.run_all()
        known = set(launches.kinds)
        serve(engine)
        names = {name for name, *_ in launches.kinds - known}
    assert {"norm_kernel", "attn_prefill_kernel"} <= names


def test_counts_of_rows_have_both_sides_of_every_power_of_two_and_of_the_largest():
    assert row_counts(1) == [1]
    assert row_counts(6) == [6, 5, 4, 3, 2, 1]
    assert row_counts(64) == [64, 63, 32, 31, 16, 15, 8, 7, 4, 3, 2, 1]
    assert row_counts(100)[:4] == [100, 99, 64, 63]
