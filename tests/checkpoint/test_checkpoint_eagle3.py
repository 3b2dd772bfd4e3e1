"""EAGLE3 heads as public checkpoints are stored: both dialects, what a layer id means, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.models.eagle3_reference import Eagle3Reference
from checkpoint.huggingface.eagle3_folder import Eagle3Folder, open_eagle3
from contracts.errors import ConfigError
from models.config import ModelConfig
from models.eagle3 import optional_tensors, required_tensors
from tests.engine.speculative.tiny_heads import write_head

TARGET = ModelConfig(
    family="llama", vocab_size=48, hidden_size=16, intermediate_size=24, num_layers=12, num_heads=4, num_kv_heads=2,
    head_dim=4, norm_eps=1e-5, rope_theta=10000.0, max_model_len=128, tied_embeddings=True,
)  # fmt: skip
LAYER = {
    "hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64,
    "vocab_size": 48, "hidden_act": "silu",
}  # fmt: skip
DRAFTED = torch.tensor([1, 4, 5, 9, 11, 17, 30, 31, 40, 47])
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def specforge(**fields: Any) -> dict[str, Any]:
    """Return a flat config.json, as SpecForge writes it."""
    return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 10} | LAYER | fields


def speculators(layer: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return a config.json as speculators writes it."""
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 10,
        "transformer_layer_config": {"model_type": "llama"} | LAYER | (layer or {}),
    } | fields  # fmt: skip


def write(folder: Path, stated: dict[str, Any], optional: tuple[str, ...] = (), seed: int = 0) -> Path:
    """Write a head of random weights in the exact names of its dialect."""
    from checkpoint.huggingface.eagle3_folder import read_eagle3

    config = read_eagle3(stated, TARGET, "made here")
    draw = torch.Generator().manual_seed(seed)
    shapes = required_tensors(config) | {name: optional_tensors(config)[name] for name in optional}
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in sorted(shapes.items())}
    if config.has_reduced_vocabulary:
        is_drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
        is_drafted[DRAFTED] = True
        tensors |= {"d2t": DRAFTED - torch.arange(len(DRAFTED)), "t2d": is_drafted}
    return write_head(folder, stated, config.dialect, tensors)


def load(head: Eagle3Folder) -> dict[str, torch.Tensor]:
    return {name: load_file(file)[stored] for name, (file, stored) in head.files.items()}


def drafts_of(folder: Path, target: ModelConfig = TARGET, k: int = 4) -> list[int]:
    """Return what a head drafts after eight tokens."""
    head = open_eagle3(folder, target)
    draw = torch.Generator().manual_seed(7)
    embedding = torch.randn(target.vocab_size, target.hidden_size, generator=draw)
    aux = torch.randn(7, head.config.fc_width, generator=draw)
    tokens = torch.randint(target.vocab_size, (8,), generator=draw).tolist()
    return Eagle3Reference(head.config, load(head), embedding, embedding).draft(aux, tokens, k)


def test_both_dialects_say_the_same_of_the_same_weights(tmp_path: Path) -> None:
    first = drafts_of(write(tmp_path / "specforge", specforge()))
    assert first == drafts_of(write(tmp_path / "speculators", speculators()))
    assert set(first) <= set(DRAFTED.tolist())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("make", [specforge, speculators])
def test_each_kind_of_norm_is_read_and_counts(tmp_path: Path, make: Callable[..., dict[str, Any]], norm: str) -> None:
    head = open_eagle3(write(tmp_path, make(**{norm: True})), TARGET)
    assert {name: getattr(head.config, name) for name in NORMS} == {name: name == norm for name in NORMS}
    plain = Eagle3Reference(replace(head.config, **{norm: False}), load(head), torch.eye(48, 16))
    normed = Eagle3Reference(head.config, load(head), torch.eye(48, 16))
    aux = torch.randn(3, head.config.fc_width, generator=torch.Generator().manual_seed(1))

    def two_deep(reference: Eagle3Reference) -> torch.Tensor:
        _, feature = reference.read(aux, [3, 5, 7, 9])
        return reference.row(feature, 11, 3)[0]

    assert not torch.allclose(two_deep(plain), two_deep(normed))


def test_layer_ids_mean_outputs_to_specforge_and_inputs_to_speculators(tmp_path: Path) -> None:
    ids: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}
    stored = write(tmp_path / "specforge", specforge(eagle_config=ids))
    assert open_eagle3(stored, TARGET).config.aux_layers == (2, 6, 9)
    assert open_eagle3(write(tmp_path / "speculators", speculators(**ids)), TARGET).config.aux_layers == (1, 5, 8)
    for index, stated in enumerate((specforge(), speculators())):
        assert open_eagle3(write(tmp_path / str(index), stated), TARGET).config.aux_layers == (2, 6, 9)


def test_d2t_is_an_offset(tmp_path: Path) -> None:
    head = open_eagle3(write(tmp_path, speculators()), TARGET)
    reference = Eagle3Reference(head.config, load(head), torch.eye(48, 16))
    assert [reference.target_id(row) for row in torch.eye(10)] == DRAFTED.tolist()


def test_a_head_without_a_reduced_vocabulary_takes_the_targets_head(tmp_path: Path) -> None:
    head = open_eagle3(write(tmp_path, specforge(draft_vocab_size=None)), TARGET)
    assert not head.config.has_reduced_vocabulary and "lm_head.weight" not in head.files
    assert len(drafts_of(tmp_path)) == 4


def test_a_head_of_another_hidden_size_has_an_embedding_of_its_own(tmp_path: Path) -> None:
    wide = replace(TARGET, hidden_size=24)
    stated = specforge(target_hidden_size=24)
    folder = write(tmp_path, stated | {"target_hidden_size": 16}, ("embed_tokens.weight",))
    tensors = load_file(folder / "model.safetensors") | {"fc.weight": torch.randn(16, 3 * 24)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(stated))
    head = open_eagle3(folder, wide)
    assert (head.config.target_hidden_size, head.config.hidden_size, head.config.fc_width) == (24, 16, 72)
    assert len(drafts_of(folder, wide)) == 4
    del tensors["embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks the tensor 'embed_tokens\.weight'"):
        open_eagle3(folder, wide)


def test_layers_after_the_first_and_norms_of_q_and_k_are_read(tmp_path: Path) -> None:
    layer = {"model_type": "qwen3", "num_hidden_layers": 2, "attention_bias": True}
    head = open_eagle3(write(tmp_path, speculators(layer)), TARGET)
    shapes = required_tensors(head.config)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (16, 32)
    assert shapes["layers.1.self_attn.q_proj.weight"] == (16, 16)
    assert "layers.1.hidden_norm.weight" not in shapes and shapes["layers.1.self_attn.k_norm.weight"] == (4,)
    assert shapes["layers.0.self_attn.v_proj.bias"] == (8,)
    assert len(drafts_of(tmp_path)) == 4


def test_drafting_again_after_a_rejection_equals_drafting_anew(tmp_path: Path) -> None:
    head = open_eagle3(write(tmp_path, speculators()), TARGET)
    draw = torch.Generator().manual_seed(3)
    embedding, aux = torch.randn(48, 16, generator=draw), torch.randn(9, head.config.fc_width, generator=draw)
    tokens = torch.randint(48, (10,), generator=draw).tolist()
    kept = Eagle3Reference(head.config, load(head), embedding)
    kept.draft(aux[:5], tokens[:6], 3)
    anew = Eagle3Reference(head.config, load(head), embedding)
    assert kept.draft(aux, tokens, 3) == anew.draft(aux, tokens, 3)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        (specforge(vocab_size=50), "vocab_size is 50, the target's is 48"),
        (specforge(hidden_size=8, num_attention_heads=2), "hidden_size is 8, the target's rows have 16"),
        (specforge(target_hidden_size=24), "target_hidden_size is 24, the target's rows have 16"),
        (specforge(draft_vocab_size=49), "draft_vocab_size is 49 of 48"),
        (specforge(norm_before_fc=True, fc_norm=True), "norm_before_fc and fc_norm exclude each other"),
        (specforge(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 12]}), "input of layer 13"),
        (specforge(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is false"),
        (specforge(eagle_config=[1]), "eagle_config is"),
        (specforge(num_key_value_heads=3), "a multiple of num_key_value_heads, 3"),
        (specforge(hidden_size="16"), "hidden_size is '16'"),
        (specforge(hidden_act="gelu"), "only SiLU"),
        (specforge(architectures=["LlamaForCausalLM"]), "is of no EAGLE3 head"),
        (speculators(eagle_aux_hidden_state_layer_ids="2"), "eagle_aux_hidden_state_layer_ids is '2'"),
        (speculators(speculators_model_type="dflash"), "speculators_model_type is 'dflash'"),
        (speculators({"model_type": "gemma"}), "model_type is 'gemma'"),
        (speculators(transformer_layer_config=[]) | {"transformer_layer_config": 3}, "transformer_layer_config is 3"),
        ({"speculators_model_type": "eagle3"}, "lacks 'hidden_size'"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(tmp_path: Path, stated: dict[str, Any], words: str) -> None:
    write(tmp_path, speculators())
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match=words):
        open_eagle3(tmp_path, TARGET)


@pytest.mark.parametrize("missing", ["d2t", "fc.weight", "layers.0.hidden_norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, missing: str) -> None:
    write(tmp_path, speculators())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"lacks the tensor '{missing}'"):
        open_eagle3(tmp_path, TARGET)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        open_eagle3(tmp_path, TARGET)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds no table"):
        open_eagle3(tmp_path, TARGET)
