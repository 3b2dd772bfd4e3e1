"""The Checkpoint of a Hugging Face folder: config.json, safetensors, tokenizer.json."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from checkpoint.checkpoint import Advice, Checkpoint, EmbeddingForm, WeightFormat
from checkpoint.huggingface.embedding_modules import embedding_form
from checkpoint.huggingface.json_files import read_json
from checkpoint.huggingface.model_config import model_config, text_part
from checkpoint.huggingface.safetensors_index import tensor_files
from checkpoint.huggingface.score_form import score_form
from checkpoint.quantization import Quantization, Scheme, read_quantization, refuse_other_packings
from checkpoint.validation import is_whole
from contracts.errors import ConfigError
from models.config import ModelConfig
from models.registry import family_of

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
_HEADS = {"lm_head.weight", "language_model.lm_head.weight", "lm_head.qweight", "lm_head.weight_packed"}
"""The output head of its own: plain; Llama 4's; GPTQ's and AWQ's; compressed-tensors'."""


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
        embedding=embedding_form(path) if not model.num_labels else EmbeddingForm("it classifies texts; POST /score"),
        score=score_form(config, model.num_labels),
    )


def _quantization(model: ModelConfig, config: dict[str, Any], path: Path) -> Quantization | None:
    if model.experts is not None and model.experts.as_gpt_oss:  # MXFP4 is a part of this family
        return None
    found = read_quantization(config, read_json(path / "hf_quant_config.json", required=False), str(path))
    is_llama4 = model.experts is not None and model.experts.as_llama4
    if found is not None and is_llama4 and found.scheme is not Scheme.FP8_ROWS:
        supported = f"supported are {Scheme.FP8_ROWS}, and plain weights"
        raise ConfigError(f"{path}: a Llama 4 in {found.scheme} is not supported; {supported}")
    if found is not None and (fused := family_of(model.family, str(path)).names.fused):
        raise ConfigError(
            f"{path}: quantization_config is of a model that stores {next(iter(fused))} as one matrix, which is not "
            "supported: use the plain weights"
        )
    return found


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
