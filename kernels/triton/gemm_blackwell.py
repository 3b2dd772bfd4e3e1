# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""The Hopper products' twin for compute capability 10.x.

The same order of loads, with tcgen05 and tensor memory.

128 weight rows are the MMA's M, tokens its N; the accumulator lives in tensor memory. Compiled and checked for its
instructions on every build; it has not run on a Blackwell card, so `kernels.selfcheck` decides there.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)

from kernels.plans import EMPTY, Plan, PlanTable
from kernels.specs import GateUpSpec, GemmSpec
from kernels.triton.common import PDL
from kernels.triton.gemm_hopper import E4M3_MAX, depend_start, depend_wait, descriptor, store_tokens

BW = gl.constexpr(128)  # rows of weights a CTA takes: tcgen05's M


@gluon.jit(do_not_specialize=["M"])
def skinny_tcgen05_kernel(
    w_desc, x_desc, out_ptr, w_scale_ptr, x_scale_ptr, M, N: gl.constexpr, BX: gl.constexpr,
    BK: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[part, M, N] = (x[M, K] * x_scale[M]) @ (w[N, K] * w_scale[N])^T over SHARE columns.

    What lies past K is copied as zeros.
    """
    row = gl.program_id(1) * BW
    token = gl.program_id(0) * BX
    part = gl.program_id(2)
    STEPS: gl.constexpr = SHARE // BK
    NBYTES: gl.constexpr = BW * BK + BX * BK
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BW, BK], w_desc.layout)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BX, BK], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tmem_layout: gl.constexpr = TensorMemoryLayout([BW, BX], col_stride=1)
    acc_tmem = allocate_tensor_memory(gl.float32, [BW, BX], tmem_layout)
    depend_start(PDL)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    first = part * STEPS
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), NBYTES, pred=i < STEPS)
        tma.async_copy_global_to_shared(w_desc, [row, (first + i) * BK], full.index(i), w_smem.index(i), pred=i < STEPS)
    depend_wait(PDL)
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x_desc, [token, (first + i) * BK], full.index(i), x_smem.index(i), pred=i < STEPS
        )
    for step in range(STEPS):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(full.index(slot), phase)
        tcgen05_mma(w_smem.index(slot), x_smem.index(slot).permute((1, 0)), acc_tmem, use_acc=step > 0)
        tcgen05_commit(empty.index(slot))
        ahead = step + STAGES
        more = ahead < STEPS
        mbarrier.wait(empty.index(slot), phase)  # the MMA has read the slot; the other stages are in flight meanwhile
        mbarrier.expect(full.index(slot), NBYTES, pred=more)
        tma.async_copy_global_to_shared(
            w_desc, [row, (first + ahead) * BK], full.index(slot), w_smem.index(slot), pred=more
        )
        tma.async_copy_global_to_shared(
            x_desc, [token, (first + ahead) * BK], full.index(slot), x_smem.index(slot), pred=more
        )
    layout: gl.constexpr = gl.BlockedLayout([1, BX], [32, 1], [num_warps, 1], [1, 0])
    acc = acc_tmem.load(layout)
    rows = row + gl.arange(0, BW, layout=gl.SliceLayout(1, layout))
    tokens = token + gl.arange(0, BX, layout=gl.SliceLayout(0, layout))
    x_scale = gl.load(x_scale_ptr + tokens, mask=tokens < M, other=0.0)
    acc = acc * gl.load(w_scale_ptr + rows)[:, None] * x_scale[None, :]
    out_ptr += part.to(gl.int64) * M * N
    store_tokens(out_ptr, acc.to(out_ptr.dtype.element_ty), row, token, M, N, BW, BX, layout, num_warps)


@gluon.jit(do_not_specialize=["M"])
def gate_up_tcgen05_kernel(
    w_desc, x_desc, out_ptr, w_scale_ptr, x_scale_ptr, out_scale_ptr, M, N: gl.constexpr, K: gl.constexpr,
    BX: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, QUANT: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Rows n and N/2 + n of w are gate and up; out[M, N/2] = quantize(silu(gate) * up).

    QUANT as on Hopper.
    """
    tile = gl.program_id(1)
    row = tile * BW
    token = gl.program_id(0) * BX
    STEPS: gl.constexpr = K // BK
    NBYTES: gl.constexpr = 2 * BW * BK + BX * BK
    g_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BW, BK], w_desc.layout)
    u_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BW, BK], w_desc.layout)
    x_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BX, BK], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tmem_layout: gl.constexpr = TensorMemoryLayout([BW, BX], col_stride=1)
    gate_tmem = allocate_tensor_memory(gl.float32, [BW, BX], tmem_layout)
    up_tmem = allocate_tensor_memory(gl.float32, [BW, BX], tmem_layout)
    depend_start(PDL)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.expect(full.index(i), NBYTES, pred=i < STEPS)
        tma.async_copy_global_to_shared(w_desc, [row, i * BK], full.index(i), g_smem.index(i), pred=i < STEPS)
        tma.async_copy_global_to_shared(w_desc, [row + N // 2, i * BK], full.index(i), u_smem.index(i), pred=i < STEPS)
    depend_wait(PDL)
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x_desc, [token, i * BK], full.index(i), x_smem.index(i), pred=i < STEPS)
    for step in range(STEPS):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(full.index(slot), phase)
        tcgen05_mma(g_smem.index(slot), x_smem.index(slot).permute((1, 0)), gate_tmem, use_acc=step > 0)
        tcgen05_mma(u_smem.index(slot), x_smem.index(slot).permute((1, 0)), up_tmem, use_acc=step > 0)
        tcgen05_commit(empty.index(slot))
        ahead = step + STAGES
        more = ahead < STEPS
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full.index(slot), NBYTES, pred=more)
        tma.async_copy_global_to_shared(w_desc, [row, ahead * BK], full.index(slot), g_smem.index(slot), pred=more)
        tma.async_copy_global_to_shared(
            w_desc, [row + N // 2, ahead * BK], full.index(slot), u_smem.index(slot), pred=more
        )
        tma.async_copy_global_to_shared(x_desc, [token, ahead * BK], full.index(slot), x_smem.index(slot), pred=more)
    layout: gl.constexpr = gl.BlockedLayout([1, BX], [32, 1], [num_warps, 1], [1, 0])
    rows = row + gl.arange(0, BW, layout=gl.SliceLayout(1, layout))
    tokens = token + gl.arange(0, BX, layout=gl.SliceLayout(0, layout))
    x_scale = gl.load(x_scale_ptr + tokens, mask=tokens < M, other=0.0)
    gate = gate_tmem.load(layout) * gl.load(w_scale_ptr + rows)[:, None] * x_scale[None, :]
    up = up_tmem.load(layout) * gl.load(w_scale_ptr + rows + N // 2)[:, None] * x_scale[None, :]
    y = gate / (1.0 + gl.exp(-gate)) * up
    if QUANT == 1:
        y = y / gl.load(out_scale_ptr)
    elif QUANT == 2:
        group_scale = gl.maximum(gl.max(gl.abs(y), 0), 1e-6) / E4M3_MAX
        gl.store(out_scale_ptr + tile * M + tokens, group_scale, mask=tokens < M)
        y = y / group_scale[None, :]
    if QUANT > 0:
        y = gl.minimum(gl.maximum(y, -E4M3_MAX), E4M3_MAX)
    store_tokens(out_ptr, y.to(out_ptr.dtype.element_ty), row, token, M, N // 2, BW, BX, layout, num_warps)


def gemm_fp8(
    spec: GemmSpec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor,
    *, plans: PlanTable = EMPTY, pdl: bool = PDL,
) -> None:  # fmt: skip
    tokens = a.shape[0]
    plan = plans.pick(tokens, tcgen05_plan(tokens))
    skinny_tcgen05_kernel[(triton.cdiv(tokens, plan["bx"]), spec.n // BW.value, spec.parts)](
        descriptor(w, BW.value, plan["bk"]), descriptor(a, plan["bx"], plan["bk"]), out, w_scale, a_scale, tokens,
        N=spec.n, BX=plan["bx"], BK=plan["bk"], SHARE=spec.share, STAGES=plan["stages"], PDL=pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip


def gemm_gate_up(
    spec: GateUpSpec, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor, out_scale: Tensor,
    *, plans: PlanTable = EMPTY, pdl: bool = PDL,
) -> None:  # fmt: skip
    tokens = a.shape[0]
    plan = plans.pick(tokens, tcgen05_plan(tokens, dual=True))
    gate_up_tcgen05_kernel[(triton.cdiv(tokens, plan["bx"]), spec.n // 2 // BW.value)](
        descriptor(w, BW.value, plan["bk"]), descriptor(a, plan["bx"], plan["bk"]), out, w_scale, a_scale, out_scale,
        tokens,
        N=spec.n, K=spec.k, BX=plan["bx"], BK=plan["bk"], STAGES=plan["stages"],
        QUANT={"none": 0, "tensor": 1, "group": 2}[spec.quant], PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def tcgen05_plan(tokens: int, dual: bool = False) -> Plan:
    bx = min(128, max(16, triton.next_power_of_2(tokens)))
    stage_nbytes = (BW.value * (2 if dual else 1) + bx) * 128
    return dict(bx=bx, bk=128, stages=min(8, (200 << 10) // stage_nbytes))
