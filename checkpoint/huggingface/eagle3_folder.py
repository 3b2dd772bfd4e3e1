"""The folder of an EAGLE3 head: config.json and safetensors.

It is written in the dialect of SpecForge or of speculators. A head that does not fit the target is refused by the name
of the field, before anything is loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
from checkpoint.huggingface.json_files import read_json
from checkpoint.huggingface.rope import read_rope_scaling, rope_table
from checkpoint.huggingface.safetensors_index import tensor_files
from checkpoint.validation import is_whole, require_amount, require_count, require_head_dim
from contracts.errors import ConfigError
from models.config import FrequencyScaling, LongRopeScaling, ModelConfig
from models.eagle3 import Eagle3Config, Eagle3Dialect, aux_layers_of, canonical_name, required_tensors

_SHIPPED = Path(models.__file__).parent / "heads"
_SPECFORGE = "LlamaForCausalLMEagle3"
_COUNTS = ("hidden_size", "intermediate_size", "num_attention_heads")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Eagle3Folder:
    """A head that fits its target.

    `files`: canonical name of a tensor -> its file and its name there.
    """

    path: Path
    config: Eagle3Config
    files: Mapping[str, tuple[Path, str]]


def open_eagle3(folder: Path, target: ModelConfig) -> Eagle3Folder:
    """Open a head; raise ConfigError if it is damaged, unknown, or of another target."""
    stated = read_json(folder / "config.json", missing="is no EAGLE3 head")
    config = read_eagle3(stated, target, str(folder))
    files = {canonical_name(name): (path, name) for name, path in tensor_files(folder).items()}
    if config.has_reduced_vocabulary and "d2t" not in files:
        raise ConfigError(
            f"{folder} lacks the tensor 'd2t', and draft_vocab_size is {config.draft_vocab_size} of "
            f"{config.vocab_size}: which tokens it drafts is not known"
        )
    if missing := sorted(required_tensors(config).keys() - files.keys()):
        raise ConfigError(f"{folder} lacks the tensor '{missing[0]}': its weights do not fit its config.json")
    return Eagle3Folder(folder, config, files)


def shipped_head(name: str) -> Path | None:
    """Return the folder of the head that comes with this package for a model of that name."""
    folder = _SHIPPED / f"{name.rpartition('/')[2].lower()}-eagle3"
    return folder if (folder / "config.json").exists() else None


def is_eagle3(folder: Path) -> bool:
    """Return whether the folder has a head's config.json, of whatever kind, or none at all."""
    if not (folder / "config.json").exists():
        return True
    stated = read_json(folder / "config.json", missing="is no EAGLE3 head")
    architectures = stated.get("architectures")
    return "speculators_model_type" in stated or (isinstance(architectures, list) and _SPECFORGE in architectures)


def read_eagle3(stated: Mapping[str, Any], target: ModelConfig, source: str) -> Eagle3Config:
    """Return what a config.json says; raise ConfigError that names the field which does not fit."""
    dialect = _dialect(stated, source)
    layer = dict(stated)
    if dialect is Eagle3Dialect.SPECULATORS:
        layer = stated.get("transformer_layer_config") or {}
        if not isinstance(layer, dict):
            raise ConfigError(f"{source}/config.json: transformer_layer_config is {layer!r}; a table is expected")
    try:
        return _config(stated, layer, dialect, target, source)
    except KeyError as error:
        raise ConfigError(f"{source}/config.json lacks {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{source}/config.json has a value of the wrong kind: {error}") from error


def _dialect(stated: Mapping[str, Any], source: str) -> Eagle3Dialect:
    if (kind := stated.get("speculators_model_type")) is not None:
        if kind != "eagle3":
            raise ConfigError(f"{source}/config.json: speculators_model_type is {kind!r}; supported is eagle3")
        return Eagle3Dialect.SPECULATORS
    architectures = stated.get("architectures") or []
    if isinstance(architectures, list) and _SPECFORGE in architectures:
        return Eagle3Dialect.SPECFORGE
    raise ConfigError(
        f"{source}/config.json is of no EAGLE3 head: neither speculators_model_type is 'eagle3' nor does "
        f"architectures name {_SPECFORGE}"
    )


def _config(
    stated: Mapping[str, Any], layer: dict[str, Any], dialect: Eagle3Dialect, target: ModelConfig, source: str
) -> Eagle3Config:
    file = f"{source}/config.json"
    for name in _COUNTS:
        require_count(layer[name], name, file)
    _refuse_unsupported(layer, file)
    hidden, heads = layer["hidden_size"], layer["num_attention_heads"]
    head_dim = layer.get("head_dim") or hidden // heads
    require_head_dim(head_dim, "head_dim", file)
    kv_heads = layer.get("num_key_value_heads") or heads
    require_count(kv_heads, "num_key_value_heads", file)
    if heads % kv_heads:
        raise ConfigError(
            f"{file}: num_attention_heads is {heads}; a multiple of num_key_value_heads, {kv_heads}, is expected"
        )
    num_layers = layer.get("num_hidden_layers", 1)
    require_count(num_layers, "num_hidden_layers", file)
    rope = rope_table(layer, source)
    if rope.get("partial_rotary_factor", layer.get("partial_rotary_factor")) not in (None, 1):
        raise ConfigError(f"{file}: partial_rotary_factor: rope that turns a part of each head is not supported")
    max_model_len = layer.get("max_position_embeddings") or target.max_model_len
    config = Eagle3Config(
        dialect=dialect,
        hidden_size=hidden,
        target_hidden_size=stated.get("target_hidden_size") or hidden,
        intermediate_size=layer["intermediate_size"],
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=layer.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or layer.get("rope_theta") or 10000.0,
        rope_scaling=_rope_scaling(rope, max_model_len, source),
        max_model_len=max_model_len,
        vocab_size=layer.get("vocab_size", target.vocab_size),
        draft_vocab_size=stated.get("draft_vocab_size") or layer.get("vocab_size", target.vocab_size),
        aux_layers=aux_layers_of(_layer_ids(stated, file), dialect, target.num_layers),
        attention_bias=bool(layer.get("attention_bias", False)),
        qk_norm=layer.get("model_type") == "qwen3",
        **{name: bool(stated.get(name, False)) for name in _FLAGS},
    )
    _require_fit(config, target, file)
    return config


def _rope_scaling(rope: dict[str, Any], max_model_len: int, source: str) -> FrequencyScaling | None:
    scaling = read_rope_scaling(rope, max_model_len, source)
    if isinstance(scaling, LongRopeScaling):
        raise ConfigError(f"{source}: rope scaling 'longrope' is not supported in a head")
    return scaling


def _layer_ids(stated: Mapping[str, Any], file: str) -> tuple[int, ...] | None:
    """Return the layer ids as they are written; both dialects' field may stand in the other's place."""
    nested = stated.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise ConfigError(f"{file}: eagle_config is {nested!r}; a table is expected")
    if nested.get("use_aux_hidden_state", True) is False:
        raise ConfigError(f"{file}: use_aux_hidden_state is false: a head without aux layers is not supported")
    name = "eagle_aux_hidden_state_layer_ids"
    ids = stated.get(name, nested.get(name))
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(is_whole(layer) for layer in ids):
        raise ConfigError(f"{file}: {name} is {ids!r}; a list of layers is expected")
    return tuple(ids)


def _refuse_unsupported(layer: Mapping[str, Any], file: str) -> None:
    kind = layer.get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise ConfigError(f"{file}: model_type is {kind!r}; heads of layers as llama and qwen3 have them are supported")
    if layer.get("hidden_act", "silu") != "silu" or layer.get("mlp_bias"):
        raise ConfigError(f"{file}: only SiLU and layers without mlp_bias are supported")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise ConfigError(f"{file}: layer_types has sliding_attention, which is not supported in a head")


def _require_fit(config: Eagle3Config, target: ModelConfig, file: str) -> None:
    """Raise ConfigError for a head that cannot draft for this target."""
    for name in ("target_hidden_size", "vocab_size", "draft_vocab_size", "max_model_len"):
        require_count(getattr(config, name), name, file)
    require_amount(config.norm_eps, "rms_norm_eps", file)
    require_amount(config.rope_theta, "rope_theta", file, above=1)
    if config.target_hidden_size != target.hidden_size:
        field = "target_hidden_size" if config.target_hidden_size != config.hidden_size else "hidden_size"
        raise ConfigError(
            f"{file}: {field} is {config.target_hidden_size}, the target's rows have {target.hidden_size} columns: "
            "the head is of another model"
        )
    if config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{file}: vocab_size is {config.vocab_size}, the target's is {target.vocab_size}: the head is of another "
            "model"
        )
    if config.draft_vocab_size > config.vocab_size:
        raise ConfigError(f"{file}: draft_vocab_size is {config.draft_vocab_size} of {config.vocab_size} tokens")
    if config.norm_before_fc and config.fc_norm:
        raise ConfigError(f"{file}: norm_before_fc and fc_norm exclude each other")
    if wrong := [layer for layer in config.aux_layers if not 0 <= layer <= target.num_layers]:
        raise ConfigError(
            f"{file}: eagle_aux_hidden_state_layer_ids lead to the input of layer {wrong[0]}; the target has "
            f"{target.num_layers} layers"
        )
