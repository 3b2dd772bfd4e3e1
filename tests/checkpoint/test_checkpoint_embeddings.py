"""sentence-transformers' files say how embeddings are made; what is not done here is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoint.checkpoint import EmbeddingForm, ScoreForm
from checkpoint.huggingface.embedding_modules import embedding_form
from checkpoint.huggingface.score_form import score_form
from contracts.errors import ConfigError


def save(folder: Path, kinds: list[str], pooling: dict[str, Any] | None = None) -> Path:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense"}
    modules = [{"idx": at, "path": paths[k], "type": f"sentence_transformers.models.{k}"} for at, k in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8} | pooling))
    return folder


LAST = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}


def test_without_files_that_of_the_last_token_is_normalised(tmp_path: Path):
    assert embedding_form(tmp_path) == EmbeddingForm()


@pytest.mark.parametrize("is_normalized", [True, False])
def test_the_last_token_with_and_without_a_length_of_one(tmp_path: Path, is_normalized: bool):
    kinds = ["Transformer", "Pooling", *(["Normalize"] if is_normalized else [])]
    assert embedding_form(save(tmp_path, kinds, LAST)) == EmbeddingForm(is_normalized=is_normalized)


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True}, "asks for mean_tokens"),
        (["Transformer", "Pooling"], {"pooling_mode": "mean"}, "asks for mean; supported is lasttoken"),
        (["Transformer", "Pooling"], {"pooling_mode": ["lasttoken", "max"]}, "asks for max"),
        (["Transformer", "Pooling"], {}, "asks for no pooling"),
        (["Transformer", "Pooling"], None, "asks for no pooling"),
        (["Transformer", "Pooling"], LAST | {"pooling_mode_cls_token": True}, "asks for cls_token"),
        (["Transformer", "Pooling", "Dense"], LAST, "the module 'Dense'"),
    ],
)
def test_what_is_not_done_is_named(tmp_path: Path, kinds: list[str], pooling: dict[str, Any], words: str):
    assert words in embedding_form(save(tmp_path, kinds, pooling)).fault


def test_a_damaged_file_is_named(tmp_path: Path):
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"modules\.json: it holds no list of tables"):
        embedding_form(tmp_path)


@pytest.mark.parametrize("stated", ["lasttoken", ["lasttoken"]])
def test_the_newer_form_of_the_file_is_read_too(tmp_path: Path, stated: Any):
    assert embedding_form(save(tmp_path, ["Transformer", "Pooling"], {"pooling_mode": stated})).fault == ""


@pytest.mark.parametrize(
    ("config", "form"),
    [
        ({}, ScoreForm()),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, ScoreForm()),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, ScoreForm(is_sigmoid=False)),
        ({"sbert_ce_default_activation_function": "torch.nn.Identity"}, ScoreForm(is_sigmoid=False)),
        (
            {"sbert_ce_default_activation_function": "a.Tanh"},
            ScoreForm("its scores are made by a.Tanh, which is not supported"),
        ),
    ],
)
def test_scores_are_made_as_a_classifier_s_configuration_says(config: dict[str, Any], form: ScoreForm):
    assert score_form(config, 1) == form
    assert score_form(config, 0) is None
    assert score_form(config, 3) == ScoreForm("it has 3 labels (id2label); a score is made of one")
