"""A Checkpoint from a Hugging Face folder: config.json, safetensors, tokenizer.json."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from checkpoint.checkpoint import Checkpoint, WeightFormat
from checkpoint.config import ModelConfig, RopeScaling
from checkpoint.families import family_of
from checkpoint.families.family import Family
from checkpoint.safetensors_index import tensor_files
from contracts.errors import ConfigError


def open_folder(path: Path, name: str | None = None) -> Checkpoint:
    """Raises ConfigError for a missing or damaged file, an unknown architecture, or a feature that is not supported."""
    config = _read_json(path / "config.json")
    tokenizer_config = _read_json(path / "tokenizer_config.json", required=False)
    tensor_files(path)
    tokenizer = _load_tokenizer(path / "tokenizer.json")
    bos, eos = (_token(tokenizer_config.get(key)) for key in ("bos_token", "eos_token"))
    eos_ids = _eos_token_ids(path, config, tokenizer, eos)
    return Checkpoint(
        name=name or path.resolve().name,
        path=path,
        format=WeightFormat.SAFETENSORS,
        config=model_config(config, str(path)),
        eos_token_ids=eos_ids,
        bos_token=bos,
        eos_token=eos or (tokenizer.id_to_token(eos_ids[0]) if eos_ids else None),
        add_bos=_adds_bos(tokenizer, bos),
        chat_template=_chat_template(path, tokenizer_config),
        build_tokenizer=partial(_load_tokenizer, path / "tokenizer.json"),
    )


def model_config(config: dict[str, Any], source: str) -> ModelConfig:
    """The fields of a config.json that matter here; refuses what would give wrong text if it were ignored."""
    architecture = (config.get("architectures") or [config.get("model_type", "unknown")])[0]
    family = family_of(architecture, source)
    _refuse_unsupported(config, source)
    try:
        return _model_config(family, config, source)
    except KeyError as error:
        raise ConfigError(f"{source}/config.json lacks {error}") from error


def _model_config(family: Family, config: dict[str, Any], source: str) -> ModelConfig:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    return ModelConfig(
        family=family.gguf_architecture,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        norm_eps=config["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        max_model_len=config["max_position_embeddings"],
        tied_embeddings=config.get("tie_word_embeddings", False),
        rope_scaling=_rope_scaling(scaling, source),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )


def _refuse_unsupported(config: dict[str, Any], source: str) -> None:
    length, window = config.get("max_position_embeddings", 0), config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True) and window < length:
        raise ConfigError(f"{source}: sliding-window attention ({window} of {length} tokens) is not supported")
    if config.get("hidden_act", "silu") != "silu" or config.get("mlp_bias") or config.get("attention_bias"):
        raise ConfigError(f"{source}: only SiLU and layers without mlp_bias and attention_bias are supported")
    if config.get("quantization_config"):
        raise ConfigError(f"{source}: quantized safetensors are not supported; use the original weights or a GGUF file")


def _rope_scaling(scaling: dict[str, Any], source: str) -> RopeScaling | None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"{source}: rope scaling '{kind}' is not supported; supported are default and llama3")
    return RopeScaling(
        scaling["factor"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )


def _read_json(path: Path, required: bool = True) -> dict[str, Any]:
    if not path.exists() and not required:
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path.parent} is not a model folder: {path.name} is missing") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.exists():
        raise ConfigError(f"{path.parent} has no tokenizer.json; save the model with a fast tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for a file it can't parse
        raise ConfigError(f"cannot read {path}: {error}") from error


def _token(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _eos_token_ids(path: Path, config: dict[str, Any], tokenizer: Tokenizer, eos: str | None) -> tuple[int, ...]:
    generation = _read_json(path / "generation_config.json", required=False)
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    listed = ids if isinstance(ids, list) else [ids]
    named = tokenizer.token_to_id(eos) if eos else None
    return tuple(dict.fromkeys(index for index in [*listed, named] if index is not None))


def _adds_bos(tokenizer: Tokenizer, bos: str | None) -> bool:
    return bos is not None and tokenizer.encode("a").ids[:1] == [tokenizer.token_to_id(bos)]


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template
