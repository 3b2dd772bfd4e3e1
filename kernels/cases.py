"""Random inputs for every operation, shared by the self-check, the tests and the benchmarks.

A case knows how to draw fresh arguments on a device, which of them are outputs, and how many bytes and operations the
work needs at least, so that a time can be put against the card's limit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kernels.layouts import tile_int4, tile_mxfp4
from kernels.reference.move import checksums
from kernels.reference.quant import quantize_mxfp4, to_e4m3, token_scale
from kernels.specs import (
    AttnSpec,
    FusedAttnSpec,
    GateUpSpec,
    GemmSpec,
    KernelSpec,
    MLASpec,
    MoESpec,
    MoveSpec,
    NormSpec,
    Quant,
    QuantSpec,
    RopeSpec,
    SampleSpec,
    SiluSpec,
    W4Spec,
    W8Spec,
)
from kernels.workspace import moe_workspace_nbytes, sample_workspace_nbytes

BF16, E4M3, FP32, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32
CACHE_DTYPE = {"e4m3": E4M3, "bf16": BF16, "fp32": FP32}
PLAIN = {"bf16": BF16, "fp32": FP32}


@dataclass
class KernelCall:
    """Arguments of one call.

    `outputs` names the tensors it writes, `updated` those it reads and writes; `batch` is what an implementation that
    plans on the host is told.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    updated: dict[str, Tensor] = field(default_factory=dict)
    batch: tuple[Any, ...] = ()

    def run(self, op: Callable[..., Any]) -> None:
        op(*self.args, **self.kwargs)

    def copy(self, device: str | None = None) -> "KernelCall":
        """A deep copy in which aliases stay aliases."""
        memo: dict[int, Tensor] = {}

        def dup(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in memo:
                memo[id(value)] = value.to(device, copy=True) if device else value.clone()
            return memo[id(value)]

        args, kwargs = tuple(map(dup, self.args)), {k: dup(v) for k, v in self.kwargs.items()}
        outputs, updated = ({k: dup(v) for k, v in d.items()} for d in (self.outputs, self.updated))
        return KernelCall(args, kwargs, outputs, updated, tuple(map(dup, self.batch)))

    def poison(self) -> None:
        """Fill outputs with NaN, so that an element nobody wrote shows."""
        for tensor in self.outputs.values():
            if tensor.dtype == E4M3:
                tensor.view(torch.uint8).fill_(0x7F)
            else:
                tensor.fill_(
                    float("nan") if tensor.is_floating_point() else -(1 << 20) if tensor.dtype != torch.uint8 else 0xA5
                )


@dataclass(frozen=True)
class KernelCase:
    """An operation on a shape.

    tolerance: relative error of every output against the reference on the same inputs.
    """

    op: str
    spec: KernelSpec
    make: Callable[[str], KernelCall]
    tolerance: float
    nbytes: float = 0  # least bytes through memory
    flops: float = 0  # operations of the matrix unit

    @property
    def name(self) -> str:
        return f"{self.op}[{self.spec.key()}]"


def errors(got: KernelCall, want: KernelCall) -> dict[str, float]:
    """Relative error of each output and updated tensor."""
    pairs = {**got.outputs, **got.updated}
    truths = {**want.outputs, **want.updated}
    return {name: relative_error(pairs[name], truths[name]) for name in pairs}


def relative_error(value: Tensor, truth: Tensor) -> float:
    """||value - truth|| / ||truth||; infinite when a NaN is anywhere."""
    value, truth = value.detach().float().cpu(), truth.detach().float().cpu()
    if value.shape != truth.shape or not torch.isfinite(value).all():
        return float("inf")
    return ((value - truth).norm() / truth.norm().clamp(min=1e-20)).item()


def _scales(quant: Quant, tokens: int, width: int, given: float, device: str) -> Tensor:
    return torch.full((width // 128, tokens) if quant == "group" else (tokens,), given, device=device)


def _rounded(quant: Quant, out: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """What a kernel that rounds writes: scales too, but a given one."""
    return {"out": out} | ({"scale": scale} if quant in ("token", "group") else {})


def norm_case(spec: NormSpec, tokens: int, spread: float = 1.0) -> KernelCase:
    def make(device: str) -> KernelCall:
        n = spec.hidden
        x_dtype = FP32 if spec.parts > 1 else BF16
        x = (torch.randn(spec.parts, tokens, n, device=device) * spread).to(x_dtype)
        table = torch.randn(64, n, device=device).to(BF16)
        residual = torch.randn(tokens, n, device=device).to(BF16) if spec.residual else None
        weight = (torch.rand(n, device=device) + 0.5).to(BF16)
        out = torch.empty(tokens, n, device=device, dtype=BF16 if spec.quant == "none" else E4M3)
        scale = _scales(spec.quant, tokens, n, 0.03, device)
        kwargs: dict[str, Any] = {}
        if spec.embed:
            kwargs["ids"] = torch.randint(0, 64, (tokens,), device=device)
        if spec.deferred:
            kwargs |= dict(
                token_scale=torch.rand(tokens, device=device) + 0.1, channel_scale=torch.rand(n, device=device) + 0.1
            )
        if spec.biased:
            kwargs["bias"] = torch.randn(n, device=device).to(BF16)
        outputs = _rounded(spec.quant, out, scale)
        updated = {"residual": residual} if residual is not None else {}
        return KernelCall((table if spec.embed else x, residual, weight, 1e-5, out, scale), kwargs, outputs, updated)

    return KernelCase("add_rmsnorm_quant", spec, make, 1e-2, tokens * spec.hidden * (2 * spec.parts + 5))


def quant_case(spec: QuantSpec, tokens: int, spread: float = 1.0) -> KernelCase:
    def make(device: str) -> KernelCall:
        x = (torch.randn(tokens, spec.width, device=device) * spread).to(BF16)
        out = torch.empty(tokens, spec.width, device=device, dtype=E4M3)
        scale = _scales(spec.quant, tokens, spec.width, 0.01, device)
        return KernelCall((x, out, scale), {}, _rounded(spec.quant, out, scale))

    return KernelCase("quant_fp8", spec, make, 1e-2, tokens * spec.width * 3)


def silu_case(spec: SiluSpec, tokens: int) -> KernelCase:
    def make(device: str) -> KernelCall:
        x = torch.randn(tokens, 2 * spec.width, device=device).to(BF16)
        out = torch.empty(tokens, spec.width, device=device, dtype=BF16 if spec.quant == "none" else E4M3)
        scale = _scales(spec.quant, tokens, spec.width, 0.02, device)
        kwargs = {}
        if spec.deferred:
            kwargs = dict(
                token_scale=torch.rand(tokens, device=device) + 0.5,
                channel_scale=torch.rand(2 * spec.width, device=device) + 0.5,
            )
        return KernelCall((x, out, scale), kwargs, _rounded(spec.quant, out, scale))

    return KernelCase("silu_mul_quant", spec, make, 1e-2, tokens * spec.width * 5)


def argmax_case(spec: QuantSpec, tokens: int) -> KernelCase:
    """In the second row one logit is NaN, in the last row all are."""

    def make(device: str) -> KernelCall:
        logits = torch.randn(tokens, spec.width, device=device)
        logits[1, spec.width // 2] = logits[-1] = float("nan")
        out = torch.empty(tokens, dtype=torch.int64, device=device)
        return KernelCall((logits, out, torch.empty(1 << 20, dtype=torch.uint8, device=device)), {}, {"out": out})

    return KernelCase("argmax", spec, make, 0.0, tokens * spec.width * 4)


def rotary_table(length: int, dim: int, device: str) -> Tensor:
    angle = torch.arange(length, device=device).float()[:, None] * 10000 ** (
        -torch.arange(0, dim, 2, device=device).float() / dim
    )
    return torch.cat([angle.cos(), angle.sin()], 1).contiguous()


def paged(
    lengths: list[int], heads: int, page: int, dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k and v planes of one allocation with random pages, block table and lengths."""
    per = [-(-n // page) for n in lengths]
    total = sum(per) + 3
    cache = torch.randn(2, total, heads, page, dim, device=device)
    cache = to_e4m3(cache) if dtype == E4M3 else cache.to(dtype)
    order = torch.randperm(total, device=device).to(I32)
    table = torch.zeros(len(lengths), max(per) + 1, dtype=I32, device=device)
    start = 0
    for b, count in enumerate(per):
        table[b, :count] = order[start : start + count]
        start += count
    return cache[0], cache[1], table, torch.tensor(lengths, dtype=I32, device=device)


def rope_case(spec: RopeSpec, tokens: int) -> KernelCase:
    def make(device: str) -> KernelCall:
        k, v, _, _ = paged([tokens * 2], spec.kv_heads, spec.page, spec.head_dim, CACHE_DTYPE[spec.kv], device)
        width = (spec.q_heads + 2 * spec.kv_heads) * spec.head_dim
        qkv = torch.randn(spec.parts, tokens, width, device=device).to(FP32 if spec.parts > 1 else BF16)
        positions = torch.randint(0, 500, (tokens,), device=device, dtype=I32)
        slots = torch.randperm(k.shape[0] * spec.page, device=device)[:tokens]
        slots[0] = -1
        q = torch.zeros(tokens, spec.q_heads, spec.head_dim, device=device).to(E4M3 if spec.rounded else BF16)
        args = (qkv, positions, slots, rotary_table(512, spec.head_dim, device), q, k, v)
        kwargs: dict[str, Any] = dict(k_scale=0.5, v_scale=0.25)
        if spec.deferred:
            kwargs |= dict(
                token_scale=torch.rand(tokens, device=device), channel_scale=torch.rand(width, device=device)
            )
        if spec.smooth:
            kwargs |= dict(k_offset=torch.randn(spec.kv_heads, spec.head_dim, device=device))
        kwargs |= _bias_and_gains(spec, width, device)
        if not spec.rounded:
            return KernelCall(args, kwargs, {"q": q}, {"k": k, "v": v})
        q_plain, num_plain = torch.zeros_like(q, dtype=BF16), torch.tensor([tokens // 3], dtype=I32, device=device)
        kwargs |= dict(q_plain=q_plain, num_plain=num_plain)
        return KernelCall(args, kwargs, {}, {"k": k, "v": v, "q": q, "q_plain": q_plain})

    width = spec.q_heads * 4 + spec.kv_heads * 6
    return KernelCase("rope_append", spec, make, 1e-2, tokens * width * spec.head_dim)


def _bias_and_gains(spec: RopeSpec | FusedAttnSpec, width: int, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if spec.biased:
        found["bias"] = torch.randn(width, device=device).to(BF16)
    if spec.normed:
        gains = (torch.rand(2, spec.head_dim, device=device) + 0.5).to(BF16)
        found |= dict(q_gain=gains[0], k_gain=gains[1], eps=1e-3)
    return found


def attn_case(
    spec: AttnSpec, lengths: list[int], workspace_mb: int = 64, tolerance: float = 1e-2, starts: list[int] | None = None
) -> KernelCase:
    """Tolerance 3e-3 is what the H200 must hold; bf16 caches round the softmax weights to 8 bits.

    `starts`: the first key that each row sees.
    """

    def make(device: str) -> KernelCall:
        k, v, table, lens = paged(lengths, spec.kv_heads, spec.page, spec.head_dim, CACHE_DTYPE[spec.kv], device)
        tokens = len(lengths) * spec.q_len
        q = torch.randn(tokens, spec.q_heads, spec.head_dim, device=device).to(BF16)
        out = torch.empty_like(q)
        workspace = torch.zeros(workspace_mb << 20, dtype=torch.uint8, device=device)
        kwargs: dict[str, Any] = dict(sm_scale=spec.head_dim**-0.5, k_scale=0.5, v_scale=2.0, max_len=max(lengths))
        outputs = {"out": out}
        if spec.sinks:
            kwargs["sinks"] = torch.randn(spec.q_heads, device=device)
        if spec.lse:
            kwargs["lse"] = outputs["lse"] = torch.empty(tokens, spec.q_heads, device=device)
        if starts is not None:
            kwargs["starts"] = torch.tensor(starts, dtype=torch.int32, device=device)
        return KernelCall((q, k, v, table, lens, out, workspace), kwargs, outputs)

    seen = sum(min(n, spec.window + spec.q_len) if spec.window else n for n in lengths)
    itemsize = CACHE_DTYPE[spec.kv].itemsize
    return KernelCase("attn_decode", spec, make, tolerance, 2 * seen * spec.kv_heads * spec.head_dim * itemsize)


def fused_attn_case(
    spec: FusedAttnSpec, lengths: list[int], workspace_mb: int = 64, behind: list[int] | None = None
) -> KernelCase:
    """`behind`: how many of the rows before a row are of its sequence, whose pages it then has."""

    def make(device: str) -> KernelCall:
        batch, width = len(lengths), (spec.q_heads + 2 * spec.kv_heads) * spec.head_dim
        k, v, table, lens = paged(lengths, spec.kv_heads, spec.page, spec.head_dim, E4M3, device)
        for row in reversed(range(1, len(behind or ()))):  # the last row of a sequence has pages for all
            if behind and behind[row]:
                table[row - 1] = table[row]
        qkv = torch.randn(spec.parts, batch, width, device=device).to(FP32 if spec.parts > 1 else BF16)
        out = torch.empty(
            batch, spec.q_heads * spec.head_dim, device=device, dtype=BF16 if spec.quant == "none" else E4M3
        )
        scale = torch.full((spec.q_heads, batch) if spec.quant == "group" else (batch,), 0.01, device=device)
        workspace = torch.zeros(workspace_mb << 20, dtype=torch.uint8, device=device)
        kwargs: dict[str, Any] = dict(sm_scale=spec.head_dim**-0.5, k_scale=0.5, v_scale=0.25, max_len=max(lengths))
        if spec.deferred:
            kwargs |= dict(
                token_scale=torch.rand(batch, device=device) + 0.5, channel_scale=torch.rand(width, device=device) + 0.5
            )
        kwargs |= _bias_and_gains(spec, width, device)
        if behind:
            kwargs |= dict(behind=torch.tensor(behind, dtype=I32, device=device))
        outputs = _rounded(spec.quant, out, scale)
        table_cs = rotary_table(max(lengths), spec.head_dim, device)
        return KernelCall((qkv, k, v, table, lens, table_cs, out, scale, workspace), kwargs, outputs, {"k": k, "v": v})

    nbytes = 2 * sum(lengths) * spec.kv_heads * spec.head_dim
    return KernelCase("attn_decode_fused", spec, make, 1e-2, nbytes)


def prefill_case(
    spec: AttnSpec, chunks: list[tuple[int, int]], workspace_mb: int = 1, tolerance: float = 1e-2, rounded: bool = False
) -> KernelCase:
    """chunks: (new tokens, tokens in all) of each sequence. rounded: queries in e4m3."""
    counts, totals = [new for new, _ in chunks], [total for _, total in chunks]

    def make(device: str) -> KernelCall:
        k, v, table, lens = paged(totals, spec.kv_heads, spec.page, spec.head_dim, CACHE_DTYPE[spec.kv], device)
        starts, kv_starts = (torch.tensor([0, *c], device=device).cumsum(0).to(I32) for c in (counts, totals))
        q = torch.randn(sum(counts), spec.q_heads, spec.head_dim, device=device).to(E4M3 if rounded else BF16)
        out = torch.empty_like(q, dtype=BF16)
        workspace = torch.zeros(workspace_mb << 20, dtype=torch.uint8, device=device)
        kwargs: dict[str, Any] = dict(
            max_q=max(counts), max_kv=max(totals), sm_scale=spec.head_dim**-0.5, k_scale=0.5, v_scale=2.0
        )
        outputs = {"out": out}
        if spec.sinks:
            kwargs["sinks"] = torch.randn(spec.q_heads, device=device)
        if spec.lse:
            kwargs["lse"] = outputs["lse"] = torch.empty(sum(counts), spec.q_heads, device=device)
        args = (q, k, v, table, lens, starts, kv_starts, out, workspace)
        return KernelCall(args, kwargs, outputs, batch=(table, counts, totals))

    pairs = sum(new * (total - new) + new * (new + 1) / 2 for new, total in chunks)
    return KernelCase("attn_prefill", spec, make, tolerance, 0, 4 * pairs * spec.q_heads * spec.head_dim)


def mla_case(spec: MLASpec, chunks: list[tuple[int, int]]) -> KernelCase:
    counts, width = [new for new, _ in chunks], spec.latent + spec.rope

    def make(device: str) -> KernelCall:
        k, _, table, lens = paged([n for _, n in chunks], 1, spec.page, width, CACHE_DTYPE[spec.kv], device)
        starts = torch.tensor([0, *counts], device=device).cumsum(0).to(I32)
        q = torch.randn(sum(counts), spec.heads, width, device=device).to(BF16)
        out = torch.empty(sum(counts), spec.heads, spec.latent, device=device, dtype=BF16)
        return KernelCall(
            (q, k[:, 0].contiguous(), table, lens, starts, out),
            dict(max_q=max(counts), sm_scale=width**-0.5, scale=0.5),
            {"out": out},
        )

    nbytes = sum(n for _, n in chunks) * width * CACHE_DTYPE[spec.kv].itemsize
    return KernelCase("mla_attention", spec, make, 1e-2, nbytes)


def weights(n: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    dense = torch.randn(n, k, device=device) * 0.05
    scale = token_scale(dense)
    return to_e4m3(dense / scale[:, None]), scale


def gemm_operands(spec: GemmSpec, tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = to_e4m3(torch.randn(tokens, spec.k, device=device) * 100)
    w, row_scale = weights(spec.n, spec.k, device)
    if spec.recipe == "tensor":
        return a, w, torch.tensor([0.01], device=device), torch.tensor([0.02], device=device)
    if spec.recipe == "row":
        return a, w, torch.rand(tokens, device=device) * 0.01 + 0.001, row_scale
    a_scale = torch.rand(spec.k // 128, tokens, device=device) * 0.01 + 0.001
    block_scale = torch.rand(-(-spec.n // 128), spec.k // 128, device=device) + 0.1
    return a, w, a_scale, row_scale if spec.recipe == "group" else block_scale


def gemm_case(spec: GemmSpec, tokens: int) -> KernelCase:
    def make(device: str) -> KernelCall:
        a, w, a_scale, w_scale = gemm_operands(spec, tokens, device)
        out = parts_or_whole(spec, tokens, device)
        return KernelCall((a, w, a_scale, w_scale, out), {}, {"out": out})

    nbytes = spec.n * spec.k + tokens * (spec.k + 2 * spec.n)
    return KernelCase("gemm_fp8", spec, make, 5e-3, nbytes, 2 * tokens * spec.n * spec.k)


def parts_or_whole(spec: GemmSpec | W4Spec, tokens: int, device: str) -> Tensor:
    """Room for a product: of parts in float32 `[parts, tokens, n]`, or whole."""
    if spec.parts > 1:
        return torch.empty(spec.parts, tokens, spec.n, device=device)
    return torch.empty(tokens, spec.n, device=device, dtype=BF16)


def gate_up_case(spec: GateUpSpec, tokens: int) -> KernelCase:
    def make(device: str) -> KernelCall:
        a, w, a_scale, w_scale = gemm_operands(GemmSpec(spec.n, spec.k), tokens, device)
        out = torch.empty(tokens, spec.n // 2, device=device, dtype=BF16 if spec.quant == "none" else E4M3)
        scale = _scales(spec.quant, max(tokens, 1), spec.n // 2, 0.05, device)
        return KernelCall((a, w, a_scale, w_scale, out, scale), {}, _rounded(spec.quant, out, scale))

    nbytes = spec.n * spec.k + tokens * (spec.k + spec.n // 2)
    return KernelCase("gemm_gate_up", spec, make, 1.5e-2, nbytes, 2 * tokens * spec.n * spec.k)


def w4_case(spec: W4Spec, tokens: int, symmetric: bool = False) -> KernelCase:
    def make(device: str) -> KernelCall:
        a = torch.randn(tokens, spec.k, device=device).to(BF16)
        codes = torch.randint(0, 16, (spec.n, spec.k), device=device, dtype=torch.uint8)
        scale = (torch.rand(spec.n, spec.k // 128, device=device) * 0.1 + 0.01).half()
        zero = torch.randint(0, 16, scale.shape, device=device)
        words, factors = tile_int4(codes, scale, torch.full_like(zero, 8) if symmetric else zero)
        out = parts_or_whole(spec, tokens, device)
        workspace = torch.zeros(widening_scratch_nbytes(spec, tokens), dtype=torch.uint8, device=device)
        return KernelCall((a, words, factors, out, workspace), {}, {"out": out})

    nbytes = spec.n * spec.k * (0.5 + 4 / 128) + tokens * 2 * (spec.k + spec.n)
    return KernelCase("gemm_w4", spec, make, 5e-3, nbytes, 2 * tokens * spec.n * spec.k)


def w8_case(spec: W8Spec, tokens: int) -> KernelCase:
    def make(device: str) -> KernelCall:
        a = torch.randn(tokens, spec.k, device=device).to(BF16)
        w, scale = weights(spec.n, spec.k, device)
        if spec.recipe != "row":
            rows, columns = (128, 128) if spec.recipe == "block128" else (1, 32)
            scale = torch.rand(-(-spec.n // rows), -(-spec.k // columns), device=device) * 0.01 + 0.001
        out = torch.empty(tokens, spec.n, device=device, dtype=BF16)
        workspace = torch.zeros(widening_scratch_nbytes(spec, tokens), dtype=torch.uint8, device=device)
        return KernelCall((a, w, scale, out, workspace), {}, {"out": out})

    nbytes = spec.n * spec.k + tokens * 2 * (spec.k + spec.n)
    return KernelCase("gemm_w8", spec, make, 5e-3, nbytes, 2 * tokens * spec.n * spec.k)


def widening_scratch_nbytes(spec: W4Spec | W8Spec, tokens: int) -> int:
    """Room for the bf16 copy of the weights and for split-K, whichever an implementation takes."""
    return (64 << 10) + max(2 * spec.n * spec.k, 32 * tokens * spec.n)


def move_case(op: str, spec: MoveSpec, num_pages: int, pool_pages: int, offset: int = 0, parts: int = 1) -> KernelCase:
    """op: kv_pack, kv_unpack or kv_sums.

    The cache is [planes, pages, page]; with an offset a page is two units. The buffer is for so many `parts` of each
    page, of which this is the last.
    """
    page = spec.unit_nbytes * (2 if offset else 1)

    def make(device: str) -> KernelCall:
        if spec.convert:
            cache = torch.randn(spec.planes, pool_pages, page, device=device).to(BF16)
        else:
            cache = torch.randint(0, 256, (spec.planes, pool_pages, page), device=device, dtype=torch.uint8)
        pages = torch.randperm(pool_pages, device=device)[:num_pages].to(I32)
        shape = (num_pages, parts, spec.planes, spec.unit_nbytes)
        whole = torch.randint(0, 256, shape, device=device, dtype=torch.uint8)
        buffer = whole.view(-1) if parts == 1 else whole[:, -1]
        units = num_pages * spec.planes
        sums = torch.zeros(units, dtype=I32, device=device)
        bad = torch.zeros(1, dtype=I32, device=device)
        common: dict[str, Any] = dict(seed=77, offset=offset)
        if op == "kv_pack":
            outputs = {"buffer": buffer} | ({"sums": sums} if spec.checksum else {})
            inv_scales = 0.5 + torch.rand(spec.planes, device=device)
            return KernelCall((cache, pages, buffer, sums), common | dict(inv_scales=inv_scales), outputs)
        if op == "kv_sums":
            return KernelCall((cache, pages, sums), common | dict(first=offset // 4), {"sums": sums})
        sums.copy_(checksums(spec, buffer.contiguous(), num_pages, 77))
        return KernelCall((buffer, cache, pages, sums, bad), common, {}, {"cache": cache, "bad": bad})

    moved = num_pages * spec.planes * spec.unit_nbytes
    nbytes = moved * (1 if op == "kv_sums" else 3 if spec.convert else 2)
    return KernelCase(op, spec, make, 0.0, nbytes)


def route_case(spec: MoESpec, tokens: int) -> KernelCase:
    def make(device: str) -> KernelCall:
        logits = torch.randn(tokens, spec.experts, device=device)
        chosen = torch.empty(tokens, spec.top_k, device=device, dtype=I32)
        score = torch.empty(tokens, spec.top_k, device=device)
        bias = dict(bias=torch.randn(spec.experts, device=device).to(BF16)) if spec.bias else {}
        return KernelCall((logits, score, chosen), bias, {"weights": score, "ids": chosen})

    return KernelCase("moe_route", spec, make, 1e-5, tokens * spec.experts * 4)


def experts_case(spec: MoESpec, tokens: int) -> KernelCase:
    def make(device: str) -> KernelCall:
        x = torch.randn(tokens, spec.hidden, device=device)
        x = to_e4m3(x * 100) if spec.weights == "e4m3" else x.to(PLAIN.get(spec.weights, BF16))
        x_scale = torch.rand(tokens, device=device) * 0.01 + 0.005
        w1, s1 = expert_weights(spec, 2 * spec.inter, spec.hidden, device)
        w2, s2 = expert_weights(spec, spec.hidden, spec.inter, device)
        best = torch.randn(tokens, spec.experts, device=device).topk(spec.top_k)
        out = torch.empty(tokens, spec.hidden, device=device, dtype=BF16)
        workspace = torch.empty(moe_workspace_nbytes(spec, tokens), dtype=torch.uint8, device=device)
        args = (x, x_scale, best.values.softmax(-1), best.indices.to(I32), w1, s1, w2, s2, out, workspace)
        widths = dict(b1=2 * spec.inter, b2=spec.hidden) if spec.bias else {}
        biases = {name: torch.randn(spec.experts, n, device=device).to(BF16) for name, n in widths.items()}
        return KernelCall(args, biases, {"out": out})

    touched = min(spec.experts, tokens * spec.top_k)
    flops = 6 * tokens * spec.top_k * spec.inter * spec.hidden
    weight_nbytes = {"e4m3": 1, "mxfp4": 17 / 32, "bf16": 2, "fp32": 4}[spec.weights]
    return KernelCase("moe_experts", spec, make, 1.5e-2, 3 * touched * spec.inter * spec.hidden * weight_nbytes, flops)


def expert_weights(spec: MoESpec, n: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    """Made expert by expert: the fp32 of all of them would not fit beside the rest."""
    if spec.weights in PLAIN:
        plain = torch.randn(spec.experts, n, k, device=device, dtype=PLAIN[spec.weights]) * 0.05
        return plain, torch.empty(spec.experts, 0, device=device)
    made = [mx_weights(n, k, device) if spec.weights == "mxfp4" else weights(n, k, device) for _ in range(spec.experts)]
    return torch.stack([w for w, _ in made]), torch.stack([scale for _, scale in made])


def mx_weights(n: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    return tile_mxfp4(*quantize_mxfp4(torch.randn(n, k, device=device) * 0.05))


ALL_ONES = 149059, 30338
"""A seed, and a token whose random bits are all ones by it, at position 0."""


def sample_case(spec: SampleSpec, rows: int, dtype: torch.dtype = FP32) -> KernelCase:
    """Return a case in which rows take turns among all ways to be drawn.

    Among greedy, plain, top-k, top-p, min-p, all together so hot that their order matters, a top-p that leaves out what
    is drawn first, and a top-k of many. The eleventh and the fourteenth are allowed fewer tokens than top-k. The tenth
    has a top-p of 0, which is greedy. The second draws the largest random number there is for an unlikely token, if the
    vocabulary is large.
    """

    def make(device: str) -> KernelCall:
        pick = torch.arange(rows, device=device) % 8
        logits = (torch.randn(rows, spec.vocab, device=device) * 3).to(dtype)
        logits[10::16, 15:] = logits[13::16, 15:] = float("-inf")
        temperature = torch.where(pick == 0, 0.0, torch.where((pick == 5) | (pick == 6), 3.0, 0.9))
        top_k = torch.where((pick == 2) | (pick == 5), 20, torch.where(pick == 7, min(300, spec.vocab - 1), 0)).to(I32)
        top_p = torch.where((pick == 3) | (pick == 5), 0.6, torch.where(pick == 6, 0.05, 1.0))
        top_p[9::16] = 0.0
        min_p = torch.where((pick == 4) | (pick == 5), 0.5, 0.0)
        seeds = torch.randint(0, 2**62, (rows,), device=device)
        positions = torch.randint(0, 100000, (rows,), device=device)
        seed, unlikely = ALL_ONES
        if unlikely < spec.vocab:
            seeds[1], positions[1], logits[1, unlikely] = seed, 0, -40.0
        tokens = torch.empty(rows, dtype=torch.int64, device=device)
        logprobs = torch.empty(rows, device=device)
        workspace = torch.empty(sample_workspace_nbytes(spec, rows), dtype=torch.uint8, device=device)
        args = (logits, temperature, top_k, top_p, min_p, seeds, positions, tokens, logprobs, workspace)
        return KernelCall(args, {}, {"tokens": tokens, "logprobs": logprobs})

    return KernelCase("sample", spec, make, 1e-5, rows * spec.vocab * dtype.itemsize)


def no_choice_case(spec: SampleSpec) -> KernelCase:
    """Return a case with rows of NaN, of -inf, and of one inf beside them, asked in all ways.

    Each ends with a token that there is.
    """
    made = sample_case(spec, 24)

    def make(device: str) -> KernelCall:
        call = made.make(device)
        logits, tokens = call.args[0], call.outputs["tokens"]
        logits[:8], logits[8:] = float("nan"), float("-inf")
        logits[16:, spec.vocab // 2] = float("inf")
        return replace(call, outputs={"tokens": tokens})

    return replace(made, make=make, tolerance=0.0)
