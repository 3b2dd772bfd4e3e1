"""A Checkpoint from one GGUF file."""

from functools import partial
from pathlib import Path
from typing import Any

from checkpoint.checkpoint import Checkpoint, WeightFormat
from checkpoint.config import ModelConfig, RopeScaling
from checkpoint.families import family_of
from checkpoint.gguf_file import GgufFile
from checkpoint.gguf_tokenizer import adds_bos, build_tokenizer
from contracts.errors import ConfigError


def open_gguf(path: Path, name: str | None = None) -> Checkpoint:
    """Raises ConfigError if the file is damaged, of an unknown architecture, or lacks what a model needs."""
    file = GgufFile.open(path)
    metadata = file.metadata
    try:
        config = _config(file)
        tokens = metadata["tokenizer.ggml.tokens"]
    except KeyError as error:
        raise ConfigError(f"{path} cannot be served: its metadata lacks {error}") from error
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    eos_ids = _eos_token_ids(metadata, tokens)
    return Checkpoint(
        name=name or _name(path),
        path=path,
        format=WeightFormat.GGUF,
        config=config,
        eos_token_ids=eos_ids,
        bos_token=None if bos_id is None else tokens[bos_id],
        eos_token=tokens[eos_ids[0]] if eos_ids else None,
        add_bos=adds_bos(metadata),
        chat_template=metadata.get("tokenizer.chat_template"),
        build_tokenizer=partial(build_tokenizer, metadata),
    )


def _name(path: Path) -> str:
    """`SmolLM2-135M-Instruct.Q4_1.gguf` is served as `SmolLM2-135M-Instruct`."""
    stem = path.name.removesuffix(".gguf")
    base, _, suffix = stem.rpartition(".")
    return base if base and suffix.upper().startswith(("Q", "F", "BF", "IQ")) else stem


def _config(file: GgufFile) -> ModelConfig:
    metadata = file.metadata
    arch = metadata["general.architecture"]
    heads = metadata[f"{arch}.attention.head_count"]
    hidden = metadata[f"{arch}.embedding_length"]
    head_dim = metadata.get(f"{arch}.attention.key_length", hidden // heads)
    if f"{arch}.expert_count" in metadata or not isinstance(heads, int):
        raise ConfigError(f"{file.path}: mixture-of-experts and per-layer head counts are not supported in GGUF files")
    return ModelConfig(
        family=family_of(arch, str(file.path)).gguf_architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=metadata[f"{arch}.feed_forward_length"],
        num_layers=metadata[f"{arch}.block_count"],
        num_heads=heads,
        num_kv_heads=metadata.get(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=metadata[f"{arch}.attention.layer_norm_rms_epsilon"],
        rope_theta=metadata.get(f"{arch}.rope.freq_base", 10000.0),
        max_model_len=metadata[f"{arch}.context_length"],
        tied_embeddings="output.weight" not in file.tensors,
        rope_scaling=_rope_scaling(file, arch),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
    )


def _rope_scaling(file: GgufFile, arch: str) -> RopeScaling | None:
    """Llama 3's scaling is stored as one factor per frequency; its constants are those of every Llama 3.x release."""
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "llama3"):
        raise ConfigError(f"{file.path}: rope scaling '{kind}' is not supported; supported are none and llama3")
    if "rope_freqs.weight" not in file.tensors:
        return None
    factor = float(file.blocks(file.tensors["rope_freqs.weight"]).view("<f4").max())
    return RopeScaling(factor, 1.0, 4.0, 8192)


def _eos_token_ids(metadata: dict[str, Any], tokens: list[str]) -> tuple[int, ...]:
    """The end-of-text id and, where the file names them, end-of-turn and end-of-message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    ids += [index for token in ("<|eot_id|>", "<|eom_id|>") for index in _find(tokens, token)]
    return tuple(dict.fromkeys(ids))


def _find(tokens: list[str], token: str) -> list[int]:
    return [tokens.index(token)] if token in tokens else []
