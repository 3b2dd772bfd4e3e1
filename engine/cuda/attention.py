"""Paged attention over the device's cache: prompts of any lengths in one launch, decodes in another."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from checkpoint.config import ModelConfig
from engine.cuda.cache import LayerCache
from engine.cuda.inputs import Queries, in_segments
from engine.cuda.transformer import Asked, Attend
from engine.cuda.upload import upload_all
from engine.cuda.weights import Sight
from kernels.registry import Registry
from kernels.specs import AttnSpec, KVDtype

# Room for two float16 copies of the keys and values of a batch of prompts: with it prefill attention is a quarter
# faster (docs/kernels.md).
_MAX_WORKSPACE_NBYTES = 512 << 20
# Published states of decode attention, see kernels.triton.attn_decode.workspace_nbytes.
_STATES, _COUNTERS_NBYTES, _ROWS = 2560, 32 << 10, 16

Prepare = Callable[..., Any]
"""kernels.registry.Registry.preparer"""


def decode_workspace(config: ModelConfig, max_num_seqs: int, device: torch.device) -> Tensor:
    """Zeros, as both decode operations want it. For up to 16 query heads to a KV head."""
    states = max(_STATES, 4 * max_num_seqs * config.num_kv_heads)
    nbytes = _COUNTERS_NBYTES + states * _ROWS * (config.head_dim + 2) * 4
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


class DeviceAttention:
    """`takes_e4m3`: prompts' queries are to be e4m3, unscaled (kernels.specs.RopeSpec)."""

    def __init__(
        self,
        config: ModelConfig,
        registry: Registry,
        kv: KVDtype,
        block_size: int,
        max_tokens: int,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        """`max_tokens`: of all the sequences of a batch of prompts, contexts included, that the workspace is for."""
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self._scale, self._segment, self._block_size = config.head_dim**-0.5, config.segment, block_size
        self._pages = torch.arange(config.segment // block_size, device=device)
        specs = {window: AttnSpec(*heads, block_size, kv, window, config.sinks) for window in {0, config.window}}
        self.takes_e4m3 = kv == "e4m3" and all(
            registry.resolve("attn_prefill", spec).impl.takes_e4m3 for spec in specs.values()
        )
        self._prefills = {window: registry.get("attn_prefill", spec) for window, spec in specs.items()}
        # A plan lasts until its preparer makes the next one: whole prompts and their segments have one each.
        self._preparers, self._segment_preparers = (
            {window: registry.preparer("attn_prefill", spec) for window, spec in some.items()}
            for some in (specs, specs if self._segment else {})
        )
        self._decodes = {window: registry.get("attn_decode", spec) for window, spec in specs.items()}
        # The copies, or FlashInfer's e4m3 queries, which are more bytes where many heads share a key.
        token_nbytes = max(4 * config.num_kv_heads, config.num_heads) * config.head_dim
        nbytes = min(_MAX_WORKSPACE_NBYTES, token_nbytes * max_tokens)
        self._prefill_space = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._decode_space = decode_workspace(config, max_num_seqs, device)

    @property
    def is_cut(self) -> bool:
        """Whether there are segments: some layers' tables are parts of a sequence's."""
        return self._segment > 0

    def of_prompts(self, queries: Queries) -> Attend:
        """Until another is made: they share the plans of the kernels that want one of a batch."""
        whole = self._of_prompts(queries, self._preparers)
        if not self._segment or queries.lengths.max() <= self._segment:
            return whole
        cut = in_segments(queries, self._segment, self._block_size)
        return _by_sight(whole, self._of_prompts(cut, self._segment_preparers))

    def _of_prompts(self, queries: Queries, preparers: Mapping[int, Prepare]) -> Attend:
        arrays = queries.tables, queries.lengths, queries.q_starts, queries.kv_starts
        tables, lengths, q_starts, kv_starts = upload_all(arrays, self._prefill_space.device)
        counts, totals = queries.counts.tolist(), queries.lengths.tolist()
        prepared = {window: prepare(tables, counts, totals) for window, prepare in preparers.items()}
        max_q, max_kv = max(counts), max(totals)

        def attend(asked: Asked, cache: LayerCache, out: Tensor, sight: Sight) -> None:
            self._prefills[sight.window](
                asked.of_prompts, cache.keys, cache.values, tables, lengths, q_starts, kv_starts, out,
                self._prefill_space, max_q=max_q, max_kv=max_kv, sm_scale=self._scale, prepared=prepared[sight.window],
                k_scale=cache.k_scale, v_scale=cache.v_scale, sinks=sight.sinks,
            )  # fmt: skip

        return attend

    def of_decodes(self, tables: Tensor, lengths: Tensor, max_len: int) -> Attend:
        """`max_len` chooses how it is launched; any length is computed right where there are no segments, up to
        `max_len` where there are. Reads `lengths` on the device for these: to be asked anew for each step.
        """
        whole = self._of_decodes(tables, lengths, max_len)
        if not self._segment or max_len <= self._segment:
            return whole
        index = (lengths - 1) // self._segment
        columns = (index[:, None] * len(self._pages) + self._pages).clamp_(max=tables.shape[1] - 1)
        cut = self._of_decodes(tables.gather(1, columns), lengths - index * self._segment, self._segment)
        return _by_sight(whole, cut)

    def _of_decodes(self, tables: Tensor, lengths: Tensor, max_len: int) -> Attend:
        def attend(asked: Asked, cache: LayerCache, out: Tensor, sight: Sight) -> None:
            self._decodes[sight.window](
                asked.plain, cache.keys, cache.values, tables, lengths, out, self._decode_space, sm_scale=self._scale,
                max_len=max_len, k_scale=cache.k_scale, v_scale=cache.v_scale, sinks=sight.sinks,
            )  # fmt: skip

        return attend


def in_two(decodes: Attend, count: int, prompts: Attend) -> Attend:
    """Of `count` rows of decodes, which know their own, and of prompts in those behind."""

    def attend(asked: Asked, cache: LayerCache, out: Tensor, sight: Sight) -> None:
        decodes(asked, cache, out, sight)
        if count < len(out):  # of the last layer there may be none
            prompts(asked[count:], cache, out[count:], sight)

    return attend


def _by_sight(whole: Attend, cut: Attend) -> Attend:
    def attend(asked: Asked, cache: LayerCache, out: Tensor, sight: Sight) -> None:
        (cut if sight.in_segments else whole)(asked, cache, out, sight)

    return attend
