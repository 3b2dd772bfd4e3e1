# ruff: noqa: E501  (a table: one case a line)
"""Every Triton and Gluon kernel with the types it is launched with: Llama-8B shapes unless the name says otherwise."""

from typing import Any

from kernels import specs
from kernels.triton import (
    attn_decode,
    attn_prefill,
    attn_stream,
    gemm_blackwell,
    gemm_hopper,
    gemm_portable,
    gemm_w4,
    gemm_w8,
    moe,
    moe_hopper,
    moe_mx,
    moe_sort,
    move,
    norm,
    prefill_parts,
    rope,
    sampling,
)
from tests.kernels.aot import Case

PDL = (r"griddepcontrol\.wait", r"griddepcontrol\.launch_dependents")
CVT = (r"cvt\.rn\.satfinite\.e4m3x2",)
WGMMA8 = (r"wgmma\.mma_async.*e4m3\.e4m3",)
TMA = (r"cp\.async\.bulk\.tensor",)
FP8_MMA = {90: WGMMA8, 100: (r"tcgen05\.mma",), 103: (r"tcgen05\.mma",), 120: (r"mma\.sync.*e4m3",)}


def everywhere(*groups: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    return {cc: tuple(p for g in groups for p in g) for cc in (90, 100, 103, 120)}


def plus(table: dict[int, tuple[str, ...]], *groups: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    return {cc: patterns + tuple(p for g in groups for p in g) for cc, patterns in table.items()}


def pointers(
    fp8: str = "", bf16: str = "", fp32: str = "", i32: str = "", i64: str = "", u8: str = ""
) -> dict[str, str]:
    kinds = {"*fp8e4nv": fp8, "*bf16": bf16, "*fp32": fp32, "*i32": i32, "*i64": i64, "*u8": u8}
    return {f"{name}_ptr": kind for kind, names in kinds.items() for name in names.split()}


def scalars(fp32: str = "", i32: str = "", i64: str = "") -> dict[str, str]:
    return {name: kind for kind, names in (("fp32", fp32), ("i32", i32), ("i64", i64)) for name in names.split()}


def aligned(types: dict[str, str], *more: str) -> tuple[str, ...]:
    return tuple(n for n, kind in types.items() if kind.startswith("*")) + more


def desc(rows: int, cols: int) -> str:
    layout = gemm_hopper.smem_layout(cols)
    return f"tensordesc<fp8e4nv[{rows}, {cols}],{layout!r}>"


LAUNCH = dict(launch_pdl=True)
norm_types = pointers(
    fp8="out", bf16="residual weight bias", fp32="x scale token_scale channel_scale", i64="ids"
) | scalars(fp32="eps", i32="num_tokens")
quant_types = pointers(fp8="out", bf16="x", fp32="scale")
gather_types = pointers(fp8="x out", fp32="scale out_scale", i32="sorted tile") | scalars(i32="total")
group_quant_types = quant_types | scalars(i32="num_tokens")
silu_types = pointers(fp8="out", bf16="x", fp32="scale token_scale channel_scale") | scalars(i32="num_tokens")
boxes = {"k_desc": "*fp8e4nv", "v_desc": "*fp8e4nv"}
bulk = {"k_desc": "tensordesc<fp8e4nv[64, 128]>", "v_desc": "tensordesc<i16[64, 64]>"}
oss_bulk = {"k_desc": "tensordesc<fp8e4nv[64, 64]>", "v_desc": "tensordesc<i16[64, 32]>"}
attn_types = (
    boxes
    | pointers(fp8="k v", bf16="q out", fp32="sink lse mid ml", i32="table len start counter")
    | scalars(fp32="qk_scale v_scale", i32="stride_page max_pages")
)
fused_types = (
    boxes
    | pointers(fp8="k v out", fp32="qkv cos_sin out_scale mid ml token_scale channel_scale")
    | pointers(i32="table len behind counter")
    | pointers(bf16="bias q_gain k_gain")
    | scalars(fp32="eps qk_scale k_inv v_scale", i32="stride_page max_pages num_tokens")
)
rope_types = pointers(
    fp8="k v",
    bf16="q qkv bias q_gain k_gain q_plain",
    fp32="cos_sin token_scale channel_scale k_offset",
    i32="pos num_plain",
    i64="slot",
) | scalars(fp32="eps k_inv v_inv", i32="stride_page num_tokens")
swap_types = pointers(fp8="w x", fp32="out w_scale x_scale out_scale") | scalars(i32="M")
wide_types = pointers(fp8="a w", bf16="out", fp32="a_scale w_scale") | scalars(i32="M")
skinny_types = pointers(fp32="out w_scale x_scale") | scalars(i32="M")
dual_types = pointers(fp8="out", fp32="w_scale x_scale out_scale") | scalars(i32="M")


def rope_case(name: str, types: dict[str, str] = rope_types, **over: Any) -> Case:
    shape = dict(HQ=32, HKV=8, HEADS=48, BLOCK=16, D=128, PAGE=64, PARTS=1)
    flags = dict(DEFERRED=False, BIASED=False, NORMED=False, SMOOTH=False, ROUNDED=False, FP8=True, PDL=True)
    return Case(
        name, rope.rope_append_kernel, types, {**shape, **flags, **over}, aligned(types, "stride_page"),
        dict(num_warps=4, **LAUNCH), everywhere(PDL, CVT),
    )  # fmt: skip


def attn(name: str, types: dict[str, str] = attn_types, **over: Any) -> Case:
    shape = dict(
        HQ=32,
        HKV=8,
        D=128,
        PAGE=64,
        Q_LEN=1,
        ROWS=16,
        SLICES=6,
        BLOCK=64,
        STAGES=3,
        WINDOW=0,
        STARTS=False,
        SINKS=False,
        LSE=False,
        HALF=True,
        PAD=4,
        GROUP=8,
        CHUNK=8,
        BULK=False,
        PAIRS=False,
        EARLY=True,
    )
    constants = {**shape, "PDL": True, **over}
    return Case(
        name,
        attn_decode.attn_decode_kernel,
        types,
        constants,
        aligned(types, "stride_page"),
        dict(num_warps=1 if constants["BULK"] else 4, **LAUNCH),
        everywhere(PDL),
    )


def attn_streaming(name: str, group: int, dim: int, **over: Any) -> Case:
    types = {n: t for n, t in attn_types.items() if n in attn_stream.attn_stream_kernel.arg_names}
    types |= {"k_desc": f"tensordesc<fp8e4nv[32, {dim}]>", "v_desc": f"tensordesc<i16[32, {dim // 2}]>"}
    plan = attn_stream.stream_plan(128, 8192, specs.AttnSpec(8 * group, 8, dim))
    constants = dict(
        HQ=8 * group, HKV=8, D=dim, PAGE=64, SLICES=8, BLOCK=32, STAGES=3, SINKS=True, LSE=True,
        HOLD=attn_stream.hold(plan, dim), PDL=True, **over,
    )  # fmt: skip
    expect = everywhere(
        PDL, TMA, (r"mma\.sync.*m16n8k16", r"cvt\.rn\.f16x2\.e4m3x2", r"held\["), (r"bulk\.prefetch\.L2",)
    )
    return Case(
        name, attn_stream.attn_stream_kernel, types, constants, aligned(types, "stride_page"),
        dict(num_warps=1, **LAUNCH), expect,
    )  # fmt: skip


def attn_merge(name: str, slices: int, dim: int) -> Case:
    types = {n: t for n, t in attn_types.items() if n in attn_stream.attn_merge_kernel.arg_names}
    part = attn_stream.merge_part(slices, dim)
    constants = dict(
        HQ=64, HKV=8, D=dim, PART=part, SLICES=slices, WIDTH=1 << (slices - 1).bit_length(), LINES=part // 32,
        SINKS=True, LSE=True, PDL=True,
    )  # fmt: skip
    return Case(
        name, attn_stream.attn_merge_kernel, types, constants, aligned(types), dict(num_warps=1, **LAUNCH),
        everywhere(PDL, (r"discard\.global\.L2",)),
    )  # fmt: skip


PARTS = "parts span num_rows"
prefill_types = pointers(fp8="k v", bf16="q out", fp32="sink lse state", i32="table len start") | scalars(
    fp32="qk_scale v_scale", i32=f"stride_page max_pages {PARTS}"
)
parts_types = pointers(bf16="out", fp32="state sink lse", i32="len start") | scalars(fp32="v_scale", i32=PARTS)
mla_types = pointers(bf16="q c out", i32="table len start") | scalars(fp32="qk_scale scale", i32="max_pages")
w8_types = pointers(fp8="w", bf16="x out", fp32="scale part", i32="counter") | scalars(i32="M")
w4_types = {"w_ptr": "*i16"} | pointers(i32="factor", bf16="x out") | scalars(i32="M")
move_types = pointers(i32="src dst page sum bad") | scalars(
    i32="units offset seed first", i64="stride_plane stride_page"
)
convert_types = pointers(i64="src", i32="dst page sum", fp32="inv") | scalars(
    i32="units offset seed", i64="stride_plane stride_page"
)
expert_types = pointers(fp8="w x", fp32="w_scale x_scale out_scale", bf16="bias", i32="sorted tile") | scalars(
    i32="total"
)
sample_types = pointers(fp32="x temperature top_p min_p room", i32="top_k position index", i64="seed")
sample_shape = dict(V=128256, BLOCKS=32, PADDED=32, ROOM=9696, PDL=True)


def prefill(
    name: str,
    types: dict[str, str] = prefill_types,
    bm: int = 128,
    archs: tuple[int, ...] = (90, 100, 103),
    **over: Any,
) -> Case:
    shape = dict(
        HQ=32, HKV=8, D=128, PAGE=64, BM=bm, PACK=4, BLOCK=64, STAGES=3, WINDOW=0, SINKS=False, LSE=False, HALF=True
    )
    mma = {90: (r"wgmma\.mma_async",), 100: (r"tcgen05\.mma",), 103: (r"tcgen05\.mma",), 120: (r"mma\.sync",)}
    return Case(
        name,
        attn_prefill.attn_prefill_kernel,
        types,
        {**shape, **over},
        aligned(types, "stride_page"),
        dict(num_warps=8),
        mma,
        archs,
    )


def rows(name: str, block: int, stages: int, parts: bool = False, archs: tuple[int, ...] = (90, 100, 103)) -> Case:
    kernel = attn_prefill.attn_rows_parts_kernel if parts else attn_prefill.attn_rows_kernel
    types = pointers(bf16="q out", i32="len start", fp32="sink lse") | scalars(fp32="qk_scale v_scale", i32="max_rows")
    if parts:
        types |= pointers(fp32="state") | scalars(i32=PARTS)
    box = f"tensordesc<fp16[{block}, 128]>"
    constants = dict(HQ=32, HKV=8, D=128, BM=128, BLOCK=block, STAGES=stages, SINKS=False, LSE=False)
    return Case(
        name, kernel, {**types, "k_desc": box, "v_desc": box}, constants, aligned(types, "max_rows"),
        dict(num_warps=8), {90: (r"wgmma\.mma_async", *TMA), 100: (r"tcgen05\.mma", *TMA), 103: (r"tcgen05\.mma", *TMA)}, archs,
    )  # fmt: skip


def moe_route(name: str, **over: Any) -> Case:
    types = pointers(fp32="logits weight", bf16="bias", i32="id")
    constants = dict(E=128, BLOCK=128, TOP_K=8, PAD_K=8, SIGMOID=False, RENORM=True, PDL=True, **over)
    return Case(name, moe.route_kernel, types, constants, (), dict(num_warps=1, **LAUNCH), everywhere(PDL))


def sort(name: str, kernel: Any, warps: int = 8, **over: Any) -> Case:
    """`over`: what this kernel has beside the experts."""
    types = pointers(i32="id count first sorted tile") | scalars(i32="total max_tiles chunks")
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    constants = {**dict(E=128, PAD_E=128, PDL=True), **over}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return Case(name, kernel, types, constants, (), dict(num_warps=warps, **LAUNCH), everywhere(PDL))


def experts(name: str, first: bool, bx: int, n: int, k: int, archs: tuple[int, ...] = (90, 100, 103, 120)) -> Case:
    types = {**expert_types, "out_ptr": "*fp8e4nv" if first else "*bf16"}
    constants = dict(
        N=n, K=k, TOP_K=8, BW=128, BX=bx, BK=128, STAGES=2, FIRST=first, OAI=False, BIAS=True, FP8=True, PDL=True
    )
    expect = plus({**FP8_MMA, 90: WGMMA8}, PDL)
    return Case(
        name,
        moe.expert_gemm_kernel,
        types,
        constants,
        aligned(types),
        dict(num_warps=8 if bx == 128 else 4, **LAUNCH),
        expect,
        archs,
    )


def expert_tiles(name: str, first: bool, n: int, k: int) -> Case:
    types = pointers(fp32="w_scale x_scale out_scale", i32="sorted tile") | scalars(i32="total max_tiles")
    types |= {"out_ptr": "*fp8e4nv" if first else "*bf16", "w_desc": desc(128, 128), "x_desc": desc(128, 128)}
    return Case(
        name, moe_hopper.expert_tiles_kernel, types, dict(N=n, K=k, STAGES=4, FIRST=first, PDL=True), aligned(types),
        dict(num_warps=8, **LAUNCH), {90: WGMMA8 + TMA + PDL + (CVT if first else ())}, archs=(90,),
    )  # fmt: skip


def expert_bf16(name: str, first: bool, bx: int, n: int, k: int) -> Case:
    types = {**expert_types, "w_ptr": "*bf16", "x_ptr": "*bf16", "out_ptr": "*bf16"}
    constants = dict(
        N=n, K=k, TOP_K=8, BW=64, BX=bx, BK=64, STAGES=4, FIRST=first, OAI=False, BIAS=False, FP8=False, PDL=True
    )
    expect = plus({90: (r"wgmma\.mma_async.*bf16",), 100: (), 103: (), 120: (r"mma\.sync.*bf16",)}, PDL)
    return Case(name, moe.expert_gemm_kernel, types, constants, aligned(types), dict(num_warps=4, **LAUNCH), expect)


def expert_mx(name: str, first: bool, bx: int, archs: tuple[int, ...] = (90, 100, 103, 120), **changes: Any) -> Case:
    types = pointers(bf16="x out bias", i32="sorted tile") | scalars(i32="total") | dict(w_ptr="*i16", scale_ptr="*i16")
    plan = dict(bx=bx, bw=64, parts=1, stages=3, warps=4) | changes
    constants = dict(
        N=5760 if first else 2880, K=2880, TOP_K=4, BW=plan["bw"], BX=bx, PARTS=plan["parts"], STAGES=plan["stages"],
        FIRST=first, OAI=True, BIAS=True, PDL=True,
    )  # fmt: skip
    packed = (r"lop3\.b32", r"mul\.bf16x2", r"cp\.async", *PDL)
    return Case(
        name, moe_mx.expert_mx_kernel, types, constants, aligned(types), dict(num_warps=plan["warps"], **LAUNCH),
        {90: (r"wgmma\.mma_async", *packed), 100: packed, 103: packed, 120: packed}, archs,
    )  # fmt: skip


def w4(name: str, tokens: int, parts: int, cc: int, n: int = 4096, k: int = 4096) -> Case:
    types = {**w4_types, "out_ptr": "*fp32" if parts > 1 else "*bf16"}
    plan = gemm_w4.w4_plan(specs.W4Spec(n, k, parts), tokens, cc)
    constants = dict(
        N=n, K=k, BW=plan["bw"], BX=plan["bx"], PARTS=parts, STAGES=plan["stages"], AHEAD=plan["ahead"], PDL=True
    )
    expect = (r"lop3\.b32", r"sub\.bf16x2", r"cp\.async\.cg", *PDL)
    expect += (r"wgmma\.mma_async", r"bulk\.prefetch\.L2") if cc == 90 else ()
    return Case(
        f"{name}_{cc}", gemm_w4.gemm_w4_kernel, types, constants, aligned(types),
        dict(num_warps=plan["warps"], **LAUNCH), {cc: expect}, (cc,),
    )  # fmt: skip


def widen_w4(name: str, k: int) -> Case:
    kept = {n: t for n, t in w4_types.items() if n in gemm_w4.widen_w4_kernel.arg_names}
    expect = everywhere((r"lop3\.b32", r"sub\.bf16x2"))
    return Case(name, gemm_w4.widen_w4_kernel, kept, dict(K=k), aligned(kept), dict(num_warps=4), expect)


def w8(name: str, bx: int, **over: Any) -> Case:
    constants = {**dict(N=4096, K=4096, BW=64, BX=bx, PARTS=1, STAGES=3, STEP=128, SPAN=128), **over}
    expect = {90: (r"wgmma\.mma_async.*bf16",), 120: (r"mma\.sync.*bf16",)}
    return Case(
        name,
        gemm_w8.gemm_w8_kernel,
        w8_types,
        constants,
        aligned(w8_types),
        dict(num_warps=8 if bx == 128 else 4),
        expect,
    )


def widen_w8(name: str, **over: Any) -> Case:
    kept = {n: t for n, t in w8_types.items() if n in gemm_w8.widen_w8_kernel.arg_names}
    constants = dict(N=960, K=576, ROWS=32, **over)
    return Case(name, gemm_w8.widen_w8_kernel, kept, constants, aligned(kept), dict(num_warps=4))


def skinny(name: str, bx: int, bk: int, stages: int, **over: Any) -> Case:
    types = {**skinny_types, "w_desc": desc(64, bk), "x_desc": desc(bx, bk)}
    shape = dict(N=6144, K=4096, BW=64, BX=bx, BK=bk, SHARE=2048, STAGES=stages)
    constants = {**shape, **dict(ROOM=0, BLOCKS=False, PDL=True, EARLY=True, AHEAD=True)}
    return Case(
        name, gemm_hopper.skinny_gemm_kernel, types, {**constants, **over}, aligned(skinny_types),
        dict(num_warps=4, **LAUNCH), {90: WGMMA8 + TMA + PDL}, archs=(90,),
    )  # fmt: skip


def gate_up(name: str, bw: int, bx: int, bk: int, stages: int, quant: int = 1) -> Case:
    types = {**dual_types, "w_desc": desc(bw, bk), "x_desc": desc(bx, bk)}
    constants = dict(N=28672, K=4096, BW=bw, BX=bx, BK=bk, STAGES=stages, QUANT=quant, PDL=True, EARLY=True, AHEAD=True)
    return Case(
        name, gemm_hopper.gate_up_kernel, types, constants, aligned(dual_types), dict(num_warps=4, **LAUNCH),
        {90: WGMMA8 + TMA + PDL + CVT}, archs=(90,),
    )  # fmt: skip


def tcgen05(name: str, bx: int, dual: bool, **over: Any) -> Case:
    types = {**(dual_types if dual else skinny_types), "w_desc": desc(128, 128), "x_desc": desc(bx, 128)}
    constants = dict(N=28672 if dual else 6144, BX=bx, BK=128, STAGES=4, PDL=True)
    constants |= dict(K=4096, QUANT=1) if dual else dict(SHARE=2048)
    kernel = gemm_blackwell.gate_up_tcgen05_kernel if dual else gemm_blackwell.skinny_tcgen05_kernel
    expect = (r"tcgen05\.mma.*kind::f8f6f4", r"tcgen05\.ld") + TMA + PDL + (CVT if dual else ())
    return Case(
        name,
        kernel,
        types,
        {**constants, **over},
        aligned(dual_types if dual else skinny_types),
        dict(num_warps=4, **LAUNCH),
        {100: expect, 103: expect},
        (100, 103),
    )


def swapped(name: str, bx: int, dual: bool, quant: int, **over: Any) -> Case:
    types = {**swap_types, "out_ptr": "*fp8e4nv" if quant else "*fp32"}
    constants = dict(
        N=28672 if dual else 4096, K=4096, BW=64 if not dual else 128, BX=bx, BK=128, SHARE=4096, MASK=False, STAGES=2,
        DUAL=dual, QUANT=quant, GROUP=False, BLOCKS=False, PDL=True,
    )  # fmt: skip
    # tcgen05 wants 128 rows of weights; with 64 Triton falls back to mma on sm_100
    expect = plus(FP8_MMA, PDL) if dual else {90: WGMMA8 + PDL}
    return Case(
        name,
        gemm_portable.swapped_gemm_kernel,
        types,
        {**constants, **over},
        aligned(types),
        dict(num_warps=4, **LAUNCH),
        expect,
    )


def wide(
    name: str, recipe: int, bn: int, stages: int, warps: int, archs: tuple[int, ...] = (90, 100, 103, 120)
) -> Case:
    constants = dict(N=4096, K=4096, BM=128, BN=bn, BK=128, GROUP_M=8, RECIPE=recipe, STAGES=stages, PDL=True)
    return Case(
        name,
        gemm_portable.gemm_kernel,
        wide_types,
        constants,
        aligned(wide_types),
        dict(num_warps=warps, **LAUNCH),
        FP8_MMA,
        archs,
    )


def silu(name: str, width: int, deferred: bool) -> Case:
    block, warps, options = norm.silu_plan(width, True)
    constants = dict(N=width, BLOCK=block, PIECES=-(-width // block), DEFERRED=deferred, QUANT=1, PDL=True)
    launch = dict(num_warps=warps, **options, **LAUNCH)
    return Case(name, norm.silu_kernel, silu_types, constants, aligned(silu_types), launch, everywhere(PDL, CVT))


CASES = [
    Case("norm", norm.norm_kernel, norm_types, dict(N=4096, BLOCK=4096, PARTS=2, EMBED=False, RESIDUAL=True, DEFERRED=False, BIASED=False, QUANT=1, PDL=True), aligned(norm_types), dict(num_warps=32, **LAUNCH), everywhere(PDL, CVT)),
    Case("norm_deferred", norm.norm_kernel, {**norm_types, "x_ptr": "*bf16"}, dict(N=4096, BLOCK=4096, PARTS=1, EMBED=False, RESIDUAL=True, DEFERRED=True, BIASED=False, QUANT=2, PDL=True), aligned(norm_types), dict(num_warps=4, **LAUNCH), everywhere(PDL, CVT)),
    Case("norm_biased", norm.norm_kernel, {**norm_types, "x_ptr": "*bf16"}, dict(N=2880, BLOCK=4096, PARTS=1, EMBED=False, RESIDUAL=True, DEFERRED=True, BIASED=True, QUANT=1, PDL=True), aligned(norm_types), dict(num_warps=4, **LAUNCH), everywhere(PDL, CVT)),
    Case("norm_groups", norm.norm_kernel, norm_types, dict(N=4096, BLOCK=4096, PARTS=2, EMBED=False, RESIDUAL=True, DEFERRED=False, BIASED=False, QUANT=3, PDL=True), aligned(norm_types), dict(num_warps=32, **LAUNCH), everywhere(PDL, CVT)),
    Case("silu_groups", norm.silu_kernel, silu_types, dict(N=14336, BLOCK=2048, PIECES=1, DEFERRED=False, QUANT=3, PDL=True), aligned(silu_types), dict(num_warps=8, **LAUNCH), everywhere(PDL, CVT)),
    Case("quant_groups", norm.quant_groups_kernel, group_quant_types, dict(N=14336, GROUPS=16, PDL=True), aligned(group_quant_types), dict(num_warps=4, **LAUNCH), everywhere(PDL, CVT)),
    Case("quant", norm.quant_kernel, quant_types, dict(N=4096, BLOCK=4096, QUANT=1, PDL=True), aligned(quant_types), dict(num_warps=8, **LAUNCH), everywhere(PDL, CVT)),
    Case("silu", norm.silu_kernel, silu_types, dict(N=14336, BLOCK=2048, PIECES=1, DEFERRED=True, QUANT=2, PDL=True), aligned(silu_types), dict(num_warps=8, **LAUNCH), everywhere(PDL, CVT)),
    silu("silu_row", 14336, True),
    silu("silu_row_padded", 2880, False),
    silu("silu_row_wide", 28672, True),
    Case("argmax_parts", norm.argmax_parts_kernel, pointers(fp32="x best", i32="index"), dict(N=128256, BLOCK=4096, PARTS=32, PDL=True), ("x_ptr",), dict(num_warps=8, **LAUNCH), everywhere(PDL)),
    Case("argmax_merge", norm.argmax_merge_kernel, pointers(fp32="best", i32="index", i64="out"), dict(PARTS=32, BLOCK=32, PDL=True), (), dict(num_warps=1, **LAUNCH), everywhere(PDL)),
    attn("attn_decode"),
    attn("attn_decode_pairs", PAIRS=True),
    attn("attn_decode_bulk_half", {**attn_types, "k_desc": "tensordesc<fp8e4nv[32, 128]>", "v_desc": "tensordesc<i16[32, 64]>"}, BULK=True, BLOCK=32, SLICES=132, GROUP=16),
    attn("attn_decode_gpt_oss", HQ=64, HKV=8, D=64, WINDOW=128, SINKS=True, LSE=True, PAD=8),
    attn("attn_decode_gpt_oss_bulk", {**attn_types, **oss_bulk}, HQ=64, D=64, SINKS=True, BULK=True, SLICES=132, GROUP=16, PAD=8),
    attn("attn_decode_bulk", {**attn_types, **bulk}, BULK=True, SLICES=64),
    attn_streaming("attn_stream", 4, 128),
    attn_streaming("attn_stream_gpt_oss", 8, 64),
    attn_merge("attn_merge", 8, 128),
    attn_merge("attn_merge_many", 132, 64),
    attn("attn_decode_draft", Q_LEN=4, ROWS=16, PAD=16),
    attn("attn_decode_bf16", {**attn_types, "k_ptr": "*bf16", "v_ptr": "*bf16"}, HALF=False, STAGES=2),
    attn("attn_decode_starts", {**attn_types, "k_ptr": "*bf16", "v_ptr": "*bf16"}, HALF=False, STARTS=True),
    Case("attn_fused", attn_decode.attn_fused_kernel, fused_types, dict(HQ=32, HKV=8, D=128, PAGE=64, PARTS=2, SLICES=17, BLOCK=64, STAGES=2, QUANT=2, DEFERRED=False, BIASED=False, NORMED=False, PAD=4, GROUP=8, CHUNK=8, BULK=False, PAIRS=True, PDL=True, MOST=0, LEAST=1, SEQS=16, DRAFTED=False), aligned(fused_types, "stride_page"), dict(num_warps=4, **LAUNCH), everywhere(PDL, CVT)),
    Case("attn_fused_drafted", attn_decode.attn_fused_kernel, fused_types, dict(HQ=32, HKV=8, D=128, PAGE=64, PARTS=2, SLICES=17, BLOCK=64, STAGES=2, QUANT=2, DEFERRED=False, BIASED=False, NORMED=False, PAD=4, GROUP=8, CHUNK=8, BULK=False, PAIRS=True, PDL=True, MOST=0, LEAST=1, SEQS=16, DRAFTED=True), aligned(fused_types, "stride_page"), dict(num_warps=4, **LAUNCH), everywhere(PDL, CVT)),
    Case("attn_fused_bulk", attn_decode.attn_fused_kernel, {**fused_types, **bulk, "qkv_ptr": "*bf16"}, dict(HQ=32, HKV=8, D=128, PAGE=64, PARTS=1, SLICES=1, BLOCK=64, STAGES=4, QUANT=2, DEFERRED=True, BIASED=False, NORMED=False, PAD=4, GROUP=2, CHUNK=2, BULK=True, PAIRS=True, PDL=True, MOST=0, LEAST=1, SEQS=16, DRAFTED=False), aligned(fused_types, "stride_page"), dict(num_warps=4, **LAUNCH), {90: PDL + CVT + TMA, 100: PDL + CVT + TMA, 103: PDL + CVT + TMA}, archs=(90, 100, 103)),
    Case("attn_fused_wide", attn_decode.attn_fused_kernel, {**fused_types, "qkv_ptr": "*bf16"}, dict(HQ=32, HKV=8, D=128, PAGE=64, PARTS=1, SLICES=1, BLOCK=64, STAGES=4, QUANT=2, DEFERRED=True, BIASED=False, NORMED=False, PAD=4, GROUP=2, CHUNK=2, BULK=False, PAIRS=True, PDL=True, MOST=0, LEAST=1, SEQS=16, DRAFTED=False), aligned(fused_types, "stride_page"), dict(num_warps=1, **LAUNCH), everywhere(PDL, CVT), archs=(90, 100, 103)),
    Case("attn_fused_all", attn_decode.attn_fused_kernel, {**fused_types, "qkv_ptr": "*bf16"}, dict(HQ=32, HKV=8, D=128, PAGE=64, PARTS=1, SLICES=1, BLOCK=64, STAGES=4, QUANT=2, DEFERRED=True, BIASED=True, NORMED=True, PAD=4, GROUP=2, CHUNK=2, BULK=False, PAIRS=True, PDL=True, MOST=0, LEAST=1, SEQS=16, DRAFTED=False), aligned(fused_types, "stride_page"), dict(num_warps=1, **LAUNCH), everywhere(PDL, CVT), archs=(90, 100, 103)),
    Case("attn_fused_bulk_normed", attn_decode.attn_fused_kernel, {**fused_types, **bulk, "qkv_ptr": "*bf16"}, dict(HQ=32, HKV=8, D=128, PAGE=64, PARTS=1, SLICES=1, BLOCK=64, STAGES=4, QUANT=2, DEFERRED=True, BIASED=False, NORMED=True, PAD=4, GROUP=2, CHUNK=2, BULK=True, PAIRS=True, PDL=True, MOST=0, LEAST=1, SEQS=16, DRAFTED=False), aligned(fused_types, "stride_page"), dict(num_warps=1, **LAUNCH), {90: PDL + CVT + TMA, 100: PDL + CVT + TMA, 103: PDL + CVT + TMA}, archs=(90, 100, 103)),
    Case("attn_fused_shared", attn_decode.attn_fused_kernel, {**fused_types, **bulk, "qkv_ptr": "*bf16"}, dict(HQ=32, HKV=8, D=128, PAGE=64, PARTS=1, SLICES=132, BLOCK=32, STAGES=3, QUANT=2, DEFERRED=True, BIASED=False, NORMED=False, PAD=4, GROUP=8, CHUNK=8, BULK=True, PAIRS=True, PDL=True, MOST=64, LEAST=256, SEQS=16, DRAFTED=False), aligned(fused_types, "stride_page"), dict(num_warps=1, **LAUNCH), {90: PDL + CVT + TMA, 100: PDL + CVT + TMA, 103: PDL + CVT + TMA}, archs=(90, 100, 103)),
    Case("attn_fused_shared_drafted", attn_decode.attn_fused_kernel, {**fused_types, **bulk, "qkv_ptr": "*bf16"}, dict(HQ=32, HKV=8, D=128, PAGE=64, PARTS=1, SLICES=132, BLOCK=32, STAGES=3, QUANT=2, DEFERRED=True, BIASED=False, NORMED=False, PAD=4, GROUP=8, CHUNK=8, BULK=True, PAIRS=True, PDL=True, MOST=64, LEAST=256, SEQS=16, DRAFTED=True), aligned(fused_types, "stride_page"), dict(num_warps=1, **LAUNCH), {90: PDL + CVT + TMA, 100: PDL + CVT + TMA, 103: PDL + CVT + TMA}, archs=(90, 100, 103)),
    rope_case("rope_append"),
    rope_case("rope_smooth", SMOOTH=True),
    rope_case("rope_rounded", {**rope_types, "q_ptr": "*fp8e4nv"}, DEFERRED=True, ROUNDED=True),
    rope_case("rope_normed", HKV=4, HEADS=40, DEFERRED=True, NORMED=True),
    rope_case("rope_biased", HQ=64, HEADS=80, D=64, DEFERRED=True, BIASED=True),
    rope_case("rope_all", PARTS=2, DEFERRED=True, BIASED=True, NORMED=True, SMOOTH=True),
    skinny("skinny_8", 8, 256, 5),
    skinny("skinny_32", 32, 256, 8),
    skinny("skinny_group", 8, 256, 7, ROOM=16),
    skinny("skinny_blocks", 8, 256, 8, ROOM=16, BLOCKS=True),
    skinny("skinny_blocks_parts", 64, 256, 6, N=4096, K=14464, SHARE=7296, ROOM=64, BLOCKS=True),
    skinny("skinny_parts", 64, 128, 8, N=5120, K=2880, SHARE=1024),
    gate_up("gate_up_8", 64, 8, 256, 3),
    gate_up("gate_up_128", 64, 128, 128, 3),
    gate_up("gate_up_group", 128, 32, 128, 5, quant=2),
    tcgen05("tcgen05_16", 16, False),
    tcgen05("tcgen05_parts", 16, False, N=5120, SHARE=1024),
    tcgen05("tcgen05_64", 64, False),
    tcgen05("tcgen05_gate_up_16", 16, True),
    tcgen05("tcgen05_gate_up_64", 64, True),
    swapped("swapped_16", 16, False, 0),
    swapped("swapped_group", 16, False, 0, GROUP=True),
    swapped("swapped_blocks", 64, False, 0, GROUP=True, BLOCKS=True, K=4224, SHARE=2176, MASK=True),
    swapped("swapped_parts", 16, False, 0, K=2880, SHARE=1024, MASK=True),
    swapped("swapped_dual", 32, True, 1),
    prefill("attn_prefill"),
    rows("attn_rows", 128, 2),
    rows("attn_rows_parts", 128, 2, parts=True, archs=(90,)),  # on sm_100 and sm_103 it spills 8 bytes
    rows("attn_rows_64", 64, 3),
    prefill("attn_prefill_unpacked", archs=(90,), PACK=1),
    Case("widen", attn_prefill.widen_kernel, pointers(fp8="k v", i32="table len") | {"k_out_ptr": "*fp16", "v_out_ptr": "*fp16"} | scalars(i32="stride_page max_pages max_rows"), dict(HKV=8, D=128, PAGE=64), ("k_ptr", "v_ptr", "k_out_ptr", "v_out_ptr", "stride_page", "max_rows"), dict(num_warps=4)),
    prefill("attn_prefill_64", bm=64, archs=(120,)),
    prefill("attn_prefill_gpt_oss", archs=(90, 100, 103, 120), HQ=64, D=64, PACK=8, WINDOW=128, SINKS=True, LSE=True),
    prefill("attn_prefill_bf16", {**prefill_types, "k_ptr": "*bf16", "v_ptr": "*bf16"}, HALF=False, STAGES=2),
    Case("merge_parts", prefill_parts.merge_parts_kernel, parts_types, dict(HQ=32, D=128, CHUNK=8, SINKS=True, LSE=True), aligned(parts_types), dict(num_warps=1)),
    Case("mla", attn_prefill.mla_kernel, mla_types, dict(HEADS=128, LATENT=512, ROPE=64, PAGE=64, ROWS=16, BLOCK=32, STAGES=2), aligned(mla_types), dict(num_warps=4)),
    *(w4("w4_16", 16, 4, cc) for cc in (90, 100, 103, 120)),
    *(w4("w4_crowded", 16, 1, cc, 28672) for cc in (90, 100, 103, 120)),
    *(w4("w4_32", 32, 2, cc) for cc in (90, 100, 103, 120)),
    *(w4("w4_32_crowded", 32, 1, cc, 28672) for cc in (90, 100, 103, 120)),
    *(w4("w4_64", 64, 4, cc, 4096, 14336) for cc in (90, 100, 103, 120)),
    *(w4("w4_odd", 64, 2, cc, 4160, 2944) for cc in (90, 100, 103, 120)),
    *(w4("w4_256", 255, 1, cc) for cc in (90, 100, 103, 120)),
    widen_w4("widen_w4", 4096),
    widen_w4("widen_w4_odd", 2944),
    w8("w8_16", 16, PARTS=4),
    w8("w8_64", 64),
    w8("w8_128", 128),
    w8("w8_narrow", 16, N=960, K=576),
    w8("w8_group_16", 16, STEP=32, SPAN=1, STAGES=6, PARTS=2),
    w8("w8_group_128", 128, STEP=32, SPAN=1, STAGES=6, N=960, K=576),
    w8("w8_row", 16, SPAN=0),
    widen_w8("widen_w8", STEP=128, SPAN=128),
    widen_w8("widen_w8_group", STEP=32, SPAN=1),
    widen_w8("widen_w8_row", STEP=128, SPAN=0),
    Case("move_pack", move.move_kernel, move_types, dict(PLANES=64, ROW=64, WORDS=16384, BLOCK=8192, MODE=0, SUM=1), aligned(move_types, "stride_plane", "stride_page"), dict(num_warps=16)),
    Case("move_unpack", move.move_kernel, move_types, dict(PLANES=64, ROW=64, WORDS=16384, BLOCK=8192, MODE=1, SUM=2), aligned(move_types, "stride_plane", "stride_page"), dict(num_warps=16)),
    Case("move_pack_part", move.move_kernel, move_types, dict(PLANES=64, ROW=128, WORDS=8192, BLOCK=8192, MODE=0, SUM=1), aligned(move_types, "stride_plane", "stride_page"), dict(num_warps=16)),
    Case("move_convert", move.convert_kernel, convert_types, dict(PLANES=64, ROW=64, WORDS=16384, BLOCK=8192, SUM=True), aligned(convert_types, "stride_plane", "stride_page"), dict(num_warps=16), everywhere(CVT)),
    moe_route("moe_route", BIASED=False),
    moe_route("moe_route_biased", BIASED=True),
    sort("moe_sort", moe_sort.sort_kernel, BX=16, BLOCK=8, warps=1),
    sort("moe_sort_512", moe_sort.sort_kernel, BX=16, BLOCK=512),
    sort("moe_count", moe_sort.count_kernel, CHUNK=128, warps=4),
    sort("moe_scan", moe_sort.scan_kernel, BX=128, ROWS=128),
    sort("moe_place", moe_sort.place_kernel, CHUNK=128, BLOCK=32),
    experts("moe_first", True, 16, 1536, 2048),
    experts("moe_first_128", True, 128, 1536, 2048, (90, 100, 103)),
    experts("moe_first_64", True, 64, 1536, 2048),
    experts("moe_second", False, 16, 2048, 768),
    Case("moe_gather", moe_hopper.gather_kernel, gather_types, dict(K=2048, TOP_K=8, ROWS=8, BX=128, BLOCK=2048, PDL=True), aligned(gather_types), dict(num_warps=4, **LAUNCH), {90: PDL}, archs=(90,)),
    expert_tiles("moe_tiles_first", True, 1536, 2048),
    expert_tiles("moe_tiles_second", False, 2048, 768),
    expert_tiles("moe_tiles_first_maverick", True, 16384, 5120),
    expert_tiles("moe_tiles_second_maverick", False, 5120, 8192),
    expert_bf16("moe_bf16_first", True, 16, 1536, 2048),
    expert_bf16("moe_bf16_first_64", True, 64, 1536, 2048),
    expert_bf16("moe_bf16_second", False, 16, 2048, 768),
    expert_mx("moe_mx_first", True, 16),
    expert_mx("moe_mx_second", False, 16, parts=2),
    expert_mx("moe_mx_first_64", True, 64, bw=128, warps=8),
    expert_mx("moe_mx_first_128", True, 128, (90, 100, 103), bw=128),
    expert_mx("moe_mx_second_128", False, 128, (90, 100, 103), bw=128),
    Case("moe_combine", moe.combine_kernel, pointers(bf16="y out", fp32="weight") | scalars(i32="total"), dict(N=2048, TOP_K=8, PARTS=1, BLOCK=1024, PDL=True), (), dict(num_warps=4, **LAUNCH), everywhere(PDL)),
    Case("sample_peaks", sampling.peaks_kernel, pointers(fp32="x room", i32="top_k"), dict(V=128256, BLOCKS=32, EACH=1, ROOM=9696, PDL=True), ("x_ptr", "room_ptr"), dict(num_warps=8, **LAUNCH), everywhere(PDL)),
    Case("sample_round", sampling.round_kernel, sample_types, sample_shape | dict(ROUND=0, EACH=1), ("x_ptr", "room_ptr"), dict(num_warps=8, **LAUNCH), everywhere(PDL)),
    Case("sample_round_again", sampling.round_kernel, sample_types, sample_shape | dict(ROUND=2, EACH=4), ("x_ptr", "room_ptr"), dict(num_warps=8, **LAUNCH), everywhere(PDL)),
    Case("sample_settle", sampling.settle_kernel, sample_types | pointers(fp32="logprob", i64="token"), sample_shape | dict(PASSES=16), ("x_ptr", "room_ptr"), dict(num_warps=16, **LAUNCH), everywhere(PDL)),
    wide("gemm_row", 1, 128, 3, 8),
    wide("gemm_block128", 2, 128, 3, 8),
]  # fmt: skip
