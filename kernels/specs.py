"""Static descriptions of operations: dtypes, head counts, recipes.

Never batch sizes, so selection happens once.
"""

from dataclasses import dataclass, fields
from typing import Literal

Quant = Literal["none", "token", "tensor", "group"]
"""How rows are left: as they are, or in e4m3 with a scale each, one given scale, or one for each 128 columns, which are
stored `[width / 128, tokens]`.
"""
Recipe = Literal["tensor", "row", "group", "block128"]
KVDtype = Literal["e4m3", "bf16", "fp32"]
ExpertFormat = Literal["e4m3", "mxfp4", "bf16", "fp32"]


@dataclass(frozen=True)
class KernelSpec:
    """Base of all specs."""

    def key(self) -> str:
        """A stable name of the spec for plan tables and reports."""
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))


@dataclass(frozen=True)
class NormSpec(KernelSpec):
    """RMSNorm, optionally after adding to the residual, optionally followed by quantization to e4m3."""

    hidden: int
    quant: Quant = "token"
    parts: int = 1  # split-K partial sums to add up
    deferred: bool = False  # x is an unscaled product and takes token and channel scale here
    embed: bool = False  # x is the embedding table, rows named by ids
    residual: bool = True
    biased: bool = False  # a bias is added after these scales, before the residual


@dataclass(frozen=True)
class QuantSpec(KernelSpec):
    """bf16 to e4m3."""

    width: int
    quant: Quant = "token"


@dataclass(frozen=True)
class SiluSpec(KernelSpec):
    """silu(gate) * up with quantization; width is that of the output."""

    width: int
    quant: Quant = "tensor"
    deferred: bool = False


@dataclass(frozen=True)
class AttnSpec(KernelSpec):
    """Paged attention. KV cache planes are [pages, kv_heads, page, head_dim]."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page: int = 64
    kv: KVDtype = "e4m3"
    window: int = 0  # tokens a query may see, itself included; 0 is all
    sinks: bool = False
    lse: bool = False
    q_len: int = 1  # query tokens per sequence in a decode call


@dataclass(frozen=True)
class FusedAttnSpec(KernelSpec):
    """Decode attention straight from the qkv product: rope, append, attention, quantization in one launch.

    A call with `behind` `[rows]` int32 has rows of drafts: so many rows before this one are of the tokens before its
    own, whose K and V are new as well. `biased`, `normed`: as of RopeSpec.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    page: int = 64
    quant: Quant = "tensor"
    parts: int = 1
    deferred: bool = False
    biased: bool = False
    normed: bool = False


@dataclass(frozen=True)
class RopeSpec(KernelSpec):
    """RoPE (half-split, as Llama) on q and k, quantization, and the write of k and v into their pages.

    `biased`: q, k and v get a bias first, after the deferred scales. `normed`: then each head of q and of k gets an
    RMSNorm.
    `smooth`: after RoPE q and k of each head are multiplied by a Hadamard matrix, and k loses `k_offset` before it is
    rounded. Softmax without sinks gives the same for both, and rounding costs it less.
    `rounded`: q is left in e4m3, unscaled: it holds magnitudes of 2^-9 to 448, and what is beyond saturates. But of the
    first rows, as many as `num_plain` says on the device, it goes to `q_plain` as it is.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    page: int = 64
    kv: KVDtype = "e4m3"
    parts: int = 1
    deferred: bool = False
    smooth: bool = False
    biased: bool = False
    normed: bool = False
    rounded: bool = False


@dataclass(frozen=True)
class MLASpec(KernelSpec):
    """Multi-head latent attention in its absorbed form.

    One shared latent (512) and one rope part (64) per token.
    """

    heads: int
    latent: int = 512
    rope: int = 64
    page: int = 64
    kv: KVDtype = "bf16"


@dataclass(frozen=True)
class GemmSpec(KernelSpec):
    """FP8 x FP8 product, out[M, n] = a[M, k] @ w[n, k]^T with scales.

    block128 wants M in steps of 4 unless skinny.
    """

    n: int
    k: int
    recipe: Recipe = "row"
    parts: int = 1  # >1: out is fp32 [parts, M, n], to be added up by the reader
    deferred: bool = False  # leave out the scales; the reader applies them
    skinny: bool = False  # meant for 1 to 64 tokens; any number of them

    @property
    def share(self) -> int:
        """Columns of k that a part takes, in steps of 128; the last part takes what is left."""
        return -(-self.k // (128 * self.parts)) * 128


@dataclass(frozen=True)
class GateUpSpec(KernelSpec):
    """FP8 gate and up products with silu(gate) * up and quantization in the epilogue.

    N counts both halves.
    """

    n: int
    k: int
    quant: Quant = "tensor"


@dataclass(frozen=True)
class W4Spec(KernelSpec):
    """bf16 activations times INT4 weights, in tiles of kernels.layouts.tile_int4."""

    n: int
    k: int
    parts: int = 1  # as GemmSpec has them

    @property
    def share(self) -> int:
        """Columns of k that a part takes, in steps of 256; the last part takes what is left."""
        return -(-self.k // (256 * self.parts)) * 256


@dataclass(frozen=True)
class W8Spec(KernelSpec):
    """bf16 activations times e4m3 weights.

    A scale for each row, each 32 columns of it, or block of 128 x 128.
    """

    n: int
    k: int
    recipe: Literal["row", "group32", "block128"] = "block128"


@dataclass(frozen=True)
class MoESpec(KernelSpec):
    """A mixture-of-experts layer: experts of [2 * inter, hidden] and [hidden, inter].

    e4m3 weights have row scales and take e4m3 tokens with a scale each; mxfp4 weights (tiles of
    kernels.layouts.tile_mxfp4, gates and ups paired by pair_gate_up) take bf16 tokens; bf16 and fp32 weights have no
    scales and take tokens like themselves.
    bias: both products add one per expert and row, as gpt-oss does; its router adds one per expert.
    """

    experts: int
    top_k: int
    hidden: int
    inter: int
    renormalize: bool = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    activation: Literal["silu", "swiglu_oai"] = "silu"
    weights: ExpertFormat = "e4m3"
    bias: bool = False


@dataclass(frozen=True)
class SampleSpec(KernelSpec):
    """Sampling from logits [batch, vocab]."""

    vocab: int
    penalties: bool = False


@dataclass(frozen=True)
class MoveSpec(KernelSpec):
    """Pages of all planes of a KV cache to and from one contiguous buffer.

    A unit is what moves of one page of one plane: the whole page, or the bytes of the heads that the other side's
    shard holds. The buffer is [pages, planes, unit_nbytes], flat or a part of [pages, more planes, unit_nbytes], with
    one 32-bit checksum a unit beside it.
    """

    planes: int  # 2 * layers
    unit_nbytes: int  # in the buffer
    convert: bool = False  # the cache holds bf16 and the buffer e4m3
    checksum: bool = False
