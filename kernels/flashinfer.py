# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""FlashInfer's kernels behind the library's signatures. Imported only when one of them is chosen.

Calls were checked against the signatures of 0.6.13 (tests/kernels/test_flashinfer.py).
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import flashinfer
import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import (
    get_batch_prefill_module,
    get_trtllm_gen_fmha_module,
    trtllm_batch_context_with_kv_cache,
)
from flashinfer.utils import MaskMode, PosEncodingMode, TensorLayout
from torch import Tensor

from kernels.fa3_plan import works
from kernels.specs import AttnSpec, NormSpec, QuantSpec
from kernels.triton.norm import quant_fp8

CACHE_DTYPE = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}
_MAX_KEPT = 64  # plans, of 2048 rows of 32 heads 16 KiB each


def attn_decode(
    spec: AttnSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor,
    workspace: Tensor, *, sm_scale: float, k_scale: float = 1.0, v_scale: float = 1.0, sinks: Tensor | None = None,
    lse: Tensor | None = None, max_len: int = 0, starts: Tensor | None = None,
) -> None:  # fmt: skip
    """xqa on compute capability 9.0 and 12.0, trtllm-gen on 10.x; the workspace must start as zeros.

    Raises ValueError for `starts`: neither leaves out the first keys of a row.
    """
    if starts is not None:
        raise ValueError("FlashInfer's decode attention reads a row's keys from the first on: `starts` must be None")
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


def prefill_module(spec: AttnSpec) -> Any:
    """Return FlashInfer's module for `attn_prefill`."""
    return get_trtllm_gen_fmha_module()


def fa3_module(spec: AttnSpec) -> Any:
    """Builds the kernel where no prebuilt module is found: a minute and a half on 16 cores."""
    cache, out = CACHE_DTYPE[spec.kv], torch.bfloat16
    return get_batch_prefill_module(
        "fa3", cache, cache, out, torch.int32, spec.head_dim, spec.head_dim, PosEncodingMode.NONE.value,
        spec.window > 0, False, False,
    )  # fmt: skip


class Fa3Plans:
    """Plans for one spec and one stream, by `kernels.fa3_plan`.

    Those of lone sequences, as a long prompt's chunks are, may come again, and are kept.
    """

    def __init__(self, spec: AttnSpec):
        self.spec = spec
        self.one = torch.ones(1, device="cuda")
        num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
        self.run, self._plan = fa3_module(spec).paged_run, partial(planned, spec, num_sms)
        self._kept = lru_cache(_MAX_KEPT)(self._plan)

    def __call__(self, block_table: Tensor, new: list[int], total: list[int]) -> "Fa3Plan":
        """new, total: tokens by sequence."""
        plan = self._kept if len(new) == 1 else self._plan
        width = block_table.shape[1] if len(new) > 1 else 0
        numbers, begins = plan(tuple(new), tuple(total), width)
        return Fa3Plan(self, numbers, begins, block_table.view(-1))


def planned(
    spec: AttnSpec, num_sms: int, new: tuple[int, ...], total: tuple[int, ...], width: int
) -> tuple[Tensor, list[int]]:
    """Works.packed of these, on the device."""
    numbers, begins = works(spec, new, total, width, num_sms).packed()
    return torch.from_numpy(numbers).pin_memory().to("cuda", non_blocking=True), begins


@dataclass(frozen=True)
class Fa3Plan:
    """A batch's: `numbers` on the device, in which columns begin at `begins`; `pages` of all sequences."""

    plans: Fa3Plans
    numbers: Tensor
    begins: list[int]
    pages: Tensor

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, sm_scale: float, k_scale: float, v_scale: float
    ) -> None:
        window, numbers, is_e4m3 = self.plans.spec.window, self.numbers, q.dtype == torch.float8_e4m3fn
        self.plans.run(
            float_workspace_buffer=numbers, int_workspace_buffer=numbers, plan_info_vec=self.begins, q=q,
            paged_k_cache=k_cache, paged_v_cache=v_cache, paged_kv_indices=self.pages, o=out, maybe_lse=None,
            # What fa3 has from the plan:
            qo_indptr=numbers, paged_kv_indptr=numbers, paged_kv_last_page_len=numbers,
            mask_mode=MaskMode.CAUSAL.value, layout=TensorLayout.HND.value, window_left=window - 1 if window else -1,
            enable_pdl=True, maybe_custom_mask=None, maybe_mask_indptr=None, maybe_alibi_slopes=None,
            maybe_prefix_len_ptr=None, maybe_token_pos_in_items_ptr=None, maybe_max_item_len_ptr=None,
            logits_soft_cap=0.0, sm_scale=1.0 if is_e4m3 else sm_scale * k_scale,
            scale_q=sm_scale if is_e4m3 else None, scale_k=k_scale if is_e4m3 else None, scale_v=v_scale,
            rope_scale=1.0, rope_theta=1e4, token_pos_in_items_len=0, workspace_size=0,
        )  # fmt: skip


def attn_prefill_fa3(
    spec: AttnSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    q_starts: Tensor, kv_starts: Tensor, out: Tensor, workspace: Tensor, *, max_q: int, max_kv: int, sm_scale: float,
    k_scale: float = 1.0, v_scale: float = 1.0, sinks: Tensor | None = None, lse: Tensor | None = None,
    prepared: Fa3Plan | None = None,
) -> None:  # fmt: skip
    """fa3 with queries of the cache's type.

    For an e4m3 cache others are rounded into the workspace with scale 1: e4m3 holds magnitudes of 2^-9 to 448, and
    queries beyond saturate.

    Raises ValueError without a plan of this batch, and when the workspace is smaller than the queries (one byte each).
    """
    if prepared is None:
        raise ValueError("fa3 needs prepared=registry.preparer('attn_prefill', spec)(block_table, new, total)")
    if spec.kv == "e4m3" and q.dtype != torch.float8_e4m3fn:
        if workspace.numel() < q.numel():
            raise ValueError(f"workspace of {workspace.numel()} bytes is smaller than {q.numel()} e4m3 queries")
        rounded = workspace[: q.numel()].view(torch.float8_e4m3fn).view_as(q)
        width = spec.q_heads * spec.head_dim
        quant_fp8(QuantSpec(width, "tensor"), q.view(-1, width), rounded.view(-1, width), prepared.plans.one)
        q = rounded
    prepared.attend(q, k_cache, v_cache, out, sm_scale, k_scale, v_scale)


def add_rmsnorm_quant(
    spec: NormSpec, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor, scale: Tensor,
    *, ids: Tensor | None = None, token_scale: Tensor | None = None, channel_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Static per-tensor scale only; the residual is updated in place."""
    flashinfer.fused_add_rmsnorm_quant(out, x.view_as(residual), residual, weight, scale[:1], eps)
