"""How much scratch memory an operation wants: known without what implements it."""

from kernels.specs import MoESpec, SampleSpec, W4Spec, W8Spec

COUNTERS_NBYTES = 32 << 10
MAX_STATES = 2560
"""What decode attention publishes before it is merged: a state for each (sequence, head, slice or group of slices)."""
WIDEN_INT4_TOKENS, WIDEN_TOKENS = 512, 256
"""From so many tokens on weights of fewer bits than the activations, INT4 ones and others, are widened for cuBLAS.
28672 x 4096 in INT4 takes 137 us for 256 tokens, widened 175; two such are 274 for 512, widened 244 (H200)."""
MX_PARTS, MX_SPLIT_SHARE = 2, 8
"""Parts along k of an expert's second product with MXFP4 weights, up to so many rows an expert."""
SAMPLE_BLOCK, SAMPLE_GROUPS, SAMPLE_SLOTS, SAMPLE_ROUNDS = 4096, 32, 128, 3
"""Logits of a row that `sample` looks at together, how many maxima it takes of them, how many of them it copies for
top-k, and how many tokens in turn it draws again that top-p has not left."""
SAMPLE_SECTIONS = 3 * (SAMPLE_ROUNDS + 2)
FULL_TILE = 128
"""Rows of the largest tile of an expert's product."""


def decode_workspace_nbytes(max_batch: int, kv_heads: int, rows: int, head_dim: int) -> int:
    """Return the bytes that serve `attn_decode` and `attn_decode_fused` up to `max_batch`.

    For so many `rows` of queries to a KV head. They must be zeroed once after allocation.
    """
    return COUNTERS_NBYTES + max(MAX_STATES, 4 * max_batch * kv_heads) * rows * (head_dim + 2) * 4


def group_width(spec: MoESpec) -> int:
    """Columns of an expert's middle that share a scale: what divides both widths."""
    return 128 if spec.inter % 128 == 0 and spec.hidden % 128 == 0 else 64


def moe_workspace_nbytes(spec: MoESpec, max_tokens: int) -> int:
    """Bytes for any number of tokens up to `max_tokens`."""
    total = max_tokens * spec.top_k
    pads = pads_rows(spec, total)
    rows = total + (FULL_TILE * spec.experts if pads else 0)
    middle = rows * (spec.inter * (1 if spec.weights == "e4m3" else 2) + 4 * (spec.inter // group_width(spec)))
    split = min(total, MX_SPLIT_SHARE * spec.experts) * 4 * MX_PARTS * spec.hidden if spec.weights == "mxfp4" else 0
    order = 4 * total + 4 * spec.experts * (2 * FULL_TILE + 2 + 2 * -(-total // sort_chunk(spec.experts)))
    copies = rows * (spec.hidden + 4) if pads else 0
    return middle + copies + total * (2 * spec.hidden + 8) + split + order + 8192


def pads_rows(spec: MoESpec, total: int) -> bool:
    """Return whether so many assignments may be padded to whole tiles for each expert.

    It then has a quarter on average.
    """
    return spec.weights == "e4m3" and total > FULL_TILE // 4 * spec.experts


def sort_chunk(experts: int) -> int:
    """Assignments that one CTA counts, all of them beside all experts in its registers."""
    return min(128, (1 << 16) // (1 << (experts - 1).bit_length()))


def widening_workspace_nbytes(spec: W4Spec | W8Spec, max_tokens: int) -> int:
    """Return the bytes for any number of tokens up to `max_tokens`.

    The bf16 copy included when they are enough to widen; beside 8-bit weights parts along k of a product of few tokens.
    """
    widens = max_tokens >= (WIDEN_INT4_TOKENS if isinstance(spec, W4Spec) else WIDEN_TOKENS)
    wide = 2 * spec.n * spec.k if widens else 0
    return COUNTERS_NBYTES + max(wide, 8 * 64 * spec.n * 4 if isinstance(spec, W8Spec) else 0)


def sample_workspace_words(spec: SampleSpec) -> int:
    """Words of 4 bytes for each row."""
    return -(-spec.vocab // SAMPLE_BLOCK) * (SAMPLE_SECTIONS + SAMPLE_GROUPS + 2 * SAMPLE_SLOTS)


def sample_workspace_nbytes(spec: SampleSpec, max_rows: int) -> int:
    """Bytes for any number of rows up to `max_rows`."""
    return 4 * sample_workspace_words(spec) * max_rows
