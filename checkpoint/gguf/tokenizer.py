"""The tokenizers in GGUF metadata, rebuilt to cut text as the original tokenizer.json does."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from contracts.errors import ConfigError

# The regular expressions are those of the models' own tokenizer.json files.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT, "tekken": _TEKKEN_SPLIT, "dbrx": _LLAMA3_SPLIT}
_OTHER_NAMES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "refact": "smollm",
    "glm4": "dbrx",
    "chatglm-bpe": "dbrx",
}
"""Other names of the same rule; `dbrx` cuts as `llama-bpe` does, and takes no word whole before its merges."""
_CONTROL, _USER_DEFINED = 3, 4


def build_tokenizer(metadata: dict[str, Any], source: str = "the GGUF file") -> Tokenizer:
    """Build the tokenizer; raise ConfigError if its rules are unknown or it contradicts itself."""
    kind = metadata.get("tokenizer.ggml.model")
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(kind))
    if build is None:
        raise ConfigError(f"{source}: the GGUF tokenizer '{kind}' is not supported; supported are 'gpt2' and 'llama'")
    try:
        tokenizer = build(metadata)
    except KeyError as error:
        raise ConfigError(f"{source} lacks {error}, a part of its tokenizer") from error
    except ValueError as error:
        raise ConfigError(f"{source}: its tokenizer is damaged: {error}; download the file again") from error
    _add_special_tokens(tokenizer, metadata)
    return tokenizer


def rule_of(metadata: dict[str, Any]) -> str:
    """Return the name of the rule by which the tokenizer cuts text first."""
    named = str(metadata.get("tokenizer.ggml.pre", "default"))
    return _OTHER_NAMES.get(named, named)


def adds_bos(metadata: dict[str, Any]) -> bool:
    default = metadata.get("tokenizer.ggml.model") == "llama" or rule_of(metadata) in ("llama-bpe", "tekken")
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default)) and "tokenizer.ggml.bos_token_id" in metadata


def _byte_level(metadata: dict[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    pre = rule_of(metadata)
    vocab = {token: index for index, token in enumerate(tokens)}
    # Checked here, because the library may panic at such a merge.
    if (wrong := next((merge for merge in merges if not _is_known(merge, vocab)), None)) is not None:
        raise ValueError(f"its merge '{' '.join(wrong)}' is not of two tokens that make a third")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in ("llama-bpe", "tekken")))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _is_known(merge: tuple[str, ...], vocab: dict[str, int]) -> bool:
    return len(merge) == 2 and "".join(merge) in vocab and merge[0] in vocab and merge[1] in vocab


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre not in _SPLITS:
        supported = ", ".join(["smollm", *_SPLITS, *_OTHER_NAMES])
        raise ConfigError(f"the GGUF pre-tokenizer '{pre}' is not supported; supported are {supported}")
    split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: dict[str, Any]) -> Tokenizer:
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    if len(scores) != len(tokens):
        raise ValueError(f"it has {len(tokens)} tokens and {len(scores)} scores")
    vocab = {token: index for index, token in enumerate(tokens)}
    unk = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    bpe = models.BPE(vocab=vocab, merges=_merges(vocab, scores), unk_token=unk, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    ends: list[decoders.Decoder] = []
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece BPE by the score of the result, best first.

    They are every split of a piece into two pieces.
    """
    merges = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[index], vocab[left], vocab[right], left, right))
    return [(left, right) for _, _, _, left, right in sorted(merges)]


def _add_special_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    named = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in named if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in named if k == _USER_DEFINED])
    if adds_bos(metadata):
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A", pair=f"{tokens[bos_id]} $A $B", special_tokens=[(tokens[bos_id], bos_id)]
        )
