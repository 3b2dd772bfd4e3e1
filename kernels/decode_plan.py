"""The plan of a decode layer at each batch size.

Which products split along k, which defer their scales.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeGemmPlan:
    """parts > 1: split-K, summed by the reader. deferred: cuBLAS without scales, applied by the reader."""

    qkv_parts: int = 1
    o_parts: int = 1
    down_parts: int = 1
    deferred: bool = False  # qkv, o and down
    fused_gate_up: bool = True  # silu and quantization in the epilogue
    own_head: bool = True
    pdl: bool = True

    def parts(self, name: str) -> int:
        return {"qkv": self.qkv_parts, "o": self.o_parts, "down": self.down_parts}.get(name, 1)


def decode_plan(batch: int) -> DecodeGemmPlan:
    """The plan for a batch size, from bench/results (decode_step and decode_step_without, H200).

    Own kernels while a product reads its weights, up to 64 tokens; at 128 cuBLAS per tensor with deferred scales
    for qkv, o and down; at 256 the fused gate_up only equals cuBLAS and a SiLU kernel, and dependent launches hurt.
    They also do where fewer tokens than 64 take what 64 would: a step of 40 takes 4.11 ms with and 3.66 without them,
    of 48 3.95 and 3.69, of 64 3.85 and 3.97. Other architectures take the same shape: split-K and fusing do not depend
    on the instruction set.
    """
    if batch <= 8:
        return DecodeGemmPlan(2, 2, 2)
    if batch <= 64:
        return DecodeGemmPlan(1, 2, 2, pdl=batch <= 32 or batch == 64)
    if batch <= 128:
        return DecodeGemmPlan(deferred=True)
    return DecodeGemmPlan(deferred=True, fused_gate_up=False, own_head=False, pdl=False)


SKINNY_ROWS = 128
"""No product of more rows is cut along k, nor taken from cuBLAS, outside of the fused step."""
_TOKEN_TILE = 64


def skinny_parts(rows: int, n: int, k: int, by_blocks: bool = False) -> int | None:
    """Parts along k of a product with FP8 weights `[n, k]` outside of the fused step.

    None: it is cuBLAS's.

    Up to 64 rows a product is a read of its weights, which cuBLAS does badly: 2048 x 4096 and its norm take 8.8 us for
    8 rows, ours 5.9, in two parts 4.1, in four 5.0. Of no more than 2048 columns a CTA has all in flight at once, and
    parts only cost: 5120 x 2048 with rope takes 4.4 us for 8 rows, in two parts 5.0. More CTAs than there are
    multiprocessors pay up to 32 rows: 24576 x 4096 with SiLU takes 30.6 us there and 35.7 for 64, by cuBLAS 31.2 and
    32.1. By blocks cuBLAS is slower: 28672 x 4096 takes 32.5 us for 64 rows, there 35.9; and 4096 x 14336, which for
    128 rows are no more CTAs than multiprocessors, 25.7 and 41.3 (H200).
    """
    ctas = n // 64 * -(-rows // _TOKEN_TILE)
    most_rows = SKINNY_ROWS if by_blocks else _TOKEN_TILE
    is_crowded = ctas > 132 and rows > (_TOKEN_TILE if by_blocks else 32)
    if rows > most_rows or n % 64 or k % 64 or is_crowded:
        return None
    return 2 if k > 2048 and 2 * ctas <= (192 if rows <= 8 else 160) else 1


def int4_parts(rows: int, n: int, k: int) -> int:
    """Parts along k of a product with INT4 weights `[n, k]` whose reader adds them up.

    Four, or two, as long as that makes no more CTAs than three a multiprocessor, from 33 rows on two, each with two
    steps of 256 columns at least: 4096 x 14336 takes 29.4 us for 8 rows, in two parts 16.8, in four 12.4, in eight
    12.3 (H200).
    """
    ctas, room = n // 64 * -(-rows // _TOKEN_TILE), 132 * (3 if rows <= 32 else 2)
    if rows > SKINNY_ROWS:
        return 1
    return next((parts for parts in (4, 2) if parts * ctas <= room and k >= 512 * parts), 1)
