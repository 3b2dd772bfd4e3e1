# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""FlashInfer's kernels behind the library's signatures. Imported only when one of them is chosen.

Calls were checked against the signatures of 0.6.13 (tests/kernels/test_flashinfer.py).
"""

from itertools import accumulate

import flashinfer
import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import trtllm_batch_context_with_kv_cache
from torch import Tensor

from kernels.specs import AttnSpec, NormSpec, QuantSpec
from kernels.triton.norm import quant_fp8

CACHE_DTYPE = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}
SCRATCH_NBYTES = 128 << 20  # what FlashInfer's documentation recommends for its float workspace


def attn_decode(
    spec: AttnSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor,
    workspace: Tensor, *, sm_scale: float, k_scale: float = 1.0, v_scale: float = 1.0, sinks: Tensor | None = None,
    lse: Tensor | None = None, max_len: int = 0,
) -> None:  # fmt: skip
    """xqa on compute capability 9.0 and 12.0, trtllm-gen on 10.x; the workspace must start as zeros."""
    trtllm_batch_decode_with_kv_cache(
        query=q, kv_cache=(k_cache, v_cache), workspace_buffer=workspace, block_tables=block_table, seq_lens=seq_lens,
        max_seq_len=max_len or block_table.shape[1] * spec.page, bmm1_scale=sm_scale * k_scale, bmm2_scale=v_scale,
        out=out,
        kv_layout="HND", window_left=spec.window - 1 if spec.window else -1, sinks=sinks,
    )  # fmt: skip


def attn_prefill(
    spec: AttnSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    q_starts: Tensor,
    kv_starts: Tensor, out: Tensor, workspace: Tensor, *, max_q: int, max_kv: int, sm_scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0, sinks: Tensor | None = None, lse: Tensor | None = None, prepared: None = None,
) -> None:  # fmt: skip
    """trtllm-gen; the workspace must start as zeros."""
    trtllm_batch_context_with_kv_cache(
        query=q, kv_cache=(k_cache, v_cache), workspace_buffer=workspace, block_tables=block_table, seq_lens=seq_lens,
        max_q_len=max_q, max_kv_len=max_kv, bmm1_scale=sm_scale * k_scale, bmm2_scale=v_scale,
        batch_size=seq_lens.shape[0],
        cum_seq_lens_q=q_starts, cum_seq_lens_kv=kv_starts, window_left=spec.window - 1 if spec.window else -1, out=out,
        kv_layout="HND", sinks=sinks,
    )  # fmt: skip


class Fa3Plans:
    """FlashInfer's fa3 wrapper for one spec and one stream: called for some rows, it hands the kernel its schedule.

    Making one builds the kernel where no prebuilt module is found: a minute and a half on 16 cores.
    """

    def __init__(self, spec: AttnSpec):
        self.spec = spec
        self.copied: torch.cuda.Event | None = None
        scratch = torch.empty(SCRATCH_NBYTES, dtype=torch.uint8, device="cuda")
        self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "HND", backend="fa3")
        self.one = torch.ones(1, device="cuda")
        self(torch.zeros(1, 1, dtype=torch.int32, device="cuda"), [1], [1])  # so that the first batch finds it built

    def __call__(self, block_table: Tensor, new: list[int], total: list[int]) -> "Fa3Plans":
        """new, total: tokens by sequence. Waits for the copy of the last plan, whose pinned buffer it reuses."""
        if self.copied is not None:
            self.copied.synchronize()
        spec = self.spec
        counts = [-(-n // spec.page) for n in total]
        self.wrapper.plan(
            starts(new), starts(counts), torch.cat([block_table[b, :n] for b, n in enumerate(counts)]),
            torch.tensor([(n - 1) % spec.page + 1 for n in total], dtype=torch.int32), spec.q_heads, spec.kv_heads,
            spec.head_dim, spec.page, causal=True, sm_scale=1.0, window_left=spec.window - 1 if spec.window else -1,
            q_data_type=CACHE_DTYPE[spec.kv], kv_data_type=CACHE_DTYPE[spec.kv], o_data_type=torch.bfloat16,
        )  # fmt: skip
        self.copied = torch.cuda.Event()
        self.copied.record()
        return self


def starts(counts: list[int]) -> Tensor:
    """Running totals from zero on, on the host."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def attn_prefill_fa3(
    spec: AttnSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    q_starts: Tensor, kv_starts: Tensor, out: Tensor, workspace: Tensor, *, max_q: int, max_kv: int, sm_scale: float,
    k_scale: float = 1.0, v_scale: float = 1.0, sinks: Tensor | None = None, lse: Tensor | None = None,
    prepared: Fa3Plans | None = None,
) -> None:  # fmt: skip
    """fa3 with queries of the cache's type. For an e4m3 cache others are rounded into the workspace with scale 1: e4m3
    holds magnitudes of 2^-9 to 448, and queries beyond saturate.

    Raises ValueError without a plan of this batch, and when the workspace is smaller than the queries (one byte each).
    """
    if prepared is None:
        raise ValueError("fa3 needs prepared=registry.preparer('attn_prefill', spec)(block_table, new, total)")
    if spec.kv == "e4m3" and q.dtype != torch.float8_e4m3fn:
        if workspace.numel() < q.numel():
            raise ValueError(f"workspace of {workspace.numel()} bytes is smaller than {q.numel()} e4m3 queries")
        rounded = workspace[: q.numel()].view(torch.float8_e4m3fn).view_as(q)
        width = spec.q_heads * spec.head_dim
        quant_fp8(QuantSpec(width, "tensor"), q.view(-1, width), rounded.view(-1, width), prepared.one)
        q = rounded
    if spec.kv == "e4m3":
        prepared.wrapper.run(q, (k_cache, v_cache), sm_scale, k_scale, v_scale, out=out)
    else:
        prepared.wrapper.run(q, (k_cache, v_cache), q_scale=sm_scale, k_scale=k_scale, v_scale=v_scale, out=out)


def add_rmsnorm_quant(
    spec: NormSpec, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, scale: Tensor,
    *, ids: Tensor | None = None, token_scale: Tensor | None = None, channel_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Static per-tensor scale only; the residual is updated in place."""
    flashinfer.fused_add_rmsnorm_quant(out, x.view_as(residual), residual, weight, scale[:1], eps)
