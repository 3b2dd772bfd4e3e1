"""Answers with LoRA adapters are those of the models that PEFT makes of them by merging."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bench.models.transformers_oracle import greedy as oracle_greedy
from contracts.errors import AdapterMissing, ConfigError
from contracts.request import AdapterRef
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import EngineRequest
from tests.engine.driving import drain, greedy, random_prompts, request, settings, tokens_of
from tests.engine.lora_folders import ATTENTION, DENSE, save_lora
from tests.engine.test_handoff import hand_over
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(VOCAB, (3, 17, 40, 90))
NAMES = ("all", "some", "stable")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> tuple[Path, dict[str, list[list[int]]]]:
    """A tiny llama's folder, which has three adapters, and transformers' answers by adapter, "" of the model alone."""
    folder = tmp_path_factory.mktemp("adapted")
    model = save_tiny(folder, "llama")
    merged = {
        "all": save_lora(folder / "all", model, DENSE, 1),
        "some": save_lora(folder / "some", model, ("q_proj", "up_proj"), 2, rank_pattern={"1.self_attn.q_proj": 7}),
        "stable": save_lora(
            folder / "stable", model, ("v_proj", "down_proj"), 3, use_rslora=True, alpha_pattern={"v_proj": 3},
            target_modules=r".*\.(v|down)_proj",
        ),
        "": model,
    }  # fmt: skip
    return folder, {name: [oracle_greedy(each, p, 12) for p in PROMPTS] for name, each in merged.items()}


def open_engine(folder: Path, names: Sequence[str] = NAMES, **changes: Any) -> Engine:
    return load_engine(settings(model=str(folder), lora_modules=tuple((n, str(folder / n)) for n in names), **changes))


def asked(engine: Engine, adapter: str, index: int, max_tokens: int = 12) -> EngineRequest:
    """Prompt `index` with an adapter, "" for none."""
    refs = {ref.name: ref for ref in engine.adapters.refs}
    plain = request(f"{adapter}-{index}", PROMPTS[index], greedy(max_tokens))
    return replace(plain, adapter=refs[adapter] if adapter else None)


def answers(engine: Engine, max_tokens: int = 12) -> dict[str, list[list[int]]]:
    """All prompts with each adapter and with none, in one batch."""
    for index in range(len(PROMPTS)):
        for name in (*NAMES, ""):
            engine.submit(asked(engine, name, index, max_tokens))
    outputs = drain(engine)
    return {n: [tokens_of(outputs, f"{n}-{index}") for index in range(len(PROMPTS))] for n in (*NAMES, "")}


def test_each_answer_of_a_mixed_batch_is_that_of_its_merged_model(adapters):
    folder, expected = adapters
    assert len({str(each) for each in expected.values()}) == len(expected), "an adapter that changes nothing"
    assert answers(open_engine(folder)) == expected


@pytest.mark.parametrize("speculate", ["ngram", "model"])
def test_chunks_prefix_hits_and_drafts_change_nothing_and_no_adapter_finds_the_kv_of_another(
    adapters, speculate, tmp_path
):
    folder, expected = adapters
    if speculate == "model":
        save_tiny(tmp_path, "llama", num_hidden_layers=1)
        speculate = str(tmp_path)
    engine = open_engine(folder, max_batched_tokens=48, max_mixed_tokens=16, max_num_seqs=5, speculate=speculate)
    assert answers(engine) == expected
    assert engine.stats().prefix_hit_tokens == 0, "equal prompts, and no two of them with the same adapter"
    assert answers(engine) == expected
    assert engine.stats().prefix_hit_tokens > 0


def test_preempted_answers_go_on_with_their_adapters(adapters):
    folder, expected = adapters
    engine = open_engine(folder, kv_cache_nbytes=24 * open_engine(folder, ()).layout.block_nbytes)
    long_answers = answers(engine, 60)
    assert engine.stats().num_preemptions > 0
    assert {name: [answer[:12] for answer in each] for name, each in long_answers.items()} == expected


def test_a_handed_over_answer_goes_on_with_its_adapter(adapters, monkeypatch):
    folder, expected = adapters
    source, target = open_engine(folder, max_batched_tokens=48), open_engine(folder, NAMES[::-1])
    monkeypatch.setattr("tests.engine.test_handoff.request", lambda name, *given, **flags: replace(
        request(name, *given, **flags), adapter=source.adapters.refs[0]
    ))  # fmt: skip
    for repeat in "ab":  # the second finds the prompt's blocks in decode's cache
        reservation, tokens = hand_over(source, target, repeat, PROMPTS[3], greedy(12))
        assert tokens == expected["all"][3]
        assert (reservation.skip_tokens > 0) == (repeat == "b")


def test_a_row_is_to_the_bit_what_it_is_alone(adapters):
    folder, _ = adapters
    engine = open_engine(folder)
    logprobs = greedy(6, logprobs=0)
    for index, name in enumerate((*NAMES, "", "all")):
        engine.submit(replace(asked(engine, name, 2), request_id=str(index), sampling=logprobs))
    together = [s.token.logprob for o in drain(engine) for s in o.sampled if s.request_id == "4"]
    alone = open_engine(folder)
    alone.submit(replace(asked(alone, "all", 2), sampling=logprobs))
    assert together == [s.token.logprob for o in drain(alone) for s in o.sampled]


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gemma3", DENSE),  # gains on both sides
        ("glm4", (*ATTENTION, "gate_up_proj", "down_proj")),  # pairs side by side, gate and up as one
        ("granite", DENSE),  # multipliers
        ("mixtral", ATTENTION),
        ("olmo2", DENSE),  # norms behind
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj")),  # q, k and v as one
    ],
)
def test_adapters_of_other_families(tmp_path, family, targets):
    model = save_tiny(tmp_path, family)
    merged = save_lora(tmp_path / "lora", model, targets)
    engine = open_engine(tmp_path, ["lora"])
    for index in range(len(PROMPTS)):
        engine.submit(asked(engine, "lora", index))
    outputs = drain(engine)
    expected = [oracle_greedy(merged, prompt, 12) for prompt in PROMPTS]
    assert [tokens_of(outputs, f"lora-{index}") for index in range(len(PROMPTS))] == expected


def test_adapters_come_and_go_and_what_runs_goes_on(adapters):
    folder, expected = adapters
    engine = load_engine(settings(model=str(folder), enable_lora=True))
    first = engine.adapters.load("x", str(folder / "all"))
    assert engine.adapters.load("x", str(folder / "all")) == first, "the same once more"
    engine.submit(replace(asked(engine, "x", 1), request_id="running"))
    engine.step()
    engine.adapters.unload("x")
    with pytest.raises(AdapterMissing, match="the adapter 'x' is not loaded on this worker"):
        engine.submit(replace(asked(engine, "", 1), adapter=first))
    second = engine.adapters.load("x", str(folder / "some"))
    with pytest.raises(AdapterMissing, match="the adapter 'x' has other weights on this worker"):
        engine.submit(replace(asked(engine, "", 1), adapter=first))
    with pytest.raises(ConfigError, match="'x' is loaded already, with other weights; unload it first"):
        engine.adapters.load("x", str(folder / "all"))
    engine.submit(replace(asked(engine, "", 1), request_id="new", adapter=second))
    outputs = drain(engine)
    assert tokens_of(outputs, "new") == expected["some"][1]
    rest = tokens_of(outputs, "running")
    assert rest == expected["all"][1][-len(rest) :] and len(rest) > 9
    with pytest.raises(ConfigError, match="no adapter 'y' is loaded; there are x"):
        engine.adapters.unload("y")


def test_other_weights_or_numbers_have_another_digest(adapters, tmp_path):
    folder, _ = adapters
    model = save_tiny(tmp_path, "llama")
    seen = [ref.digest for ref in open_engine(folder).adapters.refs]
    save_lora(tmp_path / "same", model, DENSE)
    save_lora(tmp_path / "alpha", model, DENSE, lora_alpha=9)
    same, alpha = (ref.digest for ref in open_engine(tmp_path, ["same", "alpha"]).adapters.refs)
    assert same == seen[0] and len({alpha, *seen}) == 4


ROOT = "base_model.model.model."
FIRST = "layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora is True; it is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]; it is not supported"),
        ({"bias": "all"}, "bias is 'all'; adapters that bring biases"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'; it changes the model's own weights"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": 0}, "r is 0; a whole number from 1 on"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern is \{'\(': 2\}; a table"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'; a number is expected"),
        ({"target_modules": ["k_proj"]}, "weights for 'model.layers.0.self_attn.q_proj', which target_modules"),
        ({"r": 5}, r"q_proj.lora_A.weight' is \[4, 96\]; \[5, 96\] is expected: r or rank_pattern says 5"),
        ({"something_new": {"x": 1}}, "something_new is .* it is not supported"),
    ],
)  # fmt: skip
def test_configurations_that_are_not_served_are_refused_by_the_field(adapters, tmp_path, changes, words):
    folder, _ = adapters
    save_lora(tmp_path / "lora", save_tiny(tmp_path, "llama"), ("q_proj",), stated=changes)
    engine = load_engine(settings(model=str(folder), enable_lora=True))
    with pytest.raises(ConfigError, match=words):
        engine.adapters.load("lora", str(tmp_path / "lora"))


@pytest.mark.parametrize(
    ("renamed", "words"),
    [
        ({f"{FIRST}.lora_A": None}, rf"lacks '{ROOT}{FIRST}.lora_A.weight'"),
        (
            {f"{FIRST}.lora_{letter}": f"layers.3.self_attn.q_proj.lora_{letter}" for letter in "AB"},
            "this model has 3 layers: the adapter is of another",
        ),
        ({f"{FIRST}.lora_A": "layers.0.mlp.gate.lora_A"}, "'model.layers.0.mlp.gate', which this model does not have"),
        ({f"{FIRST}.lora_A": "embed_tokens.lora_embedding_A"}, "lora_embedding_A.weight' is not supported"),
        ({f"{FIRST}.lora_A": "embed_tokens.lora_A"}, "adapters of 'model.embed_tokens' are not supported"),
        ({f"{FIRST}.lora_A": "layers.0.self_attn.o_proj.lora_A"}, f"lacks '{ROOT}layers.0.self_attn.o_proj.lora_B"),
    ],
)
def test_tensors_that_the_model_has_no_place_for_are_refused_by_name(adapters, tmp_path, renamed, words):
    folder, _ = adapters
    save_lora(tmp_path / "lora", save_tiny(tmp_path, "llama"), ("q_proj",), target_modules="all-linear")
    file = tmp_path / "lora" / "adapter_model.safetensors"
    names = {f"{ROOT}{old}.weight": new and f"{ROOT}{new}.weight" for old, new in renamed.items()}
    tensors = {names.get(name, name): tensor for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in tensors.items() if name}, file)
    engine = load_engine(settings(model=str(folder), enable_lora=True))
    with pytest.raises(ConfigError, match=words):
        engine.adapters.load("lora", str(tmp_path / "lora"))


def test_what_computes_no_adapters_says_so(adapters, tmp_path, monkeypatch):
    folder, _ = adapters
    plain = load_engine(settings(model=str(folder)))
    with pytest.raises(ConfigError, match="this engine serves no adapters: set enable_lora"):
        plain.adapters.load("all", str(folder / "all"))
    with pytest.raises(AdapterMissing):
        plain.submit(replace(asked(plain, "", 1), adapter=AdapterRef("all", b"x" * 16)))
    with pytest.raises(ConfigError, match="'native' computes no LoRA adapters"):
        open_engine(folder, dtype="native")
    with pytest.raises(ConfigError, match=r"nowhere is no folder of a LoRA adapter: adapter_config\.json is missing"):
        open_engine(folder, ["nowhere"])
    monkeypatch.setattr("engine.loader.resolve_device", lambda device: "cuda:0")
    with pytest.raises(ConfigError, match="lora_modules is set, on cuda; adapters are served on CPUs"):
        open_engine(folder, device="cuda")
