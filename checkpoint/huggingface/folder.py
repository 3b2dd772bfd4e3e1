"""The Checkpoint of a Hugging Face folder: config.json, safetensors, tokenizer.json."""

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from checkpoint.checkpoint import Advice, Checkpoint, WeightFormat
from checkpoint.huggingface.rope import read_rope_scaling, rope_table
from checkpoint.huggingface.safetensors_index import tensor_files
from checkpoint.quantization import Quantization, Scheme, read_quantization, refuse_other_packings
from checkpoint.validation import is_whole, require_amount, require_count, require_head_dim
from contracts.errors import ConfigError
from models.config import Experts, ModelConfig, RopeScaling, YarnScaling
from models.family import Family
from models.llama4 import llama4_fields, text_part
from models.registry import family_of

_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
_OPTIONAL_COUNTS = ("num_key_value_heads", "head_dim")
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
_ADVISED = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
}
_ABOVE = {"top_p", "repetition_penalty"}
_HEADS = {"lm_head.weight", "language_model.lm_head.weight", "lm_head.qweight"}  # plain; Llama 4's; GPTQ's and AWQ's
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def open_folder(path: Path, name: str | None = None) -> Checkpoint:
    """Open a folder.

    Raise ConfigError for a missing or damaged file, an unknown architecture, or a feature that is not supported.
    """
    config = text_part(read_json(path / "config.json"), str(path))
    refuse_other_packings(config, path)
    tokenizer_config = _tokenizer_config(path)
    has_head = not _HEADS.isdisjoint(tensor_files(path))
    tokenizer = _load_tokenizer(path / "tokenizer.json", tokenizer_config)
    bos, eos = (_token(tokenizer_config.get(key)) for key in ("bos_token", "eos_token"))
    generation = read_json(path / "generation_config.json", required=False)
    templates = _chat_templates(path, tokenizer_config)
    model = model_config(config, str(path))
    file, stating = ("generation_config.json", generation) if "eos_token_id" in generation else ("config.json", config)
    stated = _eos_token_ids(stating.get("eos_token_id"), model.vocab_size, path / file)
    eos_ids = _with_named(stated, tokenizer, eos, model.vocab_size)
    if has_head:  # a head of its own may differ, whatever config.json says
        model = replace(model, tied_embeddings=False)
    return Checkpoint(
        name=name or path.resolve().name,
        path=path,
        format=WeightFormat.SAFETENSORS,
        config=model,
        eos_token_ids=eos_ids,
        bos_token=bos,
        eos_token=eos or (tokenizer.id_to_token(eos_ids[0]) if eos_ids else None),
        add_bos=_adds_bos(tokenizer, bos),
        chat_template=templates.get("default"),
        build_tokenizer=partial(_load_tokenizer, path / "tokenizer.json", tokenizer_config),
        quantization=_quantization(model, config, path),
        tool_template=templates.get("tool_use"),
        advice=advice_of(generation, str(path / "generation_config.json")),
    )


def _quantization(model: ModelConfig, config: dict[str, Any], path: Path) -> Quantization | None:
    if model.experts is not None and model.experts.as_gpt_oss:  # MXFP4 is a part of this family
        return None
    found = read_quantization(config, read_json(path / "hf_quant_config.json", required=False), str(path))
    is_llama4 = model.experts is not None and model.experts.as_llama4
    if found is not None and is_llama4 and found.scheme is not Scheme.FP8_ROWS:
        supported = f"supported are {Scheme.FP8_ROWS}, and plain weights"
        raise ConfigError(f"{path}: a Llama 4 in {found.scheme} is not supported; {supported}")
    return found


def model_config(config: dict[str, Any], source: str) -> ModelConfig:
    """Return the fields of a config.json that matter here; refuse those that can't be ignored."""
    family = family_of(_architecture(config, source), source)
    _refuse_unsupported(config, source, family)
    try:
        _require_counts(config, source)
        model = _model_config(family, config, source)
        _require_numbers(model, source)
        return replace(model, **llama4_fields(config, source)) if family.as_llama4 else model
    except KeyError as error:
        raise ConfigError(f"{source}/config.json lacks {error}") from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{source}/config.json has a value of the wrong kind: {error}") from error


def _architecture(config: dict[str, Any], source: str) -> str:
    listed = config.get("architectures") or [config.get("model_type", "unknown")]
    if not isinstance(listed, list):
        raise ConfigError(f"{source}/config.json: architectures is {listed!r}; a list of names is expected")
    return str(listed[0])


def _require_counts(config: dict[str, Any], source: str) -> None:
    """Check the counts before anything is computed from them; raise KeyError for a missing one."""
    stated = {name: config[name] for name in _COUNTS}
    stated |= {name: config[name] for name in _OPTIONAL_COUNTS if config.get(name)}
    for name, value in stated.items():
        require_count(value, name, f"{source}/config.json")


def _model_config(family: Family, config: dict[str, Any], source: str) -> ModelConfig:
    heads = config["num_attention_heads"]
    rope = rope_table(config, source)
    stated = config["max_position_embeddings"]
    scaling = read_rope_scaling(rope, stated, source)
    length = _max_model_len(scaling, stated, config.get("dual_chunk_attention_config"))
    if not family.as_gpt_oss:
        _refuse_window(config, family, length, source)
    return ModelConfig(
        family=family.gguf_architecture,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim", family.head_dim) or config["hidden_size"] // heads,
        norm_eps=config["rms_norm_eps"],
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or family.rope_theta,
        max_model_len=length,
        tied_embeddings=config.get("tie_word_embeddings", False),
        rope_scaling=scaling,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        experts=_experts(config, source, family.as_gpt_oss) if family.experts else None,
        output_bias=family.as_gpt_oss,
        sinks=family.as_gpt_oss,
        window=config["sliding_window"] if family.as_gpt_oss else 0,
        windowed_layers=_windowed_layers(config, source) if family.as_gpt_oss else (),
    )


def _require_numbers(model: ModelConfig, source: str) -> None:
    """Check the numbers that were computed from others, too."""
    file = f"{source}/config.json"
    require_amount(model.norm_eps, "rms_norm_eps", file)
    require_amount(model.rope_theta, "rope_theta", file, above=1)
    require_count(model.max_model_len, "max_model_len", file)
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"{file}: num_attention_heads is {model.num_heads}; a multiple of num_key_value_heads, "
            f"{model.num_kv_heads}, is expected"
        )
    require_head_dim(model.head_dim, "head_dim", file)


def _max_model_len(scaling: RopeScaling | YarnScaling | None, stated: int, chunks: dict[str, Any] | None) -> int:
    """Return the longest context.

    Models that YaRN may lengthen often state their length without it. Those with dual chunk attention (An et al. 2024;
    Qwen2.5-1M) state one with it; up to the end of the first chunk it is plain attention.
    """
    length = stated
    if isinstance(scaling, YarnScaling):
        length = max(length, int(scaling.factor * scaling.original_max_position))
    return min(length, chunks["chunk_size"] - chunks["local_size"]) if chunks else length


def _windowed_layers(config: dict[str, Any], source: str) -> tuple[int, ...]:
    kinds = config["layer_types"]
    if len(kinds) != config["num_hidden_layers"] or not {*kinds} <= {"sliding_attention", "full_attention"}:
        raise ConfigError(f"{source}: layer_types must say sliding_attention or full_attention for each layer")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def _experts(config: dict[str, Any], source: str, as_gpt_oss: bool) -> Experts:
    count = config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]
    top_k, step = config["num_experts_per_tok"], config.get("decoder_sparse_step", 1)
    if not 1 <= top_k <= count or step < 1:
        raise ConfigError(f"{source}: {top_k} of {count} experts in every layer of {step} are not supported")
    layers = range(config["num_hidden_layers"])
    dense = [layer for layer in layers if layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % step]
    if as_gpt_oss:
        is_mxfp4 = bool(config.get("quantization_config"))
        return Experts(count, top_k, config["intermediate_size"], True, tuple(dense), True, is_mxfp4)
    return Experts(
        count, top_k, config["moe_intermediate_size"], bool(config.get("norm_topk_prob", False)), tuple(dense)
    )


def _refuse_unsupported(config: dict[str, Any], source: str, family: Family) -> None:
    if family.as_gpt_oss:
        _refuse_other_gpt_oss(config, source)
        return
    if config.get("hidden_act", "silu") != "silu" or config.get("mlp_bias") or config.get("attention_bias"):
        raise ConfigError(f"{source}: only SiLU and layers without mlp_bias and attention_bias are supported")


def _refuse_window(config: dict[str, Any], family: Family, length: int, source: str) -> None:
    window = config.get("sliding_window", family.window)
    if window is not None and _has_windows(config, family) and window < length:
        raise ConfigError(f"{source}: sliding-window attention ({window} of {length} tokens) is not supported")


def _has_windows(config: dict[str, Any], family: Family) -> bool:
    """Return whether some layer has a window, by the fields that transformers reads for this family.

    Other fields may be left from another model.
    """
    if family.window is None:
        # transformers' Llama attends to all, but its cache forgets what is behind a window that config.json states.
        # Which of the two is meant is not known.
        return bool(config.get("use_sliding_window", True))
    is_on = not family.switches_window or bool(config.get("use_sliding_window"))
    if family.first_window is None:
        return is_on
    if (kinds := config.get("layer_types")) is not None:
        return any(kind != "full_attention" for kind in kinds)
    return is_on and config.get("max_window_layers", family.first_window) < config["num_hidden_layers"]


def _refuse_other_gpt_oss(config: dict[str, Any], source: str) -> None:
    other = {key: config[key] for key, value in _SWIGLU.items() if config.get(key, value) != value}
    if other:
        raise ConfigError(f"{source}: experts with {other} are not supported; supported is {_SWIGLU}")
    if not config.get("attention_bias", True) or not config.get("sliding_window"):
        raise ConfigError(f"{source}: gpt-oss without attention_bias or without a sliding_window is not supported")
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method", "mxfp4") if isinstance(quantization, dict) else quantization
    if method != "mxfp4":
        raise ConfigError(f"{source}: gpt-oss quantized by '{method}' is not supported; supported are mxfp4 and plain")


def read_json(path: Path, required: bool = True, missing: str = "is not a model folder") -> dict[str, Any]:
    """Return the table in a file, empty where it may be missing.

    `missing`: what its folder is said to be where it may not. Raises ConfigError.
    """
    if not path.exists() and not required:
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path.parent} {missing}: {path.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"cannot read {path}: it holds no table")
    return table


def _load_tokenizer(path: Path, config: dict[str, Any]) -> Tokenizer:
    if not path.exists():
        raise ConfigError(f"{path.parent} has no tokenizer.json; save the model with a fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for a file it can't parse
        raise ConfigError(f"cannot read {path}: {error}") from error
    # The length that the last training cut its texts to is saved, too; transformers sets it anew at each call.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        tokenizer.add_tokens(_stated_tokens(config, tokenizer.get_added_tokens_decoder().values()))
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ConfigError(f"{path.parent}: a token in tokenizer_config.json is of the wrong kind: {error}") from error
    return tokenizer


def _stated_tokens(config: dict[str, Any], known: Iterable[AddedToken]) -> list[AddedToken]:
    """Return the tokens of tokenizer_config.json that tokenizer.json lacks or has otherwise.

    transformers adds them, too.
    """
    tokens = {token.content: token for token in known}
    found = {text: repr(token) for text, token in tokens.items()}
    for _, entry in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        tokens[entry["content"]] = AddedToken(**{key: entry[key] for key in _FLAGS if key in entry})
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    by_name, others = (extra, ()) if isinstance(extra, dict) else ({}, extra)
    named = [text for value in (*map(config.get, _SPECIAL), *by_name.values()) if (text := _token(value))]
    for text in (*named, *filter(None, map(_token, others))):
        tokens.setdefault(text, AddedToken(text, special=True))
    for text in named:
        tokens[text].special = True
    return [token for text, token in tokens.items() if found.get(text) != repr(token)]


def _tokenizer_config(path: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, completed as transformers does.

    Older folders list no added tokens there, and name special ones in a file of their own.
    """
    config = read_json(path / "tokenizer_config.json", required=False)
    if "added_tokens_decoder" in config:
        return config
    return config | read_json(path / "special_tokens_map.json", required=False)


def _token(value: Any) -> str | None:
    return (value.get("content") if isinstance(value, dict) else value) or None


def advice_of(generation: dict[str, Any], source: str) -> Advice:
    """Return what a generation_config.json advises; `source` names it in the ConfigError for a bad value.

    vLLM ignores `do_sample`, too, which would make every answer of most models greedy.
    """
    stated = {name: generation[name] for name in _ADVISED if generation.get(name) is not None}
    for name, value in stated.items():
        least, most = _ADVISED[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or (name in _ABOVE and value == least):
            bounds = f"{'above' if name in _ABOVE else 'at least'} {least} and at most {most}"
            raise ConfigError(f"{source}: {name} is {value!r}; it must be {bounds}")
    shares = {name: float(value) for name, value in stated.items() if name != "top_k"}
    return Advice(**shares, top_k=max(0, int(stated.get("top_k", 0))))


def _eos_token_ids(ids: Any, vocab_size: int, file: Path) -> list[int]:
    listed = [index for index in (ids if isinstance(ids, list) else [ids]) if index is not None]
    for index in listed:
        if not is_whole(index) or not 0 <= index < vocab_size:
            raise ConfigError(f"{file}: eos_token_id is {ids!r}; token ids from 0 to {vocab_size - 1} are expected")
    return listed


def _with_named(stated: list[int], tokenizer: Tokenizer, eos: str | None, vocab_size: int) -> tuple[int, ...]:
    """Return the stated ids and the one that the tokenizer names, if the model knows that token."""
    named = tokenizer.token_to_id(eos) if eos else None
    known = [] if named is None or named >= vocab_size else [named]
    return tuple(dict.fromkeys([*stated, *known]))


def _adds_bos(tokenizer: Tokenizer, bos: str | None) -> bool:
    return bos is not None and tokenizer.encode("a").ids[:1] == [tokenizer.token_to_id(bos)]


def _chat_templates(path: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name.

    If there are files, they replace all that tokenizer_config.json has, as in transformers.
    """
    named = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    files = {"default": path / "chat_template.jinja"} | named
    if found := {name: _read_text(file) for name, file in files.items() if file.exists()}:
        return found
    return _stated_templates(tokenizer_config.get("chat_template"), path / "tokenizer_config.json")


def _stated_templates(stated: Any, file: Path) -> dict[str, str]:
    named = stated if isinstance(stated, list) else [{"name": "default", "template": stated}] if stated else []
    for entry in named:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            expected = "a text, or a list of tables with 'name' and 'template', is expected"
            raise ConfigError(f"{file}: chat_template is of the wrong kind; {expected}")
    return {entry["name"]: entry["template"] for entry in named}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
