"""The configuration of a model in its config.json, by the words of its family."""

from dataclasses import replace
from typing import Any

from checkpoint.huggingface.rope import rope_fields
from checkpoint.model_numbers import require_model
from checkpoint.validation import require_count
from contracts.errors import ConfigError
from models.config import FrequencyScaling, ModelConfig, YarnScaling
from models.config_fields import windowed_layers
from models.family import Family
from models.registry import family_of, family_of_multimodal

_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
_CLASSIFIER = "ForSequenceClassification"
_OPTIONAL_COUNTS = ("num_key_value_heads", "head_dim")


def text_part(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the text part of a config.json that has one beside that of a vision tower.

    Any other as it is.
    """
    family = family_of_multimodal(config.get("architectures"))
    if family is None:
        return config
    if not isinstance(config.get("text_config"), dict):
        raise ConfigError(f"{source}/config.json lacks 'text_config'")
    ends = {key: config[key] for key in ("eos_token_id", "tie_word_embeddings") if key in config}
    quantization = {key: config[key] for key in ("quantization_config",) if key in config}
    return ends | config["text_config"] | {"architectures": [family.architecture]} | quantization


def model_config(config: dict[str, Any], source: str) -> ModelConfig:
    """Return the fields of a config.json that matter here; refuse those that can't be ignored."""
    architecture = _architecture(config, source)
    stem = architecture.removesuffix(_CLASSIFIER)
    family = family_of(architecture if stem == architecture else f"{stem}ForCausalLM", source)
    config = {**family.defaults, **config}
    _refuse_unsupported(config, source, family)
    try:
        _require_counts(config, source)
        model = _model_config(family, config, source)
        if family.read is not None:
            model = replace(model, **family.read(config, source))
        if stem != architecture:
            model = replace(model, num_labels=_num_labels(config, source), tied_embeddings=False)
        require_model(model, f"{source}/config.json")
        return model
    except KeyError as error:
        raise ConfigError(f"{source}/config.json lacks {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{source}/config.json has a value of the wrong kind: {error}") from error


def _architecture(config: dict[str, Any], source: str) -> str:
    listed = config.get("architectures") or [config.get("model_type", "unknown")]
    if not isinstance(listed, list):
        raise ConfigError(f"{source}/config.json: architectures is {listed!r}; a list of names is expected")
    return str(listed[0])


def _num_labels(config: dict[str, Any], source: str) -> int:
    """Return the labels of a classifier: two where a config.json does not say, as in transformers."""
    labels = config.get("id2label")
    if labels is not None and not isinstance(labels, dict):
        raise ConfigError(f"{source}/config.json: id2label is {labels!r}; a table of labels is expected")
    count = len(labels) if labels else config.get("num_labels", 2)
    require_count(count, "num_labels", f"{source}/config.json")
    return count


def _require_counts(config: dict[str, Any], source: str) -> None:
    """Check the counts before anything is computed from them; raise KeyError for a missing one."""
    stated = {name: config[name] for name in _COUNTS}
    stated |= {name: config[name] for name in _OPTIONAL_COUNTS if config.get(name)}
    for name, value in stated.items():
        require_count(value, name, f"{source}/config.json")


def _model_config(family: Family, config: dict[str, Any], source: str) -> ModelConfig:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", family.head_dim) or config["hidden_size"] // heads
    rope = rope_fields(config, family, head_dim, source)
    stated = config["max_position_embeddings"]
    length = _max_model_len(rope["rope_scaling"], stated, config.get("dual_chunk_attention_config"))
    return ModelConfig(
        family=family.gguf_architecture,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        norm_eps=config["rms_norm_eps"],
        max_model_len=length,
        tied_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        **_window_fields(config, family, length, source),
        **rope,
    )


def _max_model_len(scaling: FrequencyScaling | None, stated: int, chunks: dict[str, Any] | None) -> int:
    """Return the longest context.

    Models that YaRN may lengthen often state their length without it. Those with dual chunk attention (An et al. 2024;
    Qwen2.5-1M) state one with it; up to the end of the first chunk it is plain attention.
    """
    length = stated
    if isinstance(scaling, YarnScaling):
        length = max(length, int(scaling.factor * scaling.original_max_position))
    return min(length, chunks["chunk_size"] - chunks["local_size"]) if chunks else length


def _window_fields(config: dict[str, Any], family: Family, length: int, source: str) -> dict[str, Any]:
    """Return the window and its layers, by the fields that transformers reads for this family.

    Other fields may be left from another model.
    """
    if family.window is None:
        _refuse_unknown_window(config, length, source)
        return {}
    window = config.get("sliding_window", family.window or None)
    is_on = not family.switches_window or bool(config.get("use_sliding_window"))
    kinds = config.get("layer_types") if family.first_window is not None else None
    if window is None or not (is_on or kinds):
        return {}
    require_count(window, "sliding_window", f"{source}/config.json")
    num_layers = config["num_hidden_layers"]
    if kinds is not None:
        layers = windowed_layers(kinds, num_layers, source)
    else:
        first = 0 if family.first_window is None else config.get("max_window_layers", family.first_window)
        layers = tuple(range(first, num_layers, family.window_step))
    return {"window": window, "windowed_layers": layers} if layers and window < length else {}


def _refuse_unknown_window(config: dict[str, Any], length: int, source: str) -> None:
    """Raise ConfigError for a window that transformers' layers of this family do not have.

    Its cache forgets what is behind the window all the same. Which of the two is meant is not known.
    """
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True) and window < length:
        raise ConfigError(f"{source}: sliding-window attention ({window} of {length} tokens) is not supported")


def _refuse_unsupported(config: dict[str, Any], source: str, family: Family) -> None:
    has_bias = config.get("mlp_bias") or (config.get("attention_bias") and not family.reads_attention_bias)
    if config.get("hidden_act", "silu") != "silu" or has_bias:
        raise ConfigError(f"{source}: only SiLU and layers without mlp_bias and attention_bias are supported")
