"""What a checkpoint's weights are, and what is made of them, in words for the doctor."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from checkpoint import Checkpoint
from checkpoint.checkpoint import WeightFormat
from checkpoint.gguf.file import GgufFile
from checkpoint.huggingface.safetensors_index import tensor_files

_ENDS, _OTHERS = "embedding and output head", "norms and others"
_PLAIN = {"F64", "F32", "F16", "BF16"}
_GROUPS = (
    ("experts", re.compile(r"experts|_exps\.|_shexp\.")),
    ("attention", re.compile(r"self_attn\.|\.attn_(?!norm)|attention\.(?!norm)")),
    ("MLP", re.compile(r"mlp\.|feed_forward\.|\.ffn_(?!norm)")),
    (_ENDS, re.compile(r"embed_tokens|lm_head|token_embd|^output\.")),
)
"""The groups of tensors by their names, the first that fits: those of Hugging Face's folders, and of GGUF files."""


def quantized_as(checkpoint: Checkpoint) -> str:
    """Return what the checkpoint's configuration says of its quantization; empty for plain weights."""
    if has_mxfp4(checkpoint):
        return "MXFP4 (mxfp4), a scale for 32 columns; as they were: all but its experts"
    return "" if checkpoint.quantization is None else checkpoint.quantization.words()


def has_mxfp4(checkpoint: Checkpoint) -> bool:
    """Return whether the experts are in MXFP4.

    gpt-oss's experts are, by its configuration; `Checkpoint.quantization` covers what every family may have.
    """
    return checkpoint.config.experts is not None and checkpoint.config.experts.is_mxfp4


def stored_as(checkpoint: Checkpoint) -> str:
    """Return the number of tensors of each format and their size: "Q4_1: 210 tensors, 78.1 MiB; ..."."""
    return _listed((kind, nbytes) for _, kind, nbytes in _tensors(checkpoint))


def groups_as(checkpoint: Checkpoint, dtype: str) -> Iterator[str]:
    """Yield for each group of tensors the formats that they are stored in, and what a CPU makes of them.

    `dtype`: the number format that the CPU holds matrices in.
    """
    groups: dict[str, list[tuple[str, int]]] = {}
    for name, kind, nbytes in _tensors(checkpoint):
        group = next((group for group, pattern in _GROUPS if pattern.search(name)), _OTHERS)
        groups.setdefault(group, []).append((kind, nbytes))
    for group in (*(name for name, _ in _GROUPS), _OTHERS):
        if group in groups:
            yield f"{group}: {_listed(groups[group])}; {_made_of(group, {kind for kind, _ in groups[group]}, dtype)}"


def _made_of(group: str, kinds: set[str], dtype: str) -> str:
    """Return what becomes on a CPU of a group that is stored in these formats."""
    if group == _OTHERS:
        return "held as float32"
    if dtype == "native":
        return "computed as they are stored"
    widened = "" if kinds <= _PLAIN else "widened, then "
    table = ", rows of the embedding as float32" if group == _ENDS else ""
    return f"{widened}held as {dtype}{table}"


def _listed(tensors: Iterable[tuple[str, int]]) -> str:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for kind, nbytes in tensors:
        sizes[kind] += nbytes
        counts[kind] += 1
    each = sizes.most_common()
    return "; ".join(f"{kind}: {counts[kind]} tensors, {nbytes / 2**20:.1f} MiB" for kind, nbytes in each)


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, str, int]]:
    """Yield the name, number format and bytes of each tensor."""
    if checkpoint.format is WeightFormat.GGUF:
        for name, tensor in GgufFile.open(checkpoint.path).tensors.items():
            yield name, tensor.kind.name, tensor.nbytes
        return
    for file in sorted(set(tensor_files(checkpoint.path).values())):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield name, entry["dtype"], end - begin
