"""The Checkpoint of one GGUF file."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint.checkpoint import Checkpoint, EmbeddingForm, WeightFormat
from checkpoint.gguf.file import GgufFile
from checkpoint.gguf.tokenizer import adds_bos, build_tokenizer, rule_of
from checkpoint.model_numbers import require_model
from checkpoint.validation import is_whole, require_amount, require_count, require_head_dim
from contracts.errors import ConfigError
from models.config import FrequencyScaling, LinearScaling, LongRopeScaling, ModelConfig, RopeScaling
from models.family import GgufForm
from models.registry import FAMILIES, family_of

_SCALES = ("rope.scale_linear", "attention.scale", "embedding_scale", "residual_scale", "logit_scale")
"""Metadata of an architecture that multiplies positions, scores or activations."""
_COUNTS = ("block_count", "embedding_length", "feed_forward_length", "context_length", "attention.head_count")
_KINDS = {
    "general.architecture": (str, "text"),
    "split.count": (int, "a whole number"),
    "tokenizer.chat_template": (str, "text"),
    "tokenizer.chat_template.tool_use": (str, "text"),
    "tokenizer.ggml.model": (str, "text"),
    "tokenizer.ggml.pre": (str, "text"),
    "tokenizer.ggml.tokens": (list, "a list"),
    "tokenizer.ggml.merges": (list, "a list"),
    "tokenizer.ggml.scores": (list, "a list"),
    "tokenizer.ggml.token_type": (list, "a list"),
}
_LISTS = {"tokenizer.ggml.tokens": str, "tokenizer.ggml.merges": str, "tokenizer.ggml.scores": (float, int)}
_OTHER_ENDS, _QWEN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<end_of_turn>"), ("<|im_end|>", "<|endoftext|>")
_LAYER = r"attn_(q|k|v|output|norm|q_norm|k_norm)\.weight|attn_[qkv]\.bias|ffn_(gate|up|down|norm)\.weight"
_LAST_TOKEN = 3
"""GGUF's number for pooling by the last token."""
_TENSORS = re.compile(
    rf"(token_embd|output|output_norm|rope_freqs|rope_factors_(long|short))\.weight|blk\.\d+\.({_LAYER})"
)
"""The tensors that the engine reads of any family; a model with others would be computed wrongly."""


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file.

    Raise ConfigError if it is damaged, of an unknown architecture, or lacks what a model needs.
    """
    file = GgufFile.open(path)
    metadata = file.metadata
    _require_kinds(metadata, path)
    if (count := metadata.get("split.count", 0)) > 1:
        raise ConfigError(f"{path} is one of {count} files of a model; join them: llama-gguf-split --merge FIRST WHOLE")
    try:
        config = _config(file)
        tokens = metadata["tokenizer.ggml.tokens"]
    except KeyError as error:
        raise ConfigError(f"{path} cannot be served: its metadata lacks {error}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{path}: its metadata has a value of the wrong kind: {error}") from error
    _require_known(metadata, tokens, path)
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    eos_ids = _eos_token_ids(metadata, tokens, _form(metadata, path))
    return Checkpoint(
        name=_name(path),
        path=path,
        format=WeightFormat.GGUF,
        config=config,
        eos_token_ids=eos_ids,
        bos_token=None if bos_id is None else tokens[bos_id],
        eos_token=tokens[eos_ids[0]] if eos_ids else None,
        add_bos=adds_bos(metadata),
        chat_template=metadata.get("tokenizer.chat_template"),
        build_tokenizer=partial(build_tokenizer, metadata, str(path)),
        tool_template=metadata.get("tokenizer.chat_template.tool_use"),
        embedding=_embedding_form(metadata),
    )


def _embedding_form(metadata: dict[str, Any]) -> EmbeddingForm:
    """Return how embeddings are made; what llama.cpp makes otherwise is not made at all."""
    name = f"{metadata['general.architecture']}.pooling_type"
    if (pooling := metadata.get(name, _LAST_TOKEN)) != _LAST_TOKEN:
        return EmbeddingForm(f"{name} is {pooling!r}; supported is {_LAST_TOKEN}, the last token")
    if metadata.get("tokenizer.ggml.add_eos_token") is True:
        return EmbeddingForm("tokenizer.ggml.add_eos_token asks for a token behind each text, which is not supported")
    return EmbeddingForm()


def _require_kinds(metadata: dict[str, Any], path: Path) -> None:
    """Raise ConfigError with the first field whose value is of another type than GGUF has it."""
    for name, (kind, words) in _KINDS.items():
        if not isinstance(value := metadata.get(name, kind()), kind):
            raise ConfigError(f"{path}: {name} is of the wrong kind, {type(value).__name__}; {words} is expected")
    for name, kinds in _LISTS.items():
        for index, entry in enumerate(metadata.get(name, ())):
            if not isinstance(entry, kinds):
                raise ConfigError(f"{path}: {name}[{index}] is of the wrong kind, {type(entry).__name__}")


def _require_known(metadata: dict[str, Any], tokens: list[str], path: Path) -> None:
    for name in ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id"):
        token_id = metadata.get(f"tokenizer.ggml.{name}", 0)
        if not is_whole(token_id) or not 0 <= token_id < len(tokens):
            raise ConfigError(f"{path}: tokenizer.ggml.{name} is {token_id}; its vocabulary has {len(tokens)} tokens")


def _name(path: Path) -> str:
    """Return the served name: `SmolLM2-135M-Instruct` for `SmolLM2-135M-Instruct.Q4_1.gguf`."""
    stem = path.name.removesuffix(".gguf")
    base, _, suffix = stem.rpartition(".")
    return base if base and suffix.upper().startswith(("Q", "F", "BF", "IQ")) else stem


def _form(metadata: dict[str, Any], path: Path) -> GgufForm:
    """Return how files of this architecture are made; raise ConfigError if none are read."""
    arch = metadata["general.architecture"]
    form = family_of(arch, str(path)).gguf
    if form is None:
        supported = ", ".join(sorted(name for name, each in FAMILIES.items() if each.gguf))
        raise ConfigError(f"{path}: '{arch}' is not supported in GGUF files; supported are {supported}")
    return form


def _config(file: GgufFile) -> ModelConfig:
    metadata = file.metadata
    arch = metadata["general.architecture"]
    form = _form(metadata, file.path)
    _require_numbers(metadata, arch, file.path)
    heads = metadata[f"{arch}.attention.head_count"]
    hidden = metadata[f"{arch}.embedding_length"]
    head_dim = metadata.get(f"{arch}.attention.key_length", hidden // heads)
    require_head_dim(head_dim, f"the size of a head, {arch}.embedding_length / {arch}.attention.head_count,", file.path)
    turned = _rotary_width(file, arch, head_dim, form)
    _refuse_unsupported(file, arch, form)
    theta = metadata.get(f"{arch}.rope.freq_base", 10000.0)
    config = ModelConfig(
        family=family_of(arch, str(file.path)).gguf_architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=metadata[f"{arch}.feed_forward_length"],
        num_layers=metadata[f"{arch}.block_count"],
        num_heads=heads,
        num_kv_heads=metadata.get(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=metadata[f"{arch}.attention.layer_norm_rms_epsilon"],
        rope_theta=theta,
        max_model_len=metadata[f"{arch}.context_length"],
        tied_embeddings="output.weight" not in file.tensors,
        rope_scaling=_rope_scaling(file, arch, theta, head_dim),
        rotary_dim=0 if turned == head_dim else turned,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
    )
    if form.read is not None:
        stated = {name.removeprefix(f"{arch}."): value for name, value in metadata.items()}
        config = replace(config, **form.read(stated, str(file.path)))
    require_model(config, file.path, is_gguf=True)
    _refuse_unread_window(file, arch, config)
    return config


def _require_numbers(metadata: dict[str, Any], arch: str, path: Path) -> None:
    """Check the numbers of the header; some models have a list of heads per layer, which is not supported."""
    stated = {name: metadata[name] for name in (f"{arch}.{count}" for count in _COUNTS)}
    optional = (f"{arch}.attention.{name}" for name in ("head_count_kv", "key_length"))
    stated |= {name: metadata[name] for name in optional if name in metadata}
    for name, value in stated.items():
        require_count(value, name, path)
    name = f"{arch}.attention.layer_norm_rms_epsilon"
    require_amount(metadata[name], name, path)
    name = f"{arch}.rope.freq_base"
    require_amount(metadata.get(name, 10000.0), name, path, above=1)


def _refuse_unsupported(file: GgufFile, arch: str, form: GgufForm) -> None:
    for name in (f"{arch}.{name}" for name in _SCALES if name not in form.scales):
        if (value := file.metadata.get(name, 0.0)) not in (0.0, 1.0):
            raise ConfigError(f"{file.path}: '{name}' is {value}; it is not supported")
    capped = (name for name in file.metadata if name.startswith(f"{arch}.") and name.endswith("_softcapping"))
    if found := next(filter(file.metadata.get, capped), None):
        raise ConfigError(f"{file.path}: '{found}' is {file.metadata[found]}; it is not supported")
    kinds = (*form.tensors, *(form.expert_tensors if file.metadata.get(f"{arch}.expert_count") else ()))
    own = re.compile(rf"blk\.\d+\.({'|'.join(kinds)})\.weight")
    if unread := [name for name in file.tensors if not (_TENSORS.fullmatch(name) or own.fullmatch(name))]:
        raise ConfigError(f"{file.path}: its tensor '{unread[0]}' is of no model that is supported")


def _refuse_unread_window(file: GgufFile, arch: str, config: ModelConfig) -> None:
    """Raise ConfigError for a window that this family's layers are not known to have."""
    name = f"{arch}.attention.sliding_window"
    window = file.metadata.get(name, 0)
    if window and not config.windowed_layers and (not is_whole(window) or window < config.max_model_len):
        raise ConfigError(
            f"{file.path}: '{name}' is {window} of {config.max_model_len} tokens; a window in this family's GGUF files "
            "is not supported: serve the model's Hugging Face folder"
        )


def _rotary_width(file: GgufFile, arch: str, head_dim: int, form: GgufForm) -> int:
    """Return how many columns of a head are turned."""
    name = f"{arch}.rope.dimension_count"
    turned = file.metadata.get(name, head_dim)
    if turned != head_dim and not form.turns_part:
        raise ConfigError(
            f"{file.path}: '{name}' is {turned}; heads have {head_dim} columns, and rope that turns a part of them "
            "is not supported"
        )
    require_head_dim(turned, name, file.path)
    if turned > head_dim:
        raise ConfigError(f"{file.path}: '{name}' is {turned}; heads have {head_dim} columns")
    return turned


def _rope_scaling(file: GgufFile, arch: str, theta: float, head_dim: int) -> FrequencyScaling | None:
    """Return the scaling: linear, LongRoPE, or Llama 3's, which is stored as one factor per frequency.

    That one's constants are those of every Llama 3.x release. A file with a factor and no type scales linearly, as
    llama.cpp reads it.
    """
    if "rope_factors_long.weight" in file.tensors:
        return _longrope(file, arch)
    name = f"{arch}.rope.scaling.factor"
    factor = file.metadata.get(name, 1.0) or 1.0
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "linear" if factor != 1 else "none")
    if kind not in ("none", "linear", "llama3"):
        raise ConfigError(f"{file.path}: rope scaling '{kind}' is not supported; supported are none, linear and llama3")
    if kind == "linear" and "rope_freqs.weight" not in file.tensors:
        require_amount(factor, name, file.path)
        return LinearScaling(float(factor))
    if "rope_freqs.weight" not in file.tensors:
        return None
    factors = file.blocks(file.tensors["rope_freqs.weight"]).view("<f4")[0]
    scaling = RopeScaling(float(factors.max()), 1.0, 4.0, 8192)
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    expected = frequencies / scaling.scaled(frequencies)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ConfigError(f"{file.path}: the factors in 'rope_freqs.weight' are not those of Llama 3; not supported")
    return scaling


def _longrope(file: GgufFile, arch: str) -> LongRopeScaling:
    """Return LongRoPE's constants, whose factors are tensors; raise KeyError for metadata that is missing."""
    original, length = (
        file.metadata[f"{arch}.rope.scaling.{name}"] for name in ("original_context_length", "attn_factor")
    )
    require_count(original, f"{arch}.rope.scaling.original_context_length", file.path)
    require_amount(length, f"{arch}.rope.scaling.attn_factor", file.path)
    short, long = (
        tuple(map(float, file.blocks(file.tensors[f"rope_factors_{name}.weight"]).view("<f4").reshape(-1)))
        for name in ("short", "long")
    )
    return LongRopeScaling(short, long, original, float(length))


def _eos_token_ids(metadata: dict[str, Any], tokens: list[str], form: GgufForm) -> tuple[int, ...]:
    """Return the ids that end an answer: of text and, where the file names them, of turn and message.

    A Qwen has two: its file names one, its generation_config.json both.
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    ends = _QWEN_ENDS if rule_of(metadata) == "qwen2" else _OTHER_ENDS
    ids += [index for token in (*ends, *form.ends) for index in _find(tokens, token)]
    return tuple(dict.fromkeys(ids))


def _find(tokens: list[str], token: str) -> list[int]:
    return [tokens.index(token)] if token in tokens else []
