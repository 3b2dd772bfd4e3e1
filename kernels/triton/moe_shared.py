# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportReturnType=false
# pyright: reportAssignmentType=false
"""What the products of experts share, however their weights are stored."""

import triton
import triton.language as tl
from torch import Tensor

Weights = tuple[Tensor, Tensor, Tensor | None]  # values, scales, bias


@triton.jit
def load_bias(at, inside):
    """A bias per row of weights, as a column beside the tokens."""
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)[:, None]


@triton.jit
def activate(gate, up, OAI: tl.constexpr):
    """SiLU, or gpt-oss's clamped form."""
    if OAI:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        y = up * gate / (1.0 + tl.exp(-1.702 * gate))
    else:
        y = gate / (1.0 + tl.exp(-gate)) * up
    return y
