"""Each family's numbers are those of transformers on the same weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.models.transformers_oracle import greedy as oracle_greedy
from bench.models.transformers_oracle import oracle
from contracts.errors import ConfigError
from engine.loader import load_engine
from tests.engine.driving import answers, greedy, needs_bfloat16, random_prompts, request, scored, settings
from tests.engine.tiny_models import VOCAB, save_tiny

pytestmark = pytest.mark.slow

LENGTHS = (1, 5, 16, 17, 40, 150, 300)  # of the prompts that `family` answers


def test_greedy_answers_equal_transformers(family):
    folder, prompts, expected = family
    assert answers(load_engine(settings(model=str(folder))), prompts, greedy()) == expected


def test_chunked_prefill_and_prefix_hits_change_nothing(family):
    folder, prompts, expected = family
    engine = load_engine(settings(model=str(folder), max_batched_tokens=48, max_mixed_tokens=16, max_num_seqs=3))
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


@pytest.mark.parametrize("changes", [{}, {"truncate": False, "beta_fast": 16.0}, {"attention_factor": 1.2}])
def test_yarn_is_that_of_transformers(tmp_path, changes):
    yarn = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    model = save_tiny(tmp_path, "llama", rope_parameters=yarn | changes)
    prompts = random_prompts(VOCAB, (40, 150))
    expected = [oracle_greedy(model, prompt, 12) for prompt in prompts]
    assert answers(load_engine(settings(model=str(tmp_path))), prompts, greedy()) == expected


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
