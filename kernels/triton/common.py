# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""The parts that kernels share.

Programmatic dependent launch, fetches ahead, the rounding to e4m3, the end of a product in parts.

Kernels do not specialize the counts that differ from batch to batch, of rows (num_tokens, M, total) and of pages: one
for 1, one for multiples of 16 and one for the rest would be compiled, some of them in the middle of serving.
"""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# The interpreter knows neither inline assembly nor launch attributes.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
PDL = not triton.knobs.runtime.interpret

ASK = tl.constexpr("""{
.reg .pred first;
.reg .b32 lane;
mov.u32 lane, %tid.x;
setp.eq.u32 first, lane, 0;
@first cp.async.bulk.prefetch.L2.global [$1], $2;
mov.u32 $0, 0;
}""")


@triton.jit
def pdl_start(PDL: tl.constexpr):
    """Let the next kernel of the stream begin its prologue; it still waits before it reads what we write."""
    if PDL:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until everything the previous kernel wrote is visible. Every kernel of a chain must execute it."""
    if PDL:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def ask(ptr, NBYTES: tl.constexpr):
    """Have NBYTES brought to L2. Also right for what another kernel is still writing: it writes to L2."""
    nbytes = tl.full([], NBYTES, tl.int32)
    tl.inline_asm_elementwise(ASK, "=r,l,r", [ptr, nbytes], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def beside(a, b):
    """[n, k] twice to [n, 2k]: no register moves."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def to_e4m3(x):
    """Round to nearest and saturate: the plain cast makes NaN of what lies beyond 448 on some versions."""
    return tl.minimum(tl.maximum(x, -E4M3_MAX), E4M3_MAX).to(tl.float8e4nv)


@triton.jit
def reciprocal(x):
    """1 / x by the approximate unit, within an ulp; 0 beyond 2^126. A division takes eight instructions."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def token_scale(amax):
    """The scale that maps the largest magnitude to 448; the floor keeps an all-zero token finite."""
    return tl.maximum(amax, 1e-6) / E4M3_MAX


def pdl_launch(pdl: bool) -> dict[str, bool]:
    """Launch options; the keyword must be absent where the interpreter runs the kernel."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def store_part(acc, out_ptr, part_ptr, counter_ptr, at, mask, M, N: tl.constexpr, PARTS: tl.constexpr):
    """A tile of the product at `at`, or one of the PARTS of it along k (axis 2 of the grid).

    The last part to arrive adds all in order, and the sum is the same whoever it is.
    """
    if PARTS == 1:
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        stride = tl.cast(M, tl.int64) * N  # M is no tensor where it is 1
        tl.store(part_ptr + tl.program_id(2) * stride + at, acc, mask=mask)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == PARTS - 1:
            total = tl.zeros(acc.shape, tl.float32)
            for i in tl.static_range(PARTS):
                total += tl.load(part_ptr + i * stride + at, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)
            tl.store(counter_ptr + tile, 0)  # ready for the next launch
