# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""Skinny FP8 GEMM for Hopper in Gluon.

Weights are the MMA's M side, on their way before the dependency wait.

A decode GEMM is a read of its weights. Weights do not depend on the previous kernel, so a programmatic dependent launch
lets their first stages be fetched while that kernel still runs: 0.28 ms of a 2.1 ms step on H200
(docs/design/kernels.md).
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.plans import EMPTY, Plan, PlanTable
from kernels.specs import GateUpSpec, GemmSpec
from kernels.triton.common import PDL

E4M3_MAX = gl.constexpr(448.0)
cta_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed between Triton 3.6 and 3.7


@gluon.jit
def depend_start(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def depend_wait(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def warm_descriptor(x_desc, x_smem, token, K: gl.constexpr, BX: gl.constexpr, BK: gl.constexpr):
    """Load a box that lies outside of x.

    Nothing is read, but the descriptor is at hand once the wait is over. It took 12 us off a decode step of one token
    (H200).
    """
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=1)
    mbarrier.expect(done, BX * BK)
    tma.async_copy_global_to_shared(x_desc, [token, K], done, x_smem)
    mbarrier.wait(done, 0)


@gluon.jit
def load_block_scales(
    w_scale_ptr, row, first, K: gl.constexpr, SHARE: gl.constexpr, ROOM: gl.constexpr, layout: gl.constexpr
):
    """Load the scales of blocks.

    Those of the blocks beside a tile of weights, [ROOM], from column `first` on, a part's share of them.
    """
    group = gl.arange(0, ROOM, layout=gl.SliceLayout(1, layout))
    within = (group < SHARE // 128) & (first // 128 + group < K // 128)
    return gl.load(w_scale_ptr + row // 128 * (K // 128) + first // 128 + group, mask=within, other=0.0)


@gluon.jit
def keep_scales(
    x_scale_ptr, w_scale, token, first, M, K: gl.constexpr, SHARE: gl.constexpr, BX: gl.constexpr, ROOM: gl.constexpr,
    BLOCKS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The scales of a tile of tokens, [ROOM, BX], times those of the blocks.

    All at once into shared memory, since each step would wait for its own. A last step may take columns of the next
    part, which count for nothing here.
    """
    group = gl.arange(0, ROOM, layout=gl.SliceLayout(1, layout))
    within = (group < SHARE // 128) & (first // 128 + group < K // 128)
    column = token + gl.arange(0, BX, layout=gl.SliceLayout(0, layout))
    at = x_scale_ptr + (first // 128 + group)[:, None] * M + column[None, :]
    scales = gl.load(at, mask=within[:, None] & (column < M)[None, :], other=0.0)
    if BLOCKS:
        scales = scales * w_scale[:, None]
    table = gl.allocate_shared_memory(gl.float32, [ROOM, BX], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), scales)
    cta_barrier()
    return table._reinterpret(gl.float32, [ROOM, BX], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def store_tokens(
    out_ptr, value, row, token, M, stride,
    BW: gl.constexpr, BX: gl.constexpr, layout: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Write a [weight rows, tokens] tile to [tokens, stride].

    Wide tiles in a layout that writes 16 bytes a thread.
    """
    if BX > 32:
        flat: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
    else:
        flat: gl.constexpr = layout
    value = gl.convert_layout(value, flat)
    rows = row + gl.arange(0, BW, layout=gl.SliceLayout(1, flat))
    tokens = token + gl.arange(0, BX, layout=gl.SliceLayout(0, flat))
    gl.store(out_ptr + tokens[None, :].to(gl.int64) * stride + rows[:, None], value, mask=(tokens < M)[None, :])


@gluon.jit(do_not_specialize=["M"])
def skinny_gemm_kernel(
    w_desc, x_desc, out_ptr, w_scale_ptr, x_scale_ptr, M, N: gl.constexpr, K: gl.constexpr, BW: gl.constexpr,
    BX: gl.constexpr, BK: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr, ROOM: gl.constexpr,
    BLOCKS: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[part, M, N] = (x[M, K] * x_scale) @ (w[N, K] * w_scale)^T over SHARE columns.

    What lies past K is copied as zeros.

    ROOM 0: x_scale is [M]. Else [K / 128, M], one scale per token and 128 columns, of which a step takes two (BK is
    256), and ROOM, a power of two, is no less than what all steps take; BLOCKS: w_scale is [N / 128, K / 128] then,
    otherwise [N]. EARLY and AHEAD switch the two uses of the dependent launch off for comparison.
    """
    x_tile = gl.program_id(0)  # fastest, so that the token tiles of one weight tile share its read
    w_tile = gl.program_id(1)
    part = gl.program_id(2)
    STEPS: gl.constexpr = (SHARE + BK - 1) // BK
    NBYTES: gl.constexpr = BW * BK + BX * BK
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BX, 32])
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BW, BK], w_desc.layout)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BX, BK], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    depend_start(PDL and EARLY)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    depend_wait(PDL and not AHEAD)
    first = part * SHARE
    row = w_tile * BW
    token = x_tile * BX
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), NBYTES, pred=i < STEPS)
        tma.async_copy_global_to_shared(w_desc, [row, first + i * BK], full.index(i), w_smem.index(i), pred=i < STEPS)
    rows = row + gl.arange(0, BW, layout=gl.SliceLayout(1, layout))
    tokens = token + gl.arange(0, BX, layout=gl.SliceLayout(0, layout))
    flat: gl.constexpr = gl.BlockedLayout([1, 1], [32 // min(BX, 32), min(BX, 32)], [num_warps, 1], [1, 0])
    if BLOCKS:
        w_scale = load_block_scales(w_scale_ptr, row, first, K, SHARE, ROOM, flat)
    else:
        w_scale = gl.load(w_scale_ptr + rows)
    if PDL and AHEAD:
        warm_descriptor(x_desc, x_smem.index(0), token, K, BX, BK)
    depend_wait(PDL and AHEAD)
    depend_start(PDL and not EARLY)
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x_desc, [token, first + i * BK], full.index(i), x_smem.index(i), pred=i < STEPS)
    if ROOM:
        kept = keep_scales(x_scale_ptr, w_scale, token, first, M, K, SHARE, BX, ROOM, BLOCKS, flat)
    else:
        x_scale = gl.load(x_scale_ptr + tokens, mask=tokens < M, other=0.0)  # on its way during the loop
    acc = gl.zeros([BW, BX], gl.float32, layout)
    for step in range(STEPS):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        if ROOM:
            zero = gl.zeros([BW, BX], gl.float32, layout)
            w_low, w_high = w_smem.index(slot).slice(0, 128, dim=1), w_smem.index(slot).slice(128, 128, dim=1)
            x_low, x_high = x_smem.index(slot).slice(0, 128, dim=1), x_smem.index(slot).slice(128, 128, dim=1)
            low = warpgroup_mma(w_low, x_low.permute((1, 0)), zero, use_acc=False, is_async=True)
            high = warpgroup_mma(w_high, x_high.permute((1, 0)), zero, use_acc=False, is_async=True)
            low_scale = kept.index(2 * step).load(gl.SliceLayout(0, layout))
            high_scale = kept.index(2 * step + 1).load(gl.SliceLayout(0, layout))
            low, high = warpgroup_mma_wait(0, deps=[low, high])
            acc += low * low_scale[None, :] + high * high_scale[None, :]
        else:
            acc = warpgroup_mma(w_smem.index(slot), x_smem.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
        ahead = step + STAGES
        more = ahead < STEPS
        cta_barrier()  # every warp is done with the slot
        mbarrier.expect(full.index(slot), NBYTES, pred=more)
        tma.async_copy_global_to_shared(
            w_desc, [row, first + ahead * BK], full.index(slot), w_smem.index(slot), pred=more
        )
        tma.async_copy_global_to_shared(
            x_desc, [token, first + ahead * BK], full.index(slot), x_smem.index(slot), pred=more
        )
    if not BLOCKS:
        acc = acc * w_scale[:, None]
    if not ROOM:
        acc = acc * x_scale[None, :]
    out_ptr += part.to(gl.int64) * M * N
    store_tokens(out_ptr, acc.to(out_ptr.dtype.element_ty), row, token, M, N, BW, BX, layout, num_warps)


@gluon.jit(do_not_specialize=["M"])
def gate_up_kernel(
    w_desc, x_desc, out_ptr, w_scale_ptr, x_scale_ptr, out_scale_ptr, M, N: gl.constexpr, K: gl.constexpr,
    BW: gl.constexpr, BX: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, QUANT: gl.constexpr,
    PDL: gl.constexpr, EARLY: gl.constexpr, AHEAD: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Rows n and N/2 + n of w are gate and up; out[M, N/2] = quantize(silu(gate) * up).

    QUANT 0: bf16; 1: by the scale at out_scale_ptr; 2: one scale per token and BW columns,
    written to out_scale [N/2/BW, M].
    """
    x_tile = gl.program_id(0)
    w_tile = gl.program_id(1)
    STEPS: gl.constexpr = K // BK
    NBYTES: gl.constexpr = 2 * BW * BK + BX * BK
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BX, 32])
    g_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BW, BK], w_desc.layout)
    u_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BW, BK], w_desc.layout)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BX, BK], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    depend_start(PDL and EARLY)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    depend_wait(PDL and not AHEAD)
    row = w_tile * BW
    up_row = row + N // 2
    token = x_tile * BX
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), NBYTES, pred=i < STEPS)
        tma.async_copy_global_to_shared(w_desc, [row, i * BK], full.index(i), g_smem.index(i), pred=i < STEPS)
        tma.async_copy_global_to_shared(w_desc, [up_row, i * BK], full.index(i), u_smem.index(i), pred=i < STEPS)
    rows = row + gl.arange(0, BW, layout=gl.SliceLayout(1, layout))
    tokens = token + gl.arange(0, BX, layout=gl.SliceLayout(0, layout))
    g_scale = gl.load(w_scale_ptr + rows)
    u_scale = gl.load(w_scale_ptr + rows + N // 2)
    if PDL and AHEAD:
        warm_descriptor(x_desc, x_smem.index(0), token, K, BX, BK)
    depend_wait(PDL and AHEAD)
    depend_start(PDL and not EARLY)
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x_desc, [token, i * BK], full.index(i), x_smem.index(i), pred=i < STEPS)
    x_scale = gl.load(x_scale_ptr + tokens, mask=tokens < M, other=0.0)  # on its way during the loop
    if QUANT == 1:
        out_scale = gl.load(out_scale_ptr)
    gate = gl.zeros([BW, BX], gl.float32, layout)
    up = gl.zeros([BW, BX], gl.float32, layout)
    for step in range(STEPS):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        gate = warpgroup_mma(g_smem.index(slot), x_smem.index(slot).permute((1, 0)), gate, is_async=True)
        up = warpgroup_mma(u_smem.index(slot), x_smem.index(slot).permute((1, 0)), up, is_async=True)
        gate, up = warpgroup_mma_wait(0, deps=[gate, up])
        ahead = step + STAGES
        more = ahead < STEPS
        cta_barrier()
        mbarrier.expect(full.index(slot), NBYTES, pred=more)
        tma.async_copy_global_to_shared(w_desc, [row, ahead * BK], full.index(slot), g_smem.index(slot), pred=more)
        tma.async_copy_global_to_shared(w_desc, [up_row, ahead * BK], full.index(slot), u_smem.index(slot), pred=more)
        tma.async_copy_global_to_shared(x_desc, [token, ahead * BK], full.index(slot), x_smem.index(slot), pred=more)
    gate = gate * g_scale[:, None] * x_scale[None, :]
    up = up * u_scale[:, None] * x_scale[None, :]
    y = gate / (1.0 + gl.exp(-gate)) * up
    if QUANT == 1:
        y = y / out_scale
    elif QUANT == 2:
        group_scale = gl.maximum(gl.max(gl.abs(y), 0), 1e-6) / E4M3_MAX
        gl.store(out_scale_ptr + w_tile * M + tokens, group_scale, mask=tokens < M)
        y = y / group_scale[None, :]
    if QUANT > 0:
        y = gl.minimum(gl.maximum(y, -E4M3_MAX), E4M3_MAX)
    store_tokens(out_ptr, y.to(out_ptr.dtype.element_ty), row, token, M, N // 2, BW, BX, layout, num_warps)


def smem_layout(width: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, width), element_bitwidth=8, rank=2)


def descriptor(tensor: Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, [rows, cols], smem_layout(cols))


def gemm_fp8(
    spec: GemmSpec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor,
    *, plans: PlanTable = EMPTY, pdl: bool = PDL, early: bool = True, ahead: bool = True,
) -> None:  # fmt: skip
    tokens = a.shape[0]
    is_crowded = spec.n // 64 * spec.parts > plans.sm_count
    if spec.recipe == "row":
        plan = fit(plans.pick(tokens, default_plan(tokens, is_crowded=is_crowded)), spec.share)
    else:
        plan = {**plans.pick(tokens, grouped_plan(tokens, spec, is_crowded)), "bk": 256}
    launch_skinny(spec, plan, a, w, a_scale, w_scale, out, pdl, early, ahead)


def launch_skinny(
    spec: GemmSpec, plan: Plan, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor,
    pdl: bool, early: bool, ahead: bool,
) -> None:  # fmt: skip
    tokens, bw, bx, bk = a.shape[0], plan["bw"], plan["bx"], plan["bk"]
    room = 0 if spec.recipe == "row" else scale_room(spec)
    skinny_gemm_kernel[(triton.cdiv(tokens, bx), spec.n // bw, spec.parts)](
        descriptor(w, bw, bk), descriptor(a, bx, bk), out, w_scale, a_scale, tokens, N=spec.n, K=spec.k, BW=bw, BX=bx,
        BK=bk, SHARE=spec.share, STAGES=plan["stages"], ROOM=room, BLOCKS=spec.recipe == "block128", PDL=pdl,
        EARLY=early, AHEAD=ahead, num_warps=plan.get("warps", 4), launch_pdl=pdl,
    )  # fmt: skip


def gemm_gate_up(
    spec: GateUpSpec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor, out_scale: Tensor,
    *, plans: PlanTable = EMPTY, pdl: bool = PDL, early: bool = True, ahead: bool = True,
) -> None:  # fmt: skip
    tokens = a.shape[0]
    is_crowded = spec.n // 128 > plans.sm_count
    plan = fit(plans.pick(tokens, default_plan(tokens, dual=True, is_crowded=is_crowded)), spec.k)
    bw, bx, bk = plan["bw"], plan["bx"], plan["bk"]
    gate_up_kernel[(triton.cdiv(tokens, bx), spec.n // 2 // bw)](
        descriptor(w, bw, bk), descriptor(a, bx, bk), out, w_scale, a_scale, out_scale, tokens, N=spec.n, K=spec.k,
        BW=bw, BX=bx, BK=bk, STAGES=plan["stages"], QUANT={"none": 0, "tensor": 1, "group": 2}[spec.quant], PDL=pdl,
        EARLY=early, AHEAD=ahead, num_warps=plan.get("warps", 4), launch_pdl=pdl,
    )  # fmt: skip


def default_plan(tokens: int, dual: bool = False, is_crowded: bool = False) -> Plan:
    """Tiles that fit in 227 KiB for any shape.

    The shipped table has better ones for the shapes that were measured.

    `is_crowded`: there are more CTAs than multiprocessors, which then have room for two: 5120 x 2880 in two parts takes
    8.3 us for 64 tokens with six stages of 16 KiB, and 12.3 with eight (with rope); 24576 x 4096 with SiLU takes off
    3 % of Qwen3-8B's step of one token, and 4 % of that of 64 (H200).
    """
    bx = min(128, max(8, triton.next_power_of_2(tokens)))
    bk = 256 if bx <= (8 if dual else 32) else 128
    stage_nbytes = (64 * (2 if dual else 1) + bx) * bk
    return dict(bw=64, bx=bx, bk=bk, stages=min(8, ((104 if is_crowded else 200) << 10) // stage_nbytes))


def fit(plan: Plan, share: int) -> Plan:
    """Shrink the step along K until it divides the columns of a part.

    Stages beyond the steps would hold shared memory that other CTAs can use.
    """
    bk = plan["bk"]
    while share % bk:
        bk //= 2
    return {**plan, "bk": bk, "stages": min(plan["stages"], share // bk)}


def grouped_plan(tokens: int, spec: GemmSpec, is_crowded: bool) -> Plan:
    """For scales that differ along K: a step takes 256 columns, and stages the room that the scales leave.

    Two CTAs of 110 KiB share a multiprocessor.
    """
    bx = min(64, max(8, triton.next_power_of_2(tokens)))
    room_nbytes = ((110 if is_crowded else 200) << 10) - scale_room(spec) * bx * 4
    stages = min(8, max(2, room_nbytes // ((64 + bx) * 256)), triton.cdiv(spec.share, 256))
    return dict(bw=64, bx=bx, bk=256, stages=stages)


def scale_room(spec: GemmSpec) -> int:
    """Groups of 128 columns of a part, two for each step, to the next power of two."""
    return triton.next_power_of_2(triton.cdiv(spec.share, 256) * 2)
