"""An EAGLE3 head on the native kernels drafts what the formulas say, where nothing is rounded."""

from pathlib import Path
from typing import Any, NoReturn

import pytest

from bench.models.transformers_oracle import greedy as oracle_greedy
from checkpoint import open_checkpoint
from contracts.errors import ConfigError
from engine.cpu.eagle3.drafter import Eagle3Drafter
from engine.cpu.eagle3.torch_head import TorchEagle3Head
from engine.cpu.native.eagle3_head import NativeEagle3Head
from engine.loader import load_engine
from kernels.cpu.build import BuildError
from kernels.cpu.native import LEVELS, load_kernels
from tests.engine.cpu.test_native import SHAPE, native_engine
from tests.engine.driving import answers, greedy, random_prompts, settings
from tests.engine.speculative.judged_drafts import judge, require_formulas
from tests.engine.speculative.tiny_heads import ReferenceDrafts, save_head, speculators
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

WIDTHS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
HEADS: dict[str, dict[str, Any]] = {
    "plain": speculators(WIDTHS),
    "norms before": speculators(WIDTHS, norm_before_residual=True, norm_before_fc=True),
    "norms of each": speculators(WIDTHS, fc_norm=True, norm_output=True),
    "two layers": speculators(WIDTHS | {"model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": True}),
    "narrow": speculators(WIDTHS | {"hidden_size": 64}, target_hidden_size=128),
}
LENGTHS = [1, 7, 70, 33, 16]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("target")
    model = save_tiny(folder, "llama", **SHAPE)
    prompts = random_prompts(VOCAB, LENGTHS)
    return folder, model, prompts, [oracle_greedy(model, prompt, 30) for prompt in prompts]


@pytest.mark.parametrize("kind", HEADS)
def test_drafts_are_those_of_the_formulas(target, tmp_path: Path, kind: str):
    folder, model, prompts, expected = target
    config = open_checkpoint(str(folder)).config
    head = save_head(tmp_path, HEADS[kind], config)
    changes: dict[str, Any] = {"max_batched_tokens": 48, "max_num_seqs": 3, "speculate": str(head)}
    engine = native_engine(folder, adapts_drafts=False, **changes)
    judged, reference = judge(engine, prompts, expected), ReferenceDrafts(head, config, model)
    for _ in range(2):  # the second time behind prefix hits
        judged.drafts.clear()
        assert answers(engine, prompts, greedy(30)) == expected
        require_formulas(judged, reference)
    assert engine.stats().prefix_hit_tokens > 0 < sum(engine.stats().num_accepted_by_place)


@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set_drafts_alike(target, tmp_path: Path, level: str):
    folder, model, prompts, expected = target
    config = open_checkpoint(str(folder)).config
    head = save_head(tmp_path, HEADS["norms before"], config)
    kernels = load_kernels()
    if kernels.set_level(level) != level:
        pytest.skip(f"this CPU has no {level}")
    try:
        engine = native_engine(folder, adapts_drafts=False, speculate=str(head))
        judged = judge(engine, prompts, expected)
        assert answers(engine, prompts, greedy(30)) == expected
        require_formulas(judged, ReferenceDrafts(head, config, model))
    finally:
        kernels.set_level(kernels.best_level)


def test_a_head_of_another_width_is_refused_by_its_name(target, tmp_path: Path):
    folder, *_ = target
    stated = speculators(WIDTHS | {"intermediate_size": 136})
    head = save_head(tmp_path, stated, open_checkpoint(str(folder)).config)
    with pytest.raises(ConfigError, match="the head's intermediate_size is 136; the native step takes multiples of 32"):
        native_engine(folder, speculate=str(head))


@pytest.mark.parametrize("dtype", ["native", "float32"])
def test_the_log_of_the_cache_counts_the_head_s_share(target, tmp_path: Path, dtype: str, caplog):
    folder, *_ = target
    head = save_head(tmp_path, HEADS["two layers"], open_checkpoint(str(folder)).config)
    caplog.set_level("INFO")
    nbytes = 32 << 20
    load_engine(settings(model=str(folder), dtype=dtype, speculate=str(head), kv_cache_nbytes=nbytes))
    (told,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("the KV cache")]
    assert f"in {(nbytes >> 20) - 1} MiB" in told  # whole blocks, so a little less


def unbuilt(*_: object) -> NoReturn:
    raise BuildError("no C++ compiler is here")


@pytest.mark.parametrize(("dtype", "is_built"), [("float16", True), ("float16", False), ("float32", True)])
def test_beside_torch_s_path_the_kernels_compute_the_head_where_they_are(
    target, tmp_path: Path, dtype: str, is_built: bool, monkeypatch: pytest.MonkeyPatch
):
    folder, _, prompts, _ = target
    head = save_head(tmp_path, HEADS["plain"], open_checkpoint(str(folder)).config)
    if not is_built:
        monkeypatch.setattr("engine.cpu.eagle3.loader.load_kernels", unbuilt)
    chosen: dict[str, Any] = {"model": str(folder), "dtype": dtype, "num_threads": 2}
    engine = load_engine(settings(speculate=str(head), adapts_drafts=False, **chosen))
    judged = judge(engine, prompts, [[] for _ in prompts])
    kind = NativeEagle3Head if dtype == "float16" and is_built else TorchEagle3Head
    drafter = judged._drafter  # pyright: ignore[reportPrivateUsage]
    assert isinstance(drafter, Eagle3Drafter) and isinstance(drafter._head, kind)  # pyright: ignore[reportPrivateUsage]
    assert answers(engine, prompts, greedy(20)) == answers(load_engine(settings(**chosen)), prompts, greedy(20))
    assert all(len(draft) > 0 for draft in judged.drafts.values())
