"""Each family's numbers are those of transformers on the same weights."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.models.transformers_oracle import greedy as oracle_greedy
from bench.models.transformers_oracle import oracle
from contracts.errors import ConfigError
from engine.loader import load_engine
from tests.engine.driving import answers, greedy, leave_nans, needs_bfloat16, random_prompts, request, scored, settings
from tests.engine.tiny_models import (
    DEVICE_FAMILIES,
    FAMILIES,
    VOCAB,
    as_multimodal,
    change_config,
    save_answered,
    save_tiny,
)

pytestmark = pytest.mark.slow

LENGTHS = (1, 5, 16, 17, 40, 150, 300)  # of the prompts that `family` answers


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, tmp_path_factory):
    """The shared one, of each family."""
    return save_answered(tmp_path_factory.mktemp(request.param), request.param, LENGTHS)


def test_greedy_answers_equal_transformers(family):
    folder, prompts, expected = family
    assert answers(load_engine(settings(model=str(folder))), prompts, greedy()) == expected


def test_chunked_prefill_and_prefix_hits_change_nothing(family):
    folder, prompts, expected = family
    engine = load_engine(settings(model=str(folder), max_batched_tokens=48, max_mixed_tokens=16, max_num_seqs=3))
    leave_nans(engine)
    assert answers(engine, prompts, greedy()) == expected
    assert answers(engine, prompts, greedy()) == expected
    assert engine.stats().prefix_hit_tokens > 0


def test_preempted_sequences_answer_the_same(family):
    folder, prompts, expected = family
    layout = load_engine(settings(model=str(folder))).layout
    engine = load_engine(settings(model=str(folder), kv_cache_nbytes=21 * layout.block_nbytes))
    long_answers = answers(engine, prompts[:5], greedy(100))
    assert engine.stats().num_preemptions > 0
    assert [answer[:12] for answer in long_answers] == expected[:5]


def test_the_room_for_prompts_beside_the_answers_of_now_is_reported(tmp_path):
    save_tiny(tmp_path, "llama")
    engine = load_engine(settings(model=str(tmp_path), max_batched_tokens=48, max_mixed_tokens=17))
    for index, prompt in enumerate(random_prompts(VOCAB, [5, 5, 5])):
        assert engine.stats().prompt_tokens_per_mixed_step == max(17 - index, 16)  # a block at least
        engine.submit(request(f"r{index}", prompt, greedy(40)))
        engine.step()
        engine.step()


def test_an_output_head_that_is_stored_is_the_one_that_answers(tmp_path):
    """A head that was trained by itself, in a model whose config.json still says that it is the embedding."""
    save_tiny(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, file, {"format": "pt"})
    engine, prompts = load_engine(settings(model=str(tmp_path))), random_prompts(VOCAB, [5, 40])
    reference = oracle(engine.checkpoint)
    assert answers(engine, prompts, greedy()) == [oracle_greedy(reference, prompt, 12) for prompt in prompts]


def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path):
    save_tiny(tmp_path, "llama")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 160', '"intermediate_size": 161'))
    with pytest.raises(ConfigError, match=r"gate_proj.weight' is \[160, 96\]; its configuration says \[161, 96\]"):
        load_engine(settings(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("phi3", {"num_key_value_heads": 1}, r"qkv_proj.weight' is \[160, 96\]; its configuration says 128 rows"),
        ("glm4", {"intermediate_size": 80}, r"gate_up_proj.weight' is \[320, 96\]; its configuration says 160 rows"),
    ],
)
def test_fused_matrices_of_another_height_than_their_parts_are_refused(tmp_path, family, changes, words):
    """Rows of k, v and up would be taken from other places, without a word."""
    save_tiny(tmp_path, family)
    change_config(tmp_path, changes)
    with pytest.raises(ConfigError, match=words):
        load_engine(settings(model=str(tmp_path)))


def test_a_missing_tensor_is_named(tmp_path):
    save_tiny(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks the tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_engine(settings(model=str(tmp_path)))


@pytest.mark.parametrize("family", ["llama", "llama4"])
@pytest.mark.parametrize("change", [-1, 1])
def test_another_number_of_layers_than_the_weights_have_is_told_before_one_is_loaded(tmp_path, family, change):
    """Too few in config.json loaded without a word, and answered nonsense; of too many the last was missed last."""
    save_tiny(tmp_path, family)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    there = config["num_hidden_layers"]
    config |= {"num_hidden_layers": there + change, "layer_types": None, "no_rope_layers": None, "moe_layers": None}
    file.write_text(json.dumps(config))
    stages = []
    with pytest.raises(ConfigError, match=rf"have {there} layers, its configuration says {there + change}: one of"):
        load_engine(settings(model=str(tmp_path)), lambda stage, *_: stages.append(stage))
    assert "load" not in stages


def test_another_vocabulary_than_the_weights_have_is_told_before_a_layer_is_loaded(tmp_path):
    """It was told last: of a large model after minutes."""
    save_tiny(tmp_path, "llama")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 320', '"vocab_size": 321'))
    stages = []
    with pytest.raises(ConfigError, match=r"embed_tokens.weight' is \[320, 96\]; its configuration says \[321, 96\]"):
        load_engine(settings(model=str(tmp_path)), lambda stage, *_: stages.append(stage))
    assert "load" not in stages


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 3.0], "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0, 11.0]}
"""Factors of the 6 pairs that are turned in a Phi-3's head."""


@pytest.mark.parametrize(
    "rope",
    [
        YARN,
        YARN | {"truncate": False, "beta_fast": 16.0},
        YARN | {"attention_factor": 1.2},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
    ],
)
def test_scalings_of_rope_are_those_of_transformers(tmp_path, rope):
    model = save_tiny(tmp_path, "llama", rope_parameters=rope | {"rope_theta": 1000.0})
    prompts = random_prompts(VOCAB, (40, 150))
    expected = [oracle_greedy(model, prompt, 12) for prompt in prompts]
    assert answers(load_engine(settings(model=str(tmp_path))), prompts, greedy()) == expected


@pytest.mark.parametrize(("max_model_len", "lengths"), [(64, (5, 40)), (512, (65, 150))])
def test_longrope_has_the_factors_of_the_contexts_that_are_served(tmp_path, max_model_len, lengths):
    """transformers takes those of each prompt's own length."""
    rope = FACTORS | {"rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.75}
    model = save_tiny(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    prompts = random_prompts(VOCAB, lengths)
    expected = [oracle_greedy(model, prompt, 12) for prompt in prompts]
    engine = load_engine(settings(model=str(tmp_path), max_model_len=max_model_len))
    assert answers(engine, prompts, greedy()) == expected
    whole = load_engine(settings(model=str(tmp_path)))
    assert (whole.layout.model == engine.layout.model) == (max_model_len == 512)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {"sliding_window": 16}),
        ("mixtral", {"sliding_window": 40}),
        ("phi3", {"sliding_window": 40}),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}),
        ("qwen3_moe", {"sliding_window": 16, "use_sliding_window": True}),
    ],
)
def test_windows_are_those_of_transformers(tmp_path, family, fields):
    model = save_tiny(tmp_path, family, **fields)
    prompts = random_prompts(VOCAB, [5, 40, 150, 300])
    expected = [oracle_greedy(model, prompt, 12) for prompt in prompts]
    engine = load_engine(settings(model=str(tmp_path), max_batched_tokens=48))
    assert answers(engine, prompts, greedy()) == expected
    assert answers(engine, prompts, greedy()) == expected
    assert engine.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v2", {"topk_method": "greedy"}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"routed_scaling_factor": 1.6}),
        ("deepseek_v3", {"topk_group": 4}),
        ("gemma3", {"query_pre_attn_scalar": 25}),
        ("gemma3", {"sliding_window": 41}),
        ("gemma3", {"hidden_size": 96, "layer_types": ["full_attention"] * 3}),
        ("glm4", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}),
        ("glm4_moe", {"topk_group": 4}),
        ("granite", {"residual_multiplier": 0.25}),
        ("granite", {"embedding_multiplier": 11.0}),
        ("granite", {"attention_multiplier": 0.2}),
        ("granite", {"logits_scaling": 7.0}),
        ("qwen2_moe", {"norm_topk_prob": True}),
    ],
)
def test_a_little_of_what_sets_a_family_apart_shows(tmp_path, family, changes):
    save_tiny(tmp_path, family)
    (prompt,) = random_prompts(VOCAB, [150])
    before = torch.tensor(scored(tmp_path, prompt))
    change_config(tmp_path, changes)
    assert (torch.tensor(scored(tmp_path, prompt)) - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float16", 0.02), ("int8", 0.3), pytest.param("bfloat16", 0.15, marks=needs_bfloat16)]
)
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - set(DEVICE_FAMILIES)))
def test_numbers_of_other_formats_are_near(tmp_path, family, dtype, bound):
    """Some fold gains into weights, some do not."""
    save_tiny(tmp_path, family)
    (prompt,) = random_prompts(VOCAB, [100])
    exact, rounded = (torch.tensor(scored(tmp_path, prompt, dtype=each)) for each in ("float32", dtype))
    assert (rounded - exact).abs().mean() < bound


def test_the_text_part_of_a_multimodal_gemma_is_served(tmp_path, caplog):
    model = save_tiny(tmp_path, "gemma3")
    prompts = random_prompts(VOCAB, [5, 150])
    expected = [oracle_greedy(model, prompt, 12) for prompt in prompts]
    as_multimodal(tmp_path, "Gemma3ForConditionalGeneration", "gemma3", "vision_tower.vision_model.embeddings")
    with caplog.at_level(logging.INFO):
        assert answers(load_engine(settings(model=str(tmp_path))), prompts, greedy()) == expected
    assert "2 tensors of the vision tower are not read: text alone is served" in caplog.text


SWITCHED = {"sliding_window": 16, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen2", {"sliding_window": 16}),
        ("qwen2", {**SWITCHED, "max_window_layers": 3}),
        ("qwen2", {**SWITCHED, "max_window_layers": 0, "layer_types": ["full_attention"] * 3}),
    ],
)
def test_a_window_that_no_layer_of_transformers_has_is_none(tmp_path, family, fields):
    save_tiny(tmp_path, family)
    file, windows = tmp_path / "config.json", ("use_sliding_window", "max_window_layers", "layer_types")
    config = {key: value for key, value in json.loads(file.read_text()).items() if key not in windows}
    file.write_text(json.dumps(config | fields))
    engine, prompts = load_engine(settings(model=str(tmp_path))), random_prompts(VOCAB, [5, 40, 150])
    reference = oracle(engine.checkpoint)
    assert answers(engine, prompts, greedy()) == [oracle_greedy(reference, prompt, 12) for prompt in prompts]


@needs_bfloat16
def test_biases_that_all_keys_share_cost_a_prompt_in_bfloat16_nothing(tmp_path):
    """Qwen2's lift a head's scores to hundreds, where bfloat16 has steps of 1 and 2; a softmax sees their differences
    alone.
    """
    (prompt,) = random_prompts(VOCAB, [300])
    model = save_tiny(tmp_path, "qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e12})
    for layer in model.model.layers:
        for part, bias in ((layer.self_attn.q_proj, 8.0), (layer.self_attn.k_proj, 100.0)):
            part.weight.data.view(-1, 16, 96)[:, 7] = 0.0  # of the pair that rope turns least
            part.bias.data.view(-1, 16)[:, 7] = bias
    model.save_pretrained(tmp_path)
    exact, rounded = (torch.tensor(scored(tmp_path, prompt, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert (rounded - exact).abs().mean() < 0.015


@needs_bfloat16
def test_heads_that_are_no_whole_words_are_kept_in_bfloat16(tmp_path):
    save_tiny(tmp_path, "llama3", head_dim=18)
    (prompt,) = random_prompts(VOCAB, [300])
    exact, rounded = (torch.tensor(scored(tmp_path, prompt, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert (rounded - exact).abs().mean() < 0.015
